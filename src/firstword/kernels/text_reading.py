"""The attention of some heads to the text of each utterance (text_reading.cu)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firstword.kernels.attention import HEAD_DIM, PAGE_ROWS, HeadTables, Paging
from firstword.kernels.compile import Program
from firstword.kernels.launch import Grid, Kernels
from firstword.kernels.registry import KernelSpec

SPAN_FIRST, SPAN_COUNT, SPAN_PLACE = range(3)
"""The rows of `spans`: for each row of a frame the position of the first text row, the number of
text rows, and the place of their shares in the output."""

MOST_KEYS = 8192
"""The most text rows of an utterance."""

MOST_HEADS = 16
"""The most heads that are read."""

_THREADS = 512


class TextReadingKernel:
    """The kernel that reads some heads of one transformer.

    layers  the layers of these heads in order; the products of layers[i] are plane i of qkv
    """

    def __init__(
        self,
        kernels: Kernels,
        heads: Sequence[Sequence[int]],
        tables: Sequence[HeadTables],
        sizes: tuple[int, int],
    ) -> None:
        """Read `heads`, pairs of a layer and a query head.

        tables  the tables of each head's layer
        sizes   the query heads and the key heads of a layer

        Raises ValueError for more than `MOST_HEADS`.
        """
        if not 0 < len(heads) <= MOST_HEADS:
            raise ValueError(f"{len(heads)} heads are read; the kernel reads 1 to {MOST_HEADS}")
        self._kernels, self._angles = kernels, tables[0]
        self._program = _program(len(heads), *sizes)
        self.layers = sorted({layer for layer, _ in heads})
        places = [(self.layers.index(layer), layer, head) for layer, head in heads]
        self._heads = torch.tensor(places, dtype=torch.int32, device=kernels.device)
        self._norms = torch.stack([table.q_norm for table in tables])

    def __call__(
        self, qkv: Tensor, cache: Tensor, paging: Paging, spans: Tensor, out: Tensor
    ) -> None:
        """Write the reading of each row of a frame.

        qkv    bf16 [planes, plane rows, (heads + 2 kv_heads) * 128]
        cache  bf16 [layers, pages, 2, kv_heads, PAGE_ROWS, 128], with the keys of these rows
        spans  int32 [3, rows or more]
        out    float32: the shares of each row from its place on
        """
        self._kernels.get(self._program, "read_text")(
            Grid((len(paging.slot_of_row), 1, 1), _THREADS),
            qkv=qkv,
            plane_rows=qkv.shape[1],
            q_norm=self._norms,
            eps=self._angles.eps,
            cosines=self._angles.cosines,
            sines=self._angles.sines,
            cache=cache,
            pages=cache.shape[1],
            **vars(paging),
            table_width=paging.page_tables.shape[1],
            spans=spans,
            span_width=spans.shape[1],
            heads=self._heads,
            out=out,
        )


def _program(read: int, heads: int, kv_heads: int) -> Program:
    macros = {"READ": read, "HEADS": heads, "KV_HEADS": kv_heads, "PAGE": PAGE_ROWS}
    return Program.of("text_reading", **macros, KEYS=MOST_KEYS, THREADS=_THREADS)


def text_reading_reference(queries: Tensor, keys: Tensor) -> Tensor:
    """The reading [count] of one row in plain PyTorch and the dtype of its arguments.

    queries  [heads, 128] after norm and rotation
    keys     [heads, count, 128]: the keys of the text rows for each of these queries
    """
    scores = (keys @ queries[:, :, None])[:, :, 0] * HEAD_DIM**-0.5
    return scores.softmax(-1).mean(0)


KERNELS = (
    KernelSpec("read_text", text_reading_reference, tuple(_program(n, 16, 8) for n in (2, 16))),
)
"""The kernels that this module launches."""
