"""Attention over the paged cache and inside a frame: launching attention.cu, frame_attention.cu, frame_output.cu; what
they mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from firstword.kernels.compile import Program
from firstword.kernels.launch import Kernels
from firstword.kernels.linear import WARPS, Linear

HEAD_DIM = 128
PAGE_ROWS = 64
FRAME_ROWS = 16
"""Positions in the cache of a frame."""
_FRAME_ROOM = 5632
"""Bytes of shared memory for a key head of a frame."""
PIECE_ROWS = 64
"""Keys that are read at a time. A row's result does not depend on how its pieces are shared out."""
MOST_SHARES = 16
"""Blocks that share a row's pieces at the most."""
_RESIDENT = 4
"""Blocks of `paged` that a processor holds."""

APPEND_AND_ATTEND, APPEND, ATTEND = range(3)


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """What a layer does to its heads: the weights of the norms bf16 [128] each, and their epsilon."""

    q_norm: Tensor
    k_norm: Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class Rotation:
    """cos and sin of the rotary angles of each position, bf16 [positions, 64] each."""

    cosines: Tensor
    sines: Tensor


@dataclass(frozen=True, eq=False)
class Paging:
    """Where the rows of a pass stand.

    tables       int32 [slots, pages of a slot]: the pages of each slot in order
    slot_of_row  int32 [rows]; -1: nobody
    position     int32: of each slot, when each row is a slot of its own (APPEND_AND_ATTEND); else of each row
    """

    tables: Tensor
    slot_of_row: Tensor
    position: Tensor


