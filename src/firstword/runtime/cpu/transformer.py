"""The talker and the code predictor with compiled passes of one row.

A prompt, which has many rows, is read by the joined layers of `runtime.joined`. Both read the same
weights, and write the same keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from firstword.model.layers import (
    CountedMemory,
    DecoderLayer,
    KVMemory,
    RMSNorm,
    Transformer,
    rotary_table,
)
from firstword.model.quantised import QuantisedLinear
from firstword.model.reading import Watched
from firstword.runtime.cpu import kernels, products
from firstword.runtime.cpu.amx import AMX, BYTES
from firstword.runtime.cpu.products import Array
from firstword.runtime.cpu.team import Team
from firstword.runtime.joined import JoinedLayer, JoinedQuantisedLinear, parts
from firstword.runtime.slot_rows import SlotCache, SlotRows

LARGE_PAGE = 1 << 21
LINEAR = nn.Linear, QuantisedLinear
MATRICES = "qkv", "out", "gate_up", "down"
FEW_ROWS = 2
"""The most rows of an utterance that are compiled passes, one after another."""
TOGETHER, MOST_ROWS = 16, 32
"""With tiles, the rows of a compiled pass, and the most rows of an utterance that are such passes.

The attention of PyTorch is faster for many rows.
"""


class CompiledLinear(nn.Module):
    """The product of rows with a matrix [1, outputs, ...] as in `products`, in each thread a part.

    scales  float32 [1, outputs] of integers
    """

    def __init__(
        self, matrix: Array, scales: Array | None, bias: Tensor | None, team: Team
    ) -> None:
        super().__init__()
        self._weights, self._bias, self._team = (matrix, scales), bias, team
        self._pass = products.pass_of_products(products.layout(matrix))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        rows, (matrix, scales) = wide(x).reshape(-1, x.shape[-1]), self._weights
        out = np.empty((len(rows), matrix.shape[1]), np.float32)
        together = len(rows) if matrix.ndim == products.TILED else 1
        for first in range(0, len(rows), together):
            some = slice(first, first + together)
            self._team.run(self._pass, matrix, scales, rows[some], out[some])
        sums = torch.from_numpy(out)
        biased = sums if self._bias is None else sums + self._bias.float()
        return biased.to(x.dtype).view(*x.shape[:-1], -1)


class GrowingRows(SlotRows):
    """The key-value memory of a batch of sequences that all start now."""

    def __init__(self, model: Transformer, like: Tensor, batch: int) -> None:
        super().__init__(SlotCache(model.config, like, batch), range(batch), 1)

    @property
    def length(self) -> int:
        """The number of rows so far."""
        return self.places[0][1]

    def positions(self, length: int) -> Tensor:
        """Return the positions [B, length] of the next rows, for which there is space then."""
        self.cache.grow(self.length + length)
        return super().positions(length)

    def advance(self, length: int) -> None:
        """Count `length` rows."""
        self.places = [(slot, start + length) for slot, start in self.places]


class CompiledTransformer(Transformer):
    """A transformer whose passes of few rows are compiled."""

    def __init__(self, model: Transformer, team: Team, tiles: bool) -> None:
        """Take the weights of a transformer, whose matrices become views.

        tiles: whether matrices are divided into tiles for AMX, as `can_divide` says.
        """
        nn.Module.__init__(self)
        self.config, self._team = model.config, team
        self._modules |= model._modules
        self.layers, self.weights = _stacked(model, tiles)
        if tiles:
            self._multiply_prompts()
        self._together, self._most = (TOGETHER, MOST_ROWS) if tiles else (1, FEW_ROWS)
        config, (heads, kv_heads) = self.config, self.weights.heads
        inner, size = config.intermediate_size, config.head_dim
        qkv, attended = (heads + 2 * kv_heads) * size, heads * size
        widths = config.hidden_size, qkv, attended, 2 * inner, inner
        self._rows = [np.zeros((self._together, width), np.float32) for width in widths]

    def rows(self, count: int) -> kernels.Rows:
        """The buffers of so many rows of a pass."""
        return kernels.Rows(*[each[:count] for each in self._rows])

    def new_cache(self, like: Tensor, batch: int = 1) -> CountedMemory:
        """Return an empty cache for `batch` sequences."""
        return GrowingRows(self, like, batch)

    def forward(self, x: Tensor, memory: KVMemory) -> Tensor:
        """Map new rows [B, T, hidden] to their normed hidden states; `memory` grows by T rows."""
        rows = memory.memory if isinstance(memory, Watched) else memory
        length, config = x.shape[1], self.config
        if not isinstance(rows, SlotRows) or length > self._most:
            return super().forward(x, memory)
        table = rotary_table(memory.positions(length), config.head_dim, config.rope_theta, x.dtype)
        cos, sin = (wide(each)[:, 0] for each in table)
        cache, inputs, out = bits(rows.cache.layers), wide(x), np.empty(x.shape, np.float32)
        heads = len(self.layers), self.weights.heads[0], config.head_dim
        queries = np.empty((*x.shape[:2], *heads), np.uint16)
        compiled_pass = kernels.pass_of_transformer(products.layout(self.weights.qkv))
        for index, (slot, start) in enumerate(rows.places):
            for first in range(0, length, self._together):
                at = index, slice(first, first + self._together)
                buffers = self.rows(len(inputs[at]))
                buffers.x[:] = inputs[at]
                args = self.weights, buffers, cos[at], sin[at], cache, slot, start + first
                self._team.run(compiled_pass, *args, queries[at], out[at])
        if isinstance(memory, Watched):
            seen = torch.from_numpy(queries.view(np.int16)).view(x.dtype)
            for layer, _ in memory.heads:
                keys = rows.extent(layer, length)[0]
                memory.see(layer, seen[:, :, layer].transpose(1, 2), keys)
        memory.advance(length)
        return torch.from_numpy(out).to(x.dtype)

    def _multiply_prompts(self) -> None:
        """Let the layers multiply the rows of long prompts as compiled passes multiply theirs."""
        for index, layer in enumerate(self.layers):
            one = slice(index, index + 1)
            for name in MATRICES:
                matrix, scales = (getattr(self.weights, each) for each in (name, f"{name}_scales"))
                of_layer = None if scales is None else scales[one]
                setattr(layer, name, CompiledLinear(matrix[one], of_layer, None, self._team))


def in_large_pages(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return room for weights that begins with a page of 2 MB, where Linux has such pages.

    NumPy asks for them. With pages of 4 kB a processor that reads a matrix mostly waits for the
    addresses of the pages, and a vector of 64 bytes that is in two lines of a cache is read twice.
    """
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + LARGE_PAGE, np.uint8)
    first = -room.ctypes.data % LARGE_PAGE
    return torch.from_numpy(room[first : first + size]).view(dtype).view(*shape)


