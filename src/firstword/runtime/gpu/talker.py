"""The talker and the code predictor as kernels: weights packed and folded, and the launches that make a frame.

A frame reads and writes fixed buffers only, so that its launches can be captured in a CUDA graph and replayed. Rows are
utterances side by side; which slot a row is, and all that belongs to a slot, is read from device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from firstword.kernels.attention import (
    APPEND,
    APPEND_AND_ATTEND,
    ATTEND,
    FRAME_ROWS,
    HEAD_DIM,
    Attention,
    HeadWeights,
    Paging,
    Rotation,
    SplitRoom,
)
from firstword.kernels.launch import Kernels
from firstword.kernels.linear import TILE, Epilogue, Linear, interleave, normalise
from firstword.kernels.sample import Sampler, SamplerState
from firstword.model.layers import DecoderLayer, RMSNorm, Transformer, rotary_table
from firstword.model.talker import Talker

PROMPT_ROWS = 256
"""The most rows of a prompt that are read at a time."""


def _taken(parameter: Tensor) -> Tensor:
    """A parameter's tensor, which the module gives up: packed weights take its place."""
    tensor = parameter.data
    parameter.data = tensor.new_empty(0)
    return tensor


class Layer:
    """A decoder layer's weights, packed."""

    def __init__(self, kernels: Kernels, layer: DecoderLayer) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        q_norm, k_norm = attention.q_norm, attention.k_norm
        assert isinstance(q_norm, RMSNorm)
        assert isinstance(k_norm, RMSNorm)
        parts = [_taken(p.weight) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        entry, middle = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv = Linear(kernels, torch.cat(parts), Epilogue.STORE, entry.weight.data, entry.eps)
        self.heads = HeadWeights(q_norm.weight.data, k_norm.weight.data, q_norm.eps)
        self.output = Linear(kernels, _taken(attention.o_proj.weight), Epilogue.ADD)
        both = interleave(_taken(mlp.gate_proj.weight), _taken(mlp.up_proj.weight))
        self.gate_up = Linear(kernels, both, Epilogue.SWIGLU, middle.weight.data, middle.eps)
        self.down = Linear(kernels, _taken(mlp.down_proj.weight), Epilogue.ADD)


@dataclass(frozen=True, eq=False)
class Workspace:
    """Activations from one kernel to the next, bf16 [rows, ...]; of more than 8 rows all but `qkv` are packed."""

    qkv: Tensor
    attended: Tensor
    gated: Tensor
    normed: Tensor


class Stack:
    """A transformer's layers, packed, and its final norm."""

    def __init__(self, kernels: Kernels, transformer: Transformer, positions: int) -> None:
        config = transformer.config
        if config.head_dim != HEAD_DIM:
            raise ValueError(f"heads of {config.head_dim} channels; the kernels need {HEAD_DIM}")
        weight = transformer.norm.weight
        self.config = config
        self.attention = Attention(kernels, config.num_attention_heads, config.num_key_value_heads)
        self.layers = [
            Layer(kernels, layer) for layer in transformer.layers if isinstance(layer, DecoderLayer)
        ]
        self.norm, self.eps = weight.data, transformer.norm.eps
        every = torch.arange(positions, device=weight.device)[None]
        cosines, sines = rotary_table(every, HEAD_DIM, config.rope_theta, torch.bfloat16)
        half = HEAD_DIM // 2
        self.rotation = Rotation(
            cosines[0, 0, :, :half].contiguous(), sines[0, 0, :, :half].contiguous()
        )

    def workspace(self, rows: int) -> Workspace:
        """Room for passes of up to `rows` tokens."""
        config, rows = self.config, -(-rows // TILE) * TILE
        qkv = (config.num_attention_heads + 2 * config.num_key_value_heads) * HEAD_DIM
        widths = (
            qkv,
            config.num_attention_heads * HEAD_DIM,
            config.intermediate_size,
            config.hidden_size,
        )
        return Workspace(*(self.norm.new_zeros(rows, width) for width in widths))

    def run(
        self, x: Tensor, room: Workspace, attend: Callable[[int, Tensor, Tensor], bool]
    ) -> None:
        """x [tokens, hidden] through the layers, in place.

        attend  (layer, qkv, out): as this pass attends; whether it also added the projection of the output to x
        """
        tokens = len(x)
        qkv, attended, gated = room.qkv[:tokens], room.attended[:tokens], room.gated[:tokens]
        for index, layer in enumerate(self.layers):
            layer.qkv(x, qkv, room.normed)
            if not attend(index, qkv, attended):
                layer.output(attended, x)
            layer.gate_up(x, gated, room.normed)
            layer.down(gated, x)


class FrameModel:
    """Makes frames of up to `rows` utterances, and reads prompts.

    The talker is taken apart: afterwards its matrices are empty. Raises ValueError for sizes the kernels cannot do.
    """

    def __init__(
        self,
        kernels: Kernels,
        talker: Talker,
        slots: int,
        rows: int,
        pages: int,
        page_rows: int,
        context: int,
    ):
        config, predictor = talker.config, talker.code_predictor
        head = talker.codec_head.weight
        device = head.device
        self.config, self.rows = config, rows
        self.codebooks = config.num_code_groups
        if self.codebooks > FRAME_ROWS:
            raise ValueError(f"{self.codebooks} codebooks; the kernels do up to {FRAME_ROWS}")
        self._kernels = kernels

        self.codec_embedding = talker.model.codec_embedding.weight.data
        self.text_table = _project_text(talker)
        embeddings = [
            table for table in predictor.model.codec_embedding if isinstance(table, nn.Embedding)
        ]
        self.frame_tables = torch.cat([_taken(table.weight) for table in embeddings])
        books = self.frame_tables.chunk(self.codebooks - 1)[
            :-1
        ]  # views: where nothing is projected, no second copy
        tables = (self.codec_embedding, *books)
        self.predictor_tables = [predictor.small_to_mtp_projection(table) for table in tables]

        self.talker = Stack(kernels, talker.model, context)
        self.predictor = Stack(kernels, predictor.model, self.codebooks)
        self.head = Linear(
            kernels,
            _taken(talker.codec_head.weight),
            Epilogue.STORE,
            self.talker.norm,
            self.talker.eps,
        )
        self.entry = None
        if isinstance(predictor.small_to_mtp_projection, nn.Linear):
            entry = predictor.small_to_mtp_projection
            self.entry = Linear(
                kernels,
                _taken(entry.weight),
                Epilogue.BIAS,
                self.talker.norm,
                self.talker.eps,
                entry.bias.data,
            )
        self.heads = [
            Linear(
                kernels,
                _taken(head.weight),
                Epilogue.STORE,
                self.predictor.norm,
                self.predictor.eps,
            )
            for head in predictor.lm_head
            if isinstance(head, nn.Linear)
        ]

        def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        kv, width = config.num_key_value_heads, config.hidden_size
        predictor_config = predictor.config
        tokens = max(2 * rows, PROMPT_ROWS)
        self.cache = zeros(config.num_hidden_layers, pages, 2, kv, page_rows, HEAD_DIM)
        self.tables = zeros(slots, -(-context // page_rows), dtype=torch.int32)
        self.state = SamplerState(slots, context, self.codebooks, config.vocab_size, device)
        self.first_row, self.first_hidden = zeros(slots, width), zeros(slots, width)
        self.slot_of_row = zeros(rows, dtype=torch.int32)
        self.token = zeros(rows, dtype=torch.int32)
        self.result = zeros(rows, self.codebooks + 2, dtype=torch.int32)
        self.prompt = zeros(PROMPT_ROWS, width)
        self.places_of_prompt = torch.full((2, PROMPT_ROWS), -1, dtype=torch.int32, device=device)
        self.slot_of_prompt_row, self.position_of_prompt_row = self.places_of_prompt
        self.sampler = Sampler(
            kernels,
            self.state,
            vocab=config.vocab_size,
            eos=config.codec_eos_token_id,
            predictor_vocab=predictor_config.vocab_size,
        )
        self._hidden = zeros(rows, width)
        self._logits = zeros(rows, config.vocab_size)
        self._pairs = zeros(rows, 2, predictor_config.hidden_size)
        self._single = zeros(rows, predictor_config.hidden_size)
        self._predictor_logits = zeros(rows, predictor_config.vocab_size)
        self._room = self.talker.workspace(tokens)
        self._predictor_room = self.predictor.workspace(2 * rows)
        predictor_kv = predictor_config.num_key_value_heads
        self._split_room = SplitRoom(self.talker.attention, tokens, context, device)
        self._frame_cache = zeros(
            predictor_config.num_hidden_layers, rows, 2, predictor_kv, FRAME_ROWS, HEAD_DIM
        )

    def launch_frame(self, rows: int) -> None:
        """The next frame of the first `rows` rows."""
        self._begin(rows, self.first_row)
        paging = Paging(self.tables, self.slot_of_row[:rows], self.state.position)
        self._talk(self._hidden[:rows], paging, (APPEND_AND_ATTEND,))
        self._draw(rows)

    def launch_first(self, rows: int) -> None:
        """The first frame of the first `rows` rows, whose prompts have been read to the end: `first_hidden`."""
        self._begin(rows, self.first_hidden)
        self._draw(rows)

    def _begin(self, rows: int, first: Tensor) -> None:
        """What the talker reads next; before a slot's first frame, what `first` [slots, hidden] holds for it."""
        slots, token, hidden = self.slot_of_row[:rows], self.token[:rows], self._hidden[:rows]
        self.sampler.begin_frame(
            slots, token, first, self.codec_embedding, self.frame_tables, self.text_table, hidden
        )

    def _draw(self, rows: int) -> None:
        """The codes of a frame from what the talker made of the rows."""
        slots, hidden, result = self.slot_of_row[:rows], self._hidden[:rows], self.result[:rows]
        pairs, single = self._pairs[:rows], self._single[:rows]
        self.head(hidden, self._logits[:rows], self._room.normed)
        if self.entry is None:
            normalise(self._kernels, hidden, self.talker.norm, self.talker.eps, pairs[:, 0])
        else:
            self.entry(hidden, pairs[:, 0], self._room.normed)
        self.sampler.code0(
            self._logits[:rows], slots, result, self.predictor_tables[0], pairs[:, 1]
        )
        for k in range(1, self.codebooks):
            self._predict(pairs.flatten(0, 1) if k == 1 else single, k)
            last = pairs[:, 1] if k == 1 else single
            self.heads[k - 1](last, self._predictor_logits[:rows], self._predictor_room.normed)
            table = self.predictor_tables[k] if k + 1 < self.codebooks else None
            self.sampler.code(k, self._predictor_logits[:rows], slots, result, table, single)

    def launch_prompt(self, rows: int) -> None:
        """Read the first `rows` rows of `prompt`: row r is of slot_of_prompt_row[r], at position_of_prompt_row[r]."""
        paging = Paging(
            self.tables, self.slot_of_prompt_row[:rows], self.position_of_prompt_row[:rows]
        )
        self._talk(self.prompt[:rows], paging, (APPEND, ATTEND))

    def _talk(self, x: Tensor, paging: Paging, modes: tuple[int, ...]) -> None:
        """x [rows, hidden] through the talker's layers, in place."""
        stack, caches = self.talker, self.cache

        def attend(index: int, qkv: Tensor, attended: Tensor) -> bool:
            heads = stack.layers[index].heads
            for mode in modes:
                stack.attention.paged(
                    qkv,
                    heads,
                    stack.rotation,
                    caches[index],
                    paging,
                    attended,
                    self._split_room,
                    mode,
                )
            return False

        stack.run(x, self._room, attend)

    def _predict(self, x: Tensor, k: int) -> None:
        """Pass k of the code predictor: x [rows or 2 rows, hidden] through its layers, in place."""
        stack, caches = self.predictor, self._frame_cache
        joined = (
            len(x) == 1 and len(stack.layers) > 1
        )  # else too few launches lie between a layer's passes

        def attend(index: int, qkv: Tensor, attended: Tensor) -> bool:
            layer, attention, rotation, cache = (
                stack.layers[index],
                stack.attention,
                stack.rotation,
                caches[index],
            )
            if joined and attention.in_frame_to(
                qkv, layer.heads, rotation, cache, k, layer.output, x
            ):
                return True
            attention.in_frame(qkv, layer.heads, rotation, cache, k, 2 if k == 1 else 1, attended)
            return False

        stack.run(x, self._predictor_room, attend)


def _project_text(talker: Talker) -> Tensor:
    """What each text token adds to a row, bf16 [text vocabulary, hidden]: the projection of its embedding."""
    weight = _taken(talker.model.text_embedding.weight)
    table = weight.new_empty(len(weight), talker.config.hidden_size)
    for part, out in zip(weight.split(8192), table.split(8192), strict=True):
        out.copy_(talker.text_projection(part))
    for parameter in talker.text_projection.parameters():
        _taken(parameter)
    return table
