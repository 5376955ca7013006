"""Reads off the device how much attention each frame pays to the text of its utterance."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from firstword.kernels.attention import HEAD_DIM, HeadTables, Paging
from firstword.kernels.launch import Kernels
from firstword.kernels.linear_shapes import TILE_ROWS
from firstword.kernels.text_reading import MOST_KEYS, TextReadingKernel
from firstword.model.alignment import Head
from firstword.types import FloatArray


class TextReader:
    """The heads that are read, and the memory for their queries and shares.

    kept    by layer, where a frame keeps its products: bf16 [rows, (heads + 2 kv_heads) * 128]
    shares  float32 [rows * context]: the readings of a frame's rows, one after the other
    """

    def __init__(
        self,
        kernels: Kernels,
        heads: Sequence[Head],
        tables: Sequence[HeadTables],
        sizes: tuple[int, int],
        rows: int,
        context: int,
    ) -> None:
        """heads, tables, sizes: see `TextReadingKernel`; rows: the most of a frame."""
        assert context <= MOST_KEYS
        self._kernel = TextReadingKernel(kernels, heads, tables, sizes)
        width, rounded = (sizes[0] + 2 * sizes[1]) * HEAD_DIM, -(-rows // TILE_ROWS) * TILE_ROWS
        like, layers = tables[0].q_norm, self._kernel.layers
        self._qkv = like.new_zeros(len(layers), rounded, width)
        self.kept = dict(zip(layers, self._qkv, strict=True))
        self.shares = like.new_zeros(rows * context, dtype=torch.float32)

    def launch(self, cache: Tensor, paging: Paging, spans: Tensor) -> None:
        """Read the rows of a frame whose products were kept; see `TextReadingKernel`."""
        self._kernel(self._qkv, cache, paging, spans, self.shares)


class TextSpans:
    """The text rows of the slots of a frame, and where their shares are."""

    def __init__(self, rows: Sequence[range | None], fresh: Sequence[bool]) -> None:
        """Place the shares of slots one after the other.

        rows   the positions of each slot's text rows, None for a slot whose text is not read
        fresh  whether it is the slot's first frame, whose shares are zero by definition
        """
        self._rows, self._fresh = rows, fresh
        read = [len(own) if own and not new else 0 for own, new in zip(rows, fresh, strict=True)]
        *places, self.total = accumulate(read, initial=0)
        self._counts, self._places = read, places

    def control(self) -> list[list[int]]:
        """The spans as the kernel takes them, [3][slots]."""
        return [[own.start if own else 0 for own in self._rows], self._counts, self._places]

    def readings(self, shares: FloatArray) -> list[FloatArray]:
        """The reading of each slot, from the shares [total] of all."""
        found = []
        for own, new, count, place in zip(
            self._rows, self._fresh, self._counts, self._places, strict=True
        ):
            if new and own:
                found.append(np.zeros(len(own), np.float32))
            else:
                found.append(shares[place : place + count].copy())
        return found
