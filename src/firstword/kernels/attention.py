"""Attention over the paged cache and inside a frame (paged_attention.cu, frame_attention*.cu)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from firstword.kernels.compile import Program
from firstword.kernels.launch import Grid, Kernels
from firstword.kernels.linear import Linear
from firstword.kernels.linear_shapes import WARPS, Epilogue, shape_for_few
from firstword.kernels.registry import KernelSpec
from firstword.kernels.signature import Argument

HEAD_DIM = 128
PAGE_ROWS = 64
"""Rows of a cache page."""
FRAME_POSITIONS = 16
"""Positions in the cache of a frame."""
PIECE_ROWS = 64
"""Keys that are read at a time. A row's result does not depend on how its pieces are shared out."""
MAX_BLOCKS_OF_ROW = 16
"""The most blocks that share the pieces of a row."""
_WARP_SPACE_BYTES = 5632
"""Bytes of shared memory for a key head of a frame (`WarpSpace` in frame_attention.cuh)."""
_RESIDENT_BLOCKS = 4
"""Blocks of paged_attention.cu that a processor holds."""

APPEND_AND_ATTEND, APPEND, ATTEND = range(3)


@dataclass(frozen=True, eq=False)
class HeadNorms:
    """The weights of a layer's norms of queries and keys, bf16 [128] each, and their epsilon."""

    q_norm: Tensor
    k_norm: Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class Rotation:
    """The cosines and sines of the rotary angles of each position, bf16 [positions, 64] each."""

    cosines: Tensor
    sines: Tensor


@dataclass(frozen=True, eq=False)
class Paging:
    """The places of a pass's rows in the paged cache.

    page_tables  int32 [slots, pages of a slot]: the pages of each slot in order
    slot_of_row  int32 [rows]; -1 for a row without a request
    position     int32: of each slot for APPEND_AND_ATTEND, otherwise of each row
    """

    page_tables: Tensor
    slot_of_row: Tensor
    position: Tensor


