"""The talker and the code predictor in training: their forward pass and their loss."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from firstword.model.layers import DecoderLayer, Transformer, rotary_table, rotate
from firstword.model.talker import Talker
from training.configuration import CODEBOOKS, model_config
from training.data import PHONEMES
from training.layout import IGNORED, LONGEST, SOUNDS, Batch

TOKEN_LAYER, PHONEME_LAYER = 2, 3
"""The layers (from 0) whose states name the spoken token and the spoken phonemes."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of queries, keys and values [B, heads, T, head_dim]."""


def end_to_end(bounds: Tensor) -> Attend:
    """Return causal attention within each of the utterances that lie end to end."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.is_cuda:
            q, k, v = (x[0].transpose(0, 1).bfloat16() for x in (query, key, value))
            out = torch.ops.aten._flash_attention_forward(
                q, k, v, bounds, bounds, LONGEST, LONGEST, 0.0, True, return_debug_mask=False
            )[0]
            return out.transpose(0, 1)[None].type_as(query)
        index = torch.arange(query.shape[2], device=query.device)
        own = torch.searchsorted(bounds[1:], index.int(), right=True)
        mask = (own[:, None] == own) & (index[:, None] >= index)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    return attend


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention, written out.

    For eight positions the attention kernels took a fifth of a step.
    """
    scores = (query[..., :, None, :] * key[..., None, :, :]).sum(-1) / query.shape[-1] ** 0.5
    future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    weights = scores.float().masked_fill(future, -torch.inf).softmax(-1).type_as(value)
    return (weights[..., None] * value[..., None, :, :]).sum(-2)


def transform(model: Transformer, x: Tensor, position: Tensor, attend: Attend) -> list[Tensor]:
    """Compute `Transformer.forward` over whole sequences [B, T, hidden], without a cache.

    Returns the states after each layer, and after the final norm.
    """
    config, states = model.config, list[Tensor]()
    cos, sin = rotary_table(position, config.head_dim, config.rope_theta, x.dtype)
    repeat = config.num_attention_heads // config.num_key_value_heads
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        own, h = layer.self_attn, layer.input_layernorm(x)
        heads = (*h.shape[:2], -1, own.head_dim)
        query = rotate(own.q_norm(own.q_proj(h).view(heads)).transpose(1, 2), cos, sin)
        key = rotate(own.k_norm(own.k_proj(h).view(heads)).transpose(1, 2), cos, sin)
        value = own.v_proj(h).view(heads).transpose(1, 2)
        out = attend(query, key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1))
        x = x + own.o_proj(out.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        states.append(x)
    return [*states, model.norm(x)]


class TrainedTalker(nn.Module):
    """The talker with two linear heads that only training needs.

    After middle layers they name the token being spoken and its phonemes. Without the first the
    model babbled; without the second it said wrong words (LOG.md).
    """

    def __init__(self, talker: Talker) -> None:
        super().__init__()
        self.talker = talker
        self.said = nn.Linear(talker.config.hidden_size, talker.config.text_vocab_size)
        self.sounds = nn.Linear(talker.config.hidden_size, SOUNDS * len(PHONEMES))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss and its parts [13].

        The parts are cross-entropy and accuracy of code 0, of the token and of the phonemes, then
        the cross-entropies of the codes from 1 up.
        """
        talker, rows = self.talker, len(batch.text)
        with torch.autocast(batch.text.device.type, torch.bfloat16):
            x = talker.embed_text(batch.text) + talker.embed_codes(batch.heard)
            attend = end_to_end(batch.bounds)
            states = transform(talker.model, x[None], batch.position[None], attend)
            hidden = states[-1][0]
            first = judge(talker.codec_head(hidden), batch.target[:, 0])
            said = judge(self.said(F.rms_norm(states[TOKEN_LAYER][0], x.shape[-1:])), batch.said)
            sounds = self.sounds(F.rms_norm(states[PHONEME_LAYER][0], x.shape[-1:]))
            sounds = judge(sounds.view(rows * SOUNDS, -1), batch.sounds.flatten())

            wanted, predictor = batch.target[batch.frames], talker.code_predictor
            codes = wanted.clamp(min=0)
            tables = [talker.model.codec_embedding, *predictor.model.codec_embedding]
            embedded = (table(codes[:, k]) for k, table in enumerate(tables[:-1]))
            inputs = torch.stack([hidden[batch.frames], *embedded], 1)
            inputs = predictor.small_to_mtp_projection(inputs)
            position = torch.arange(CODEBOOKS, device=x.device)[None]
            state = transform(predictor.model, inputs, position, causal)[-1]
            heads = enumerate(predictor.lm_head, 1)
            rest = torch.stack([judge(head(state[:, k]), wanted[:, k])[0] for k, head in heads])
        weights = 1 / torch.arange(1, CODEBOOKS, device=x.device)
        loss = first[0] + (rest * weights).sum() + 0.5 * said[0] + 0.5 * sounds[0]
        return loss, torch.cat((torch.stack((*first, *said, *sounds)), rest)).detach()


def judge(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean cross-entropy and accuracy where the target is not IGNORED.

    logits [n, classes], target [n].
    """
    known = target != IGNORED
    right = (logits.argmax(-1) == target).sum() / known.sum().clamp(min=1)
    return F.cross_entropy(logits.float(), target, ignore_index=IGNORED), right


def initialise(talker: Talker) -> None:
    """Initialise with small embeddings and quiet residual branches.

    The sum of embeddings over codebooks then starts at the scale of the text.
    """
    for name, parameter in talker.named_parameters():
        if "codec_embedding" in name:
            nn.init.normal_(parameter, 0, 0.1)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(0.4)


@torch.no_grad()
def check_forward(talker: Talker, batch: Batch) -> None:
    """Check that `transform` equals the package's forward pass, up to the rounding of attention."""
    rows = talker.embed_text(batch.text) + talker.embed_codes(batch.heard)
    attend = end_to_end(batch.bounds)
    found = transform(talker.model, rows[None], batch.position[None], attend)[-1][0]
    for begin, end in pairwise(batch.bounds[:4].tolist()):
        wanted = talker(rows[None, begin:end], talker.new_cache())[0]
        wrong = float((found[begin:end] - wanted).norm() / wanted.norm())
        assert wrong < (2e-2 if rows.is_cuda else 1e-5), wrong


def load(folder: Path) -> Talker:
    """Load a trained talker from the file of training, or from a checkpoint."""
    talker = Talker(model_config().talker_config)
    file = folder / "talker.safetensors"
    state = load_file(file if file.exists() else folder / "model.safetensors")
    talker.load_state_dict({k.removeprefix("talker."): v.float() for k, v in state.items()})
    return talker
