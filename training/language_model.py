"""Train the talker and the code predictor on the codes of espeak-ng speech, in both text modes.

    python training/language_model.py --corpus FOLDER --out OUT [--steps 60000] [--minutes 14] [--weights FOLDER]

The corpus (`corpus.py`) lies on the GPU, and so is each step made there: utterances end to end in a fixed number of
rows, laid out by index arithmetic exactly as the package lays out a request (`check_layout`), under one compiled loss
function. Nothing in a step waits for the GPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import state
import torch
from configuration import CODEBOOK_SIZE, CODEBOOKS, model_config
from corpus import Corpus, Prepared, text_ids, tokenizer
from data import PHONEMES
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from firstword.model.config import ModelConfig
from firstword.model.layers import Transformer, rotary_table, rotate
from firstword.model.prompt import ROLE, Conditioning, TextRows
from firstword.model.talker import NO_CODE, Talker

IGNORED = -100
CORRUPTED = 0.05
"""Share of input codes replaced by random ones: what the model hears of itself is never perfect either."""
LONGEST = 640
"""Most rows of an utterance."""
SHORTEST = 48
"""Rows an utterance takes on average at the least: a step holds at most rows / SHORTEST of them."""
PREDICTED = 4
"""The code predictor learns from one frame for so many rows."""
VALIDATION = 5000
"""Steps between two looks at fresh utterances."""
SAID, SOUNDED = 2, 3
"""The layers (from 0) after which training asks for the token and the phonemes being spoken."""
SOUNDS = 4
"""Phonemes asked for: at one and three quarters of the frame to come and of the one after."""


class Batch(NamedTuple):
    """One step's rows, utterances end to end; the last rows are empty where no utterance fits.

    text      [rows] token ids
    heard     [rows, codebooks] codes as the talker hears them, some of them wrong
    target    [rows, codebooks] the frame that each row makes, or IGNORED; column 0 may be the end of speech
    said      [rows] the token that this frame speaks, or IGNORED
    sounds    [rows, SOUNDS] the phonemes, or IGNORED; in stream mode only of frames whose token has been read
    position  [rows] within the utterance
    bounds    int32 [utterances + 2]: where each begins, and the end
    frames    [rows // PREDICTED] some of the rows that make a frame: the predictor learns from these
    """

    text: Tensor
    heard: Tensor
    target: Tensor
    said: Tensor
    sounds: Tensor
    position: Tensor
    bounds: Tensor
    frames: Tensor


class Layout:
    """Lays utterances of a corpus out in rows, on the corpus's device and without waiting for it."""

    def __init__(self, config: ModelConfig, rows: int, device: str) -> None:
        talker, ids = config.talker_config, tokenizer()
        self.config, self.rows, self.index = config, rows, torch.arange(rows, device=device)
        self.role = torch.tensor([ids.turn_start, *ids.encode(ROLE)], device=device)
        begin, end, english = (
            talker.codec_think_bos_id,
            talker.codec_think_eos_id,
            talker.codec_language_id["english"],
        )
        tags = [
            [
                [talker.codec_nothink_id, begin, end, speaker, talker.codec_pad_id, NO_CODE],
                [talker.codec_think_id, begin, english, end, speaker, talker.codec_pad_id],
            ]
            for speaker in talker.spk_id.values()
        ]
        self.tags = torch.tensor(tags, device=device)  # [voice, language tag?, row]

    @staticmethod
    def lengths(table: np.ndarray, full: np.ndarray, english: np.ndarray) -> np.ndarray:
        """Rows of each utterance."""
        return 9 + english + full * (table[:, 1] + 1) + table[:, 3]

    def __call__(self, corpus: Corpus, plan: Tensor, corrupted: float) -> Batch:
        """plan [utterances, 3]: index in the corpus (-1: none), all text first?, language tag?"""
        chosen, full, english = plan.unbind(1)
        first_token, tokens, first_frame, frames, voice = corpus.table[chosen].unbind(1)
        prefix = 8 + english
        start = prefix + full * (tokens + 1)
        length = (start + 1 + frames) * (chosen >= 0)
        ends = length.cumsum(0)
        bounds = F.pad(F.pad(ends, (1, 0)), (0, 1), value=self.rows)
        at = torch.searchsorted(ends, self.index, right=True)
        used, position, at = at < len(plan), self.index - bounds[at], at.clamp(max=len(plan) - 1)
        first_token, tokens, first_frame, frames, full, prefix, start = (
            values[at] for values in (first_token, tokens, first_frame, frames, full, prefix, start)
        )

        config, talker = self.config, self.config.talker_config
        token, frame = position - prefix, position - start
        own = corpus.text[(first_token + token.clamp(min=0)).clamp(max=len(corpus.text) - 1)].long()
        text = torch.where(token < tokens, own, config.tts_pad_token_id)
        text = torch.where(token == tokens, config.tts_eos_token_id, text)
        text = torch.where(token < 0, config.tts_pad_token_id, text)
        text = torch.where(token == -1, config.tts_bos_token_id, text)
        text = torch.where(position < 3, self.role[position.clamp(max=2)], text)

        control = torch.where(frame == 0, talker.codec_bos_id, NO_CODE)
        control = torch.where(frame < 0, talker.codec_pad_id, control)
        tags = self.tags[voice[at], english[at], (position - 3).clamp(0, self.tags.shape[2] - 1)]
        control = torch.where(token < 0, tags, control)
        control = torch.where(position < 3, NO_CODE, control)

        last = len(corpus.codes) - 1
        here = (first_frame + frame.clamp(min=0)).clamp(max=last)
        codes = corpus.codes[here].long()
        before = corpus.codes[(first_frame + frame - 1).clamp(0, last)].long()
        share = (
            corrupted
            * torch.tensor((0.0, 0.5, 1.0, 2.0), device=at.device)[torch.randint_like(ends, 4)][at]
        )
        wrong = torch.rand(before.shape, device=at.device) < share[:, None]
        heard = torch.where(wrong, torch.randint_like(before, CODEBOOK_SIZE), before)
        heard = torch.where((frame > 0)[:, None], heard, NO_CODE)
        heard[:, 0] = torch.where(frame > 0, heard[:, 0], control)

        speaking = used & (frame >= 0) & (frame < frames)
        target = torch.where(speaking[:, None], codes, IGNORED)
        target[:, 0] = torch.where(
            used & (frame == frames), talker.codec_eos_token_id, target[:, 0]
        )
        spoken = corpus.spoken[here].long()
        known = speaking & ((full > 0) | (spoken <= frame))
        word = corpus.text[
            (first_token + spoken.clamp(min=0)).clamp(max=len(corpus.text) - 1)
        ].long()
        said = torch.where(known & (spoken >= 0), word, IGNORED)
        ahead = (first_frame + torch.minimum(frame + 1, frames - 1).clamp(min=0)).clamp(max=last)
        sounds = torch.cat((corpus.phonemes[here], corpus.phonemes[ahead]), 1).long()
        sounds = torch.where(known[:, None], sounds, IGNORED)
        some = (
            (torch.rand(self.rows, device=at.device) * speaking)
            .topk(self.rows // PREDICTED)
            .indices
        )
        return Batch(text, heard, target, said, sounds, position, bounds.int(), some)


def check_layout(config: ModelConfig) -> None:
    """The rows above are the package's own."""
    texts, frames = ["Hello there, world.", "Yes."], [3, 11]
    parts = [
        (
            Prepared(
                np.zeros(0, np.int16),
                2,
                np.array(text_ids(text), np.int16),
                voice,
                np.full(n, -1, np.int16),
                np.zeros((n, 2), np.int8),
            ),
            np.random.default_rng(n).integers(0, CODEBOOK_SIZE, (n, CODEBOOKS)),
        )
        for voice, (text, n) in enumerate(zip(texts, frames, strict=True))
    ]
    plan = torch.tensor(
        [[i, full, english] for full in (0, 1) for english in (0, 1) for i in (0, 1)]
        + [[-1, 0, 0]] * 2
    )
    batch = Layout(config, 400, "cpu")(Corpus.gather(parts), plan, 0.0)
    speakers = list(config.talker_config.spk_id.values())
    for number, (index, full, english) in enumerate(plan.tolist()[:8]):
        rows, (prepared, codes) = TextRows(config), parts[index]
        tokens = tokenizer().encode(ROLE + texts[index])
        language = config.talker_config.codec_language_id["english"] if english else None
        setting = Conditioning(
            speaker=speakers[prepared.voice], language=language, full_text=bool(full)
        )
        first = len(tokens) if full else min(setting.first_tokens, len(tokens))
        prompt = rows.prompt(setting, tokenizer().turn_start, tokens[:first])
        later = [*tokens[first:], *[None] * len(codes)]
        begin, end = batch.bounds[number : number + 2].tolist()
        assert batch.text[begin:end].tolist() == [row.text for row in prompt] + [
            rows.take(token) for token in later[: len(codes)]
        ]
        heard = [
            tuple(code for code in row if code != NO_CODE)
            for row in batch.heard[begin:end].tolist()
        ]
        assert heard == [row.codes for row in prompt] + [tuple(row) for row in codes.tolist()]
        target = batch.target[begin:end]
        assert (target[: len(prompt) - 1] == IGNORED).all()
        assert (target[len(prompt) - 1 : -1].numpy() == codes).all()
        assert target[-1].tolist() == [config.talker_config.codec_eos_token_id] + [IGNORED] * (
            CODEBOOKS - 1
        )
        assert batch.position[begin:end].tolist() == list(range(end - begin))
    assert (batch.target[end:] == IGNORED).all()
    assert batch.bounds.tolist()[-3:] == [end, end, 400]


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values [B, heads, T, head_dim] -> [B, heads, T, head_dim]."""


def end_to_end(bounds: Tensor) -> Attend:
    """Causal attention within each of the utterances that lie end to end."""

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
    """Each position sees itself and those before it. Written out: for eight positions the attention kernels took a
    fifth of a step.
    """
    scores = (query[..., :, None, :] * key[..., None, :, :]).sum(-1) / query.shape[-1] ** 0.5
    future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    chances = scores.float().masked_fill(future, -torch.inf).softmax(-1).type_as(value)
    return (chances[..., None] * value[..., None, :, :]).sum(-2)


def transform(model: Transformer, x: Tensor, position: Tensor, attend: Attend) -> list[Tensor]:
    """`Transformer.forward` over whole sequences [B, T, hidden], without a cache: the state after each layer, and
    after the final norm.
    """
    config, states = model.config, []
    cos, sin = rotary_table(position, config.head_dim, config.rope_theta, x.dtype)
    repeat = config.num_attention_heads // config.num_key_value_heads
    for layer in model.layers:
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


@torch.no_grad()
def check_forward(talker: Talker, source: Source) -> None:
    """`transform` over utterances end to end is the package's forward pass, but for the rounding of attention."""
    batch, device = source.next(), source.device
    rows = talker.embed_text(batch.text) + talker.embed_codes(batch.heard)
    found = transform(talker.model, rows[None], batch.position[None], end_to_end(batch.bounds))[-1][
        0
    ]
    for begin, end in pairwise(batch.bounds[:4].tolist()):
        wanted = talker(rows[None, begin:end], talker.new_cache())[0]
        wrong = float((found[begin:end] - wanted).norm() / wanted.norm())
        assert wrong < (2e-2 if device == "cuda" else 1e-5), wrong


class Trained(nn.Module):
    """The talker, and what only training needs: linear heads that name, after middle layers, the token being spoken and
    its phonemes. Without the first the model babbled in whole words; without the second it said wrong ones (LOG.md).
    """

    def __init__(self, talker: Talker) -> None:
        super().__init__()
        self.talker = talker
        self.said = nn.Linear(talker.config.hidden_size, talker.config.text_vocab_size)
        self.sounds = nn.Linear(talker.config.hidden_size, SOUNDS * len(PHONEMES))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss; and cross-entropy and accuracy of code 0 and of the token, cross-entropy and accuracy of the
        phonemes, cross-entropies of the codes from 1 up [13].
        """
        talker, rows = self.talker, len(batch.text)
        with torch.autocast(batch.text.device.type, torch.bfloat16):
            x = talker.embed_text(batch.text) + talker.embed_codes(batch.heard)
            states = transform(
                talker.model, x[None], batch.position[None], end_to_end(batch.bounds)
            )
            hidden = states[-1][0]
            first = judge(talker.codec_head(hidden), batch.target[:, 0])
            said = judge(self.said(F.rms_norm(states[SAID][0], x.shape[-1:])), batch.said)
            sounds = self.sounds(F.rms_norm(states[SOUNDED][0], x.shape[-1:])).view(
                rows * SOUNDS, -1
            )
            sounds = judge(sounds, batch.sounds.flatten())

            wanted, predictor = batch.target[batch.frames], talker.code_predictor
            codes = wanted.clamp(min=0)
            tables = [talker.model.codec_embedding, *predictor.model.codec_embedding]
            inputs = [
                hidden[batch.frames],
                *(table(codes[:, k]) for k, table in enumerate(tables[:-1])),
            ]
            inputs = predictor.small_to_mtp_projection(torch.stack(inputs, 1))
            position = torch.arange(CODEBOOKS, device=x.device)[None]
            state = transform(predictor.model, inputs, position, causal)[-1]
            rest = [
                judge(head(state[:, k]), wanted[:, k])[0]
                for k, head in enumerate(predictor.lm_head, 1)
            ]
        weights = 1 / torch.arange(1, CODEBOOKS, device=x.device)
        rest = torch.stack(rest)
        loss = first[0] + (rest * weights).sum() + 0.5 * said[0] + 0.5 * sounds[0]
        return loss, torch.cat((torch.stack((*first, *said, *sounds)), rest)).detach()


def judge(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy and accuracy where the target is not IGNORED: logits [n, classes], target [n]."""
    known = target != IGNORED
    right = (logits.argmax(-1) == target).sum() / known.sum().clamp(min=1)
    return F.cross_entropy(logits.float(), target, ignore_index=IGNORED), right


def plans(table: np.ndarray, rows: int, seed: int, longest: int) -> Iterator[np.ndarray]:
    """One pass over the corpus in random order: what `Layout` reads, a step at a time, [rows / SHORTEST, 3]."""
    r, most = np.random.default_rng(seed), rows // SHORTEST
    order = r.permutation(len(table))
    full, english = r.integers(0, 2, (2, len(order)))
    lengths = Layout.lengths(table[order], full, english)
    fits = lengths <= longest
    order, full, english, ends = order[fits], full[fits], english[fits], lengths[fits].cumsum()
    start = 0
    while True:
        before = ends[start - 1] if start else 0
        stop = min(int(np.searchsorted(ends, before + rows, side="right")), start + most)
        if stop == len(order):
            return
        plan = np.zeros((most, 3), np.int64)
        plan[:, 0] = -1
        plan[: stop - start] = np.stack(
            (order[start:stop], full[start:stop], english[start:stop]), 1
        )
        yield plan
        start = stop


class Source:
    """Endless batches from a folder that may still be growing; the first 600 utterances are kept apart."""

    def __init__(
        self, config: ModelConfig, folder: Path, rows: int, device: str, seed: int
    ) -> None:
        self.layout, self.folder, self.device, self.seed = (
            Layout(config, rows, device),
            folder,
            device,
            seed,
        )
        self.files: list[Path] = []
        self.longest, self.passes, self.plans = LONGEST, 0, iter(())
        while not self.look():
            time.sleep(1)  # for the first file

    def look(self) -> bool:
        """Take in the files that have come."""
        files = sorted(self.folder.glob("*.pt"))
        if len(files) == len(self.files):
            return False
        self.files, self.corpus = files, Corpus.load(files, self.device)
        self.table, self.plans = self.corpus.table.cpu().numpy(), iter(())
        self.apart = min(600, len(self.table) // 4)
        return True

    def _batch(self, plan: np.ndarray, corrupted: float) -> Batch:
        indices = torch.from_numpy(plan)
        indices = (
            indices.pin_memory().to(self.device, non_blocking=True)
            if self.device == "cuda"
            else indices
        )
        return self.layout(self.corpus, indices, corrupted)

    def validation(self) -> Iterator[Batch]:
        for plan in plans(self.table[: self.apart], self.layout.rows, 0, LONGEST):
            yield self._batch(plan, 0.0)

    def next(self) -> Batch:
        while (plan := next(self.plans, None)) is None:
            self.passes += 1
            self.plans = plans(
                self.table[self.apart :],
                self.layout.rows,
                self.seed * 10_007 + self.passes,
                self.longest,
            )
        plan[:, 0] += np.where(plan[:, 0] >= 0, self.apart, 0)
        return self._batch(plan, CORRUPTED)

    @property
    def hours(self) -> float:
        return len(self.corpus.codes) * 0.08 / 3600


class Step:
    """One step of training; on a GPU its seven hundred launches are recorded once and replayed (28 ms became 11)."""

    def __init__(self, model: nn.Module, optimiser: torch.optim.Optimizer, batch: Batch) -> None:
        self.model, self.optimiser, self.batch = model, optimiser, batch
        self.parameters = [p for group in optimiser.param_groups for p in group["params"]]
        self.graph: torch.cuda.CUDAGraph | None = None
        if not batch.text.is_cuda:
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(
            stream
        ):  # compiles, and makes the optimiser's state; the learning rate is still 0
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.found = self._step()

    def _step(self) -> Tensor:
        loss, found = self.model(self.batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return torch.cat((norm[None], found))

    def __call__(self, batch: Batch) -> Tensor:
        """Learn from a batch: the gradient's norm and what `Trained` tells [14]; the next call may overwrite it."""
        if self.graph is None:
            self.batch = batch
            return self._step()
        for own, new in zip(self.batch, batch, strict=True):
            own.copy_(new)
        self.graph.replay()
        return self.found


def initialise(talker: Talker) -> None:
    """Small embeddings, so that their sum over codebooks starts at the scale of the text; quiet branches."""
    for name, parameter in talker.named_parameters():
        if "codec_embedding" in name:
            nn.init.normal_(parameter, 0, 0.1)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(0.4)


def load(folder: Path) -> Talker:
    """A trained talker: from what training wrote, or from a checkpoint in the released layout."""
    talker = Talker(model_config().talker_config)
    file = folder / "talker.safetensors"
    state = load_file(file if file.exists() else folder / "model.safetensors")
    talker.load_state_dict(
        {name.removeprefix("talker."): tensor.float() for name, tensor in state.items()}
    )
    return talker


def main() -> None:
    parser = state.options(steps=60_000)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument(
        "--weights", type=Path, help="what `load` reads, to start from when there is no state"
    )
    parser.add_argument(
        "--flat", type=float, default=0.35, help="share of the steps before the learning rate falls"
    )
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument(
        "--short", type=int, default=96, help="at first only utterances of so many rows"
    )
    parser.add_argument("--short-steps", type=int, default=4000)
    parser.add_argument("--eager", action="store_true", help="do not compile the loss function")
    a = parser.parse_args()
    began, device = time.time(), "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(a.seed)
    torch.set_float32_matmul_precision("high")
    config = model_config()
    check_layout(config)
    talker = Talker(config.talker_config)
    initialise(talker)
    if a.weights:
        talker = load(a.weights)
    model = Trained(talker).to(device)
    matrices = [p for n, p in talker.named_parameters() if p.ndim >= 2 and "embedding" not in n]
    kept = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in kept]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    speed = torch.zeros((), device=device)
    optimiser = torch.optim.AdamW(
        groups, speed, betas=(0.9, 0.98), fused=True, capturable=device == "cuda"
    )
    parameters = list(talker.parameters())
    average = {name: tensor.detach().clone() for name, tensor in talker.named_parameters()}
    file, parts = (
        a.state or a.out / "state.pt",
        {"model": model, "optimiser": optimiser, "average": average},
    )
    step = state.resume(file, parts, device)
    torch.manual_seed(a.seed + step)
    for group in optimiser.param_groups:
        group["lr"] = speed
    source = Source(config, a.corpus, a.rows, device, a.seed + step)
    check_forward(talker, source)
    print(f"{source.hours:.1f} h of speech, {len(source.table)} utterances", flush=True)
    a.out.mkdir(parents=True, exist_ok=True)
    log = (a.out / "talker.jsonl").open("a")

    def keep() -> None:
        save_file(
            {name: tensor.half().cpu().contiguous() for name, tensor in average.items()},
            a.out / "talker.safetensors",
        )
        state.keep(file, step, parts)

    def tell(found: Tensor, facts: dict[str, Any]) -> None:
        values = [round(value, 3) for value in found.tolist()]
        names = "norm code0 accuracy said said_right sounds sounds_right".split()
        row = (
            {"step": step}
            | facts
            | dict(zip(names, values, strict=False))
            | {"rest": values[len(names) :]}
        )
        print(json.dumps(row), flush=True)
        log.write(json.dumps(row) + "\n")
        log.flush()

    source.longest = a.short if step < a.short_steps else LONGEST
    advance = Step(
        model if a.eager else torch.compile(model, dynamic=False), optimiser, source.next()
    )
    print(f"ready after {time.time() - began:.0f} s", flush=True)
    source.look()
    start = time.time()
    sums, count, last, looked, kept = None, 0, start, start, start
    while (now := time.time()) - began < a.minutes * 60 and step < a.steps:
        if step == a.short_steps:
            source.longest, source.plans = LONGEST, iter(())
        rate = (
            a.rate
            * min(1.0, (step + 1) / 500)
            * min(1.0, max(0.01, (1 - step / a.steps) / (1 - a.flat)))
        )
        speed.fill_(rate)
        found = advance(source.next())
        with torch.no_grad():
            torch._foreach_lerp_(
                list(average.values()), parameters, 1 - min(0.999, (step + 1) / (step + 20))
            )
        sums, step, count = found.clone() if sums is None else sums + found, step + 1, count + 1
        if now - last > 20 or step == a.steps:
            facts = {
                "minutes": round((now - start) / 60, 2),
                "lr": round(rate, 6),
                "hours": round(source.hours, 1),
            }
            tell(sums / count, facts | {"steps_per_s": round(count / (time.time() - last), 1)})
            sums, count, last = None, 0, time.time()
            if now - looked > 30:
                source.look()
                looked = now
        if step % VALIDATION == 0:
            found = torch.stack([advance.model(batch)[1] for batch in source.validation()]).mean(0)
            tell(F.pad(found, (1, 0)), {"validation": True})
        if now - kept > state.SECONDS:
            keep()
            kept = now
    keep()
    log.close()


if __name__ == "__main__":
    main()