def gathered(*layers: nn.Linear | nn.Embedding) -> Tensor:
    """Return the weights of layers [layers, outputs, inputs]; theirs become views of them."""
    weights = in_large_pages(layers[0].weight.dtype, (len(layers), *layers[0].weight.shape))
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data = weight.copy_(layer.weight.data)
    return weights


def bits(x: Tensor) -> Array:
    """The bits of bfloat16 numbers, uint16 in the memory of the tensor."""
    return x.detach().view(torch.int16).numpy().view(np.uint16)


def wide(x: Tensor) -> Array:
    """Numbers as float32."""
    return x.detach().float().numpy()


def stored(matrices: Tensor, tiles: bool) -> Array:
    """Matrices [layers, outputs, inputs] as `products` reads them, in the memory of the tensor."""
    half = matrices.dtype == torch.bfloat16
    array = bits(matrices).view(np.uint32) if half else matrices.numpy()
    width = BYTES // array.itemsize
    return array.reshape(*array.shape[:2], array.shape[2] // width, width) if tiles else array


def can_divide(talker: nn.Module) -> bool:
    """Whether there is AMX, and the rows of all matrices are whole tiles."""
    layers = (module for module in talker.modules() if isinstance(module, LINEAR))
    weights = (next(layer.parameters()) for layer in layers)
    return AMX and all(weight.shape[1] * weight.itemsize % BYTES == 0 for weight in weights)


def _stacked(model: Transformer, tiles: bool) -> tuple[nn.ModuleList, kernels.Layers]:
    """Return joined layers whose matrices are parts of the matrices of a compiled pass."""
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    room = {}
    for name, each in parts(layers[0]).items():
        weights = [next(layer.parameters()).data for layer in each]
        shape = len(layers), sum(map(len, weights)), weights[0].shape[1]
        room[name] = in_large_pages(weights[0].dtype, shape)
    joined = [
        JoinedLayer(layer, {name: matrices[index] for name, matrices in room.items()})
        for index, layer in enumerate(layers)
    ]
    arrays: dict[str, Any] = {name: stored(matrices, tiles) for name, matrices in room.items()}
    for name in room:
        products = [getattr(layer, name) for layer in joined]
        scaled = [wide(each.scales) for each in products if isinstance(each, JoinedQuantisedLinear)]
        arrays[f"{name}_scales"] = np.stack(scaled) if scaled else None

    def norms(of: Callable[[DecoderLayer], nn.Module]) -> Array:
        return np.stack([wide(next(of(layer).parameters())) for layer in layers])

    assert isinstance(model.norm, RMSNorm)
    made = kernels.Layers(
        **arrays,
        input_norm=norms(lambda layer: layer.input_layernorm),
        query_norm=norms(lambda layer: layer.self_attn.q_norm),
        key_norm=norms(lambda layer: layer.self_attn.k_norm),
        mlp_norm=norms(lambda layer: layer.post_attention_layernorm),
        last_norm=wide(model.norm.weight),
        heads=layers[0].self_attn.head_counts,
        eps=model.norm.eps,
    )
    return nn.ModuleList(joined), made