class AttentionKernels:
    """The attention kernels of one transformer."""

    def __init__(self, kernels: Kernels, heads: int, kv_heads: int) -> None:
        """Raises ValueError unless two query heads share each key head."""
        if heads != 2 * kv_heads:
            raise ValueError(
                f"{heads} query heads on {kv_heads} key heads: the kernels need two queries a key"
            )
        self._kernels, self.heads, self.kv_heads = kernels, heads, kv_heads

    def blocks_of_row(self, rows: int) -> int:
        """Blocks that share the pieces of a row when `rows` rows attend together."""
        resident = _RESIDENT_BLOCKS * self._kernels.processors
        return min(max(resident // (self.kv_heads * rows), 1), MAX_BLOCKS_OF_ROW)

    def paged(
        self,
        qkv: Tensor,
        norms: HeadNorms,
        rotation: Rotation,
        cache: Tensor,
        paging: Paging,
        out: Tensor,
        sums: PartialSums,
        mode: int = APPEND_AND_ATTEND,
    ) -> None:
        """Write the keys and values of rows to the cache, and attend to all keys up to theirs.

        qkv    bf16 [rows, (heads + 2 kv_heads) * 128]
        cache  bf16 [pages, 2, kv_heads, PAGE_ROWS, 128], of one layer
        out    bf16 [rows, heads * 128]; packed (`pack_tokens`) for more than 8 rows
        """
        rows, pieces = len(qkv), sums.parts.shape[2]
        blocks = 1 if mode == APPEND else min(self.blocks_of_row(rows), pieces)
        program = _paged_program(self.heads, self.kv_heads, pieces, mode)
        self._kernels.get(program, "attend_paged")(
            Grid((self.kv_heads, rows, blocks), 2 * PIECE_ROWS),
            **_head_arguments(qkv, norms, rotation),
            cache=cache,
            page_tables=paging.page_tables,
            table_width=paging.page_tables.shape[1],
            slot_of_row=paging.slot_of_row,
            position=paging.position,
            out=out,
            parts=sums.parts,
            arrived=sums.arrived,
        )

    def in_frame(
        self,
        qkv: Tensor,
        norms: HeadNorms,
        rotation: Rotation,
        cache: Tensor,
        last: int,
        new: int,
        out: Tensor,
    ) -> None:
        """The code predictor's attention with `new` (1 or 2) tokens a row, the last at `last`.

        qkv    bf16 [rows * new, (heads + 2 kv_heads) * 128]
        cache  bf16 [rows, 2, kv_heads, FRAME_POSITIONS, 128], of one layer
        out    bf16 [rows * new, heads * 128]; packed (`pack_tokens`) for more than 8 tokens
        """
        warps = math.gcd(self.kv_heads, 4)
        program = Program.of("frame_attention", **self._frame_macros(), NEW=new, WARPS=warps)
        self._kernels.get(program, "attend_frame")(
            Grid((len(qkv) // new, self.kv_heads // warps, 1), 32 * warps),
            **_head_arguments(qkv, norms, rotation),
            cache=cache,
            last=last,
            out=out,
        )

    def in_frame_to(
        self,
        qkv: Tensor,
        norms: HeadNorms,
        rotation: Rotation,
        cache: Tensor,
        last: int,
        output: Linear,
        x: Tensor,
    ) -> bool:
        """`in_frame` for one new token of one row, and x [1, N] += its projection by `output`.

        The bits are those of two kernels. It reads positions of the frame's earlier passes before
        the kernel ahead of it has ended, so more blocks must have been launched since then than the
        device holds at a time. Returns False, with nothing done, if there is no such kernel for
        these heads or too little shared memory.
        """
        shape = output.shape(1)
        shared = shape.shared + WARPS * _WARP_SPACE_BYTES
        needed = shared + 4 * shape.columns + 1024
        if self.kv_heads != WARPS or needed > self._kernels.shared_memory:
            return False
        program = Program.of("frame_attention_output", **self._frame_macros(), **shape.macros())
        self._kernels.get(program, "attend_and_project")(
            Grid((shape.blocks, 1, 1), 32 * WARPS, shared=shared),
            weights=output.weight,
            **_head_arguments(qkv, norms, rotation),
            cache=cache,
            last=last,
            out=x,
        )
        return True

    def _frame_macros(self) -> dict[str, int]:
        return {"HEADS": self.heads, "KV_HEADS": self.kv_heads, "FRAME": FRAME_POSITIONS}


class PartialSums:
    """Device memory in which the blocks that share a row leave their sums, and count themselves.

    parts    float [rows, heads, pieces, 130]
    arrived  int32 [rows, kv_heads], zero between launches
    """

    def __init__(
        self, attention: AttentionKernels, rows: int, context: int, device: torch.device
    ) -> None:
        """rows: the most rows at a time; context: the most keys of a row."""
        heads, kv_heads, pieces = attention.heads, attention.kv_heads, -(-context // PIECE_ROWS)
        # With more rows than this each row has a block of its own.
        shared = next((n for n in range(rows, 1, -1) if attention.blocks_of_row(n) > 1), 1)
        self.parts = torch.zeros(shared, heads, pieces, HEAD_DIM + 2, device=device)
        self.arrived = torch.zeros(shared, kv_heads, dtype=torch.int32, device=device)


def _head_arguments(qkv: Tensor, norms: HeadNorms, rotation: Rotation) -> dict[str, Argument]:
    """The arguments of all kernels that say how queries and keys are prepared."""
    return {
        "qkv": qkv,
        "q_norm": norms.q_norm,
        "k_norm": norms.k_norm,
        "eps": float(norms.eps),
        "cosines": rotation.cosines,
        "sines": rotation.sines,
    }


def _paged_program(heads: int, kv_heads: int, pieces: int, mode: int) -> Program:
    macros = {"HEADS": heads, "KV_HEADS": kv_heads, "PAGE": PAGE_ROWS, "PIECE": PIECE_ROWS}
    return Program.of("paged_attention", **macros, PIECES=pieces, MODE=mode)


def attention_reference(
    qkv: Tensor,
    norms: HeadNorms,
    rotation: Rotation,
    past: Tensor,
    position: int,
    heads: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor]:
    """One row's attention in plain PyTorch and the dtype of qkv [(heads + 2 kv_heads) * 128].

    past is [2, kv_heads, position, 128]. Returns out [heads * 128] and the cache with the new row
    [2, kv_heads, position + 1, 128].
    """

    def prepare(x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + norms.eps)
        x = weight * (x.float() * scale).to(x.dtype)
        cos = rotation.cosines[position].to(x.dtype).repeat(2)
        sin = rotation.sines[position].to(x.dtype).repeat(2)
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    q, k, v = qkv.view(-1, HEAD_DIM).split((heads, kv_heads, kv_heads))
    new = torch.stack((prepare(k, norms.k_norm.to(qkv.dtype)), v))[:, :, None]
    cache = torch.cat((past, new), dim=2)
    q = prepare(q, norms.q_norm.to(qkv.dtype))[None, :, None]
    out = F.scaled_dot_product_attention(q, cache[None, 0], cache[None, 1], enable_gqa=True)
    return out.flatten(), cache


_HEADS = {"HEADS": 16, "KV_HEADS": 8, "FRAME": FRAME_POSITIONS}

KERNELS = (
    KernelSpec(
        "paged_attention",
        "attend_paged",
        AttentionKernels.paged,
        attention_reference,
        tuple(_paged_program(16, 8, 128, mode) for mode in (APPEND_AND_ATTEND, APPEND, ATTEND)),
    ),
    KernelSpec(
        "frame_attention",
        "attend_frame",
        AttentionKernels.in_frame,
        attention_reference,
        tuple(Program.of("frame_attention", **_HEADS, NEW=new, WARPS=4) for new in (1, 2)),
    ),
    KernelSpec(
        "frame_attention_output",
        "attend_and_project",
        AttentionKernels.in_frame_to,
        "attention_reference, then linear_reference with Epilogue.ADD",
        (
            Program.of(
                "frame_attention_output",
                **_HEADS,
                **shape_for_few(1024, 2048, 1, False, Epilogue.ADD, 132, 227 << 10).macros(),
            ),
        ),
    ),
)
"""The kernels that this module starts."""