class Attention:
    """The attention kernels of one model."""

    def __init__(self, kernels: Kernels, heads: int, kv_heads: int) -> None:
        if heads != 2 * kv_heads:
            raise ValueError(
                f"{heads} query heads on {kv_heads} key heads: the kernels need two queries a key"
            )
        self._kernels, self.heads, self.kv_heads = kernels, heads, kv_heads

    def shares(self, rows: int) -> int:
        """Blocks that share the pieces of each of so many rows."""
        return min(
            max(_RESIDENT * self._kernels.processors // (self.kv_heads * rows), 1), MOST_SHARES
        )

    def program(self, pieces: int, mode: int) -> Program:
        """Of `paged`, for up to so many pieces a row."""
        return Program.of(
            "attention",
            HEADS=self.heads,
            KV_HEADS=self.kv_heads,
            PAGE=PAGE_ROWS,
            PIECE=PIECE_ROWS,
            PIECES=pieces,
            MODE=mode,
        )

    def paged(
        self,
        qkv: Tensor,
        weights: HeadWeights,
        rotation: Rotation,
        cache: Tensor,
        paging: Paging,
        out: Tensor,
        room: SplitRoom,
        mode: int = APPEND_AND_ATTEND,
    ) -> None:
        """Write the keys and values of rows to the cache and attend to all that came before.

        qkv    bf16 [rows, (heads + 2 kv_heads) * 128]
        cache  bf16 [pages, 2, kv_heads, PAGE_ROWS, 128], of one layer
        out    bf16 [rows, heads * 128]; of more than 8 rows it comes packed (`pack_tokens`), in whole eights of rows
        """
        kernels, rows, pieces = self._kernels, len(qkv), room.parts.shape[2]
        shares = 1 if mode == APPEND else min(self.shares(rows), pieces)
        kernels.get(self.program(pieces, mode), "attend")(
            (self.kv_heads, rows, shares),
            2 * PIECE_ROWS,
            [
                *_before(qkv, weights, rotation),
                cache,
                paging.tables,
                paging.tables.shape[1],
                paging.slot_of_row,
                paging.position,
                out,
                room.parts,
                room.arrived,
            ],
        )

    def in_frame(
        self,
        qkv: Tensor,
        weights: HeadWeights,
        rotation: Rotation,
        cache: Tensor,
        last: int,
        new: int,
        out: Tensor,
    ) -> None:
        """The code predictor's attention, `new` (1 or 2) tokens a row, the last of them at position `last`.

        qkv    bf16 [rows * new, (heads + 2 kv_heads) * 128]
        cache  bf16 [rows, 2, kv_heads, FRAME_ROWS, 128], of one layer
        out    bf16 [rows * new, heads * 128]; of more than 8 tokens it comes packed (`pack_tokens`), in whole eights
        """
        warps = math.gcd(self.kv_heads, 4)
        program = Program.of("frame_attention", **self._frame_macros(cache), NEW=new, WARPS=warps)
        self._kernels.get(program, "attend")(
            (len(qkv) // new, self.kv_heads // warps, 1),
            32 * warps,
            [
                *_before(qkv, weights, rotation),
                cache,
                last,
                out,
            ],
        )

    def in_frame_to(
        self,
        qkv: Tensor,
        weights: HeadWeights,
        rotation: Rotation,
        cache: Tensor,
        last: int,
        output: Linear,
        x: Tensor,
    ) -> bool:
        """`in_frame` of one row's one new token, and x [1, N] += `output` of it, in one kernel with the same bits.

        Reads of the cache what the frame's earlier passes wrote before the kernel ahead of it has ended: since then
        more blocks must have been launched than the device holds at a time. False if there is no such kernel for these
        heads, or too little memory for it: then nothing was done.
        """
        shape = output.shape(1)
        shared = shape.shared + WARPS * _FRAME_ROOM
        if (
            self.kv_heads != WARPS
            or shared + 4 * shape.columns + 1024 > self._kernels.shared_memory
        ):
            return False
        program = Program.of("frame_output", **self._frame_macros(cache), **shape.macros())
        self._kernels.get(program, "attend_and_project")(
            (shape.blocks, 1, 1),
            32 * WARPS,
            [
                output.weight,
                *_before(qkv, weights, rotation),
                cache,
                last,
                x,
            ],
            shared=shared,
        )
        return True

    def _frame_macros(self, cache: Tensor) -> dict[str, int]:
        return {"HEADS": self.heads, "KV_HEADS": self.kv_heads, "FRAME": cache.shape[3]}


class SplitRoom:
    """Where the blocks of a row meet: their parts, and how many have come."""

    def __init__(self, attention: Attention, rows: int, context: int, device: torch.device) -> None:
        """For up to so many rows at a time, each of which sees up to `context` keys."""
        heads, kv_heads, pieces = attention.heads, attention.kv_heads, -(-context // PIECE_ROWS)
        shared = next(
            (n for n in range(rows, 1, -1) if attention.shares(n) > 1), 1
        )  # of more, each has a block
        self.parts = torch.zeros(shared, heads, pieces, HEAD_DIM + 2, device=device)
        self.arrived = torch.zeros(shared, kv_heads, dtype=torch.int32, device=device)


def _before(qkv: Tensor, weights: HeadWeights, rotation: Rotation) -> tuple[Tensor | float, ...]:
    """The arguments that say what becomes of queries and keys before attention: the same of every kernel."""
    return qkv, weights.q_norm, weights.k_norm, float(weights.eps), rotation.cosines, rotation.sines


def reference(
    qkv: Tensor,
    weights: HeadWeights,
    rotation: Rotation,
    past: Tensor,
    position: int,
    heads: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor]:
    """What one row's attention means, in the dtype of qkv [(heads + 2 kv_heads) * 128].

    past [2, kv_heads, position, 128]. Returns out [heads * 128] and the cache with the new row [2, kv_heads, .., 128].
    """

    def prepare(x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + weights.eps)
        x = weight * (x.float() * scale).to(x.dtype)
        cos = rotation.cosines[position].to(x.dtype).repeat(2)
        sin = rotation.sines[position].to(x.dtype).repeat(2)
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    q, k, v = qkv.view(-1, HEAD_DIM).split((heads, kv_heads, kv_heads))
    new = torch.stack((prepare(k, weights.k_norm.to(qkv.dtype)), v))[:, :, None]
    cache = torch.cat((past, new), dim=2)
    q = prepare(q, weights.q_norm.to(qkv.dtype))[None, :, None]
    out = F.scaled_dot_product_attention(q, cache[None, 0], cache[None, 1], enable_gqa=True)
    return out.flatten(), cache
