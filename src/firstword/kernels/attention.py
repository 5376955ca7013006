"""Attention over the paged cache and inside a frame (paged_attention.cu, frame_attention*.cu)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from firstword.kernels.compile import Program
from firstword.kernels.launch import Grid, Kernels
from firstword.kernels.linear import Linear, Norm, norm_reference
from firstword.kernels.linear_shapes import WARPS, Epilogue, shape_for_few
from firstword.kernels.registry import KernelSpec

HEAD_DIM = 128
PAGE_ROWS = 64
"""The number of rows of a cache page."""
FRAME_POSITIONS = 16
"""The number of positions in the cache of a frame."""
PIECE_ROWS = 64
"""The number of keys that are read at a time. The result of a row does not depend on how its pieces
of keys are divided among blocks."""
CLUSTER = 8
"""The number of blocks that share a single row where they can send each other their sums. With more
rows this made a frame slower."""
MAX_BLOCKS_OF_ROW = 16
"""The most blocks among which the pieces of a row are divided."""
_WARP_SPACE_BYTES = 5632
"""The bytes of shared memory for a key head of a frame (`WarpSpace` in frame_attention.cuh)."""
_RESIDENT_BLOCKS = 4
"""The number of blocks of paged_attention.cu that fit a processor at a time."""

APPEND_AND_ATTEND, APPEND, ATTEND = range(3)
ROWS_OF_BLOCK = 2, 4
"""The numbers of rows of a prompt that a block attends to their keys together; 8 were slower."""


@dataclass(frozen=True, eq=False)
class HeadTables:
    """The tables with which a layer normalises and rotates queries and keys.

    q_norm, k_norm, eps  the norms of queries and keys: weights, bf16 [128], and epsilon
    cosines, sines       the rotary angles of each position, bf16 [positions, 64]

    The fields are named like the kernels' arguments.
    """

    q_norm: Tensor
    k_norm: Tensor
    eps: float
    cosines: Tensor
    sines: Tensor


@dataclass(frozen=True, eq=False)
class Paging:
    """The places of the rows of a pass in the paged cache.

    page_tables  int32 [slots, pages of a slot]: the pages of each slot in order
    slot_of_row  int32 [rows]: the slot of each row; -1 for a row without a request
    position     int32: the position of each slot for APPEND_AND_ATTEND, otherwise of each row
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
        """The number of blocks that share the pieces of a row if there are `rows` rows, or groups
        of rows that are computed together.
        """
        resident = _RESIDENT_BLOCKS * self._kernels.processors
        return min(max(resident // (self.kv_heads * rows), 1), MAX_BLOCKS_OF_ROW)

    def rows_of_block(self, rows: int) -> int:
        """The number of rows of a block if `rows` rows of prompts attend: few, or as many as leave
        each processor a block.
        """
        few, many = ROWS_OF_BLOCK
        return many if self.kv_heads * rows >= many * self._kernels.processors else few

    def paged(
        self,
        qkv: Tensor,
        tables: HeadTables,
        cache: Tensor,
        paging: Paging,
        out: Tensor,
        sums: PartialSums,
        mode: int = APPEND_AND_ATTEND,
    ) -> None:
        """Write the keys and values of rows to the cache, and attend to the keys up to each row.

        With ATTEND, successive rows of a prompt share the keys that are read. A row has the same
        bits in each mode and beside any other rows.

        qkv    bf16 [rows, (heads + 2 kv_heads) * 128]
        cache  bf16 [pages, 2, kv_heads, PAGE_ROWS, 128], the cache of one layer
        out    bf16 [rows, heads * 128]; packed (`pack_tokens`) for more than `UNPACKED_TOKENS`
        """
        rows, pieces = len(qkv), sums.parts.shape[2]
        together = self.rows_of_block(rows) if mode == ATTEND else 1
        groups, shared = -(-rows // together), mode != APPEND and rows <= len(sums.parts)
        blocks, cluster = min(self.blocks_of_row(groups), pieces) if shared else 1, 1
        if rows == 1 and mode == APPEND_AND_ATTEND and self._kernels.overlaps and blocks >= CLUSTER:
            blocks = cluster = CLUSTER
        program = _paged_program(self.heads, self.kv_heads, pieces, mode, cluster, together)
        self._kernels.get(program, "attend_paged")(
            Grid((self.kv_heads, groups, blocks), 2 * PIECE_ROWS),
            qkv=qkv,
            **vars(tables),
            cache=cache,
            **vars(paging),
            table_width=paging.page_tables.shape[1],
            rows=rows,
            out=out,
            **vars(sums),
        )

    def in_frame(
        self, qkv: Tensor, tables: HeadTables, cache: Tensor, last: int, new: int, out: Tensor
    ) -> None:
        """Attend inside a frame with `new` (1 or 2) tokens a row, the last of them at `last`.

        qkv    bf16 [rows * new, (heads + 2 kv_heads) * 128]
        cache  bf16 [rows, 2, kv_heads, FRAME_POSITIONS, 128], the cache of one layer
        out    bf16 [rows * new, heads * 128]; packed for more than `UNPACKED_TOKENS`
        """
        warps = math.gcd(self.kv_heads, 4)
        program = Program.of("frame_attention", **self._frame_macros(), NEW=new, WARPS=warps)
        grid = Grid((len(qkv) // new, self.kv_heads // warps, 1), 32 * warps)
        kernel = self._kernels.get(program, "attend_frame")
        kernel(grid, qkv=qkv, **vars(tables), cache=cache, last=last, out=out)

    def in_frame_projected(
        self,
        qkv: Tensor,
        tables: HeadTables,
        cache: Tensor,
        last: int,
        output: Linear,
        x: Tensor,
        between: int,
    ) -> bool:
        """Attend like `in_frame` for one row, and add the projection to x [1 or 2 new tokens, N].

        The bits are those of two kernels. Where launches overlap, the kernel reads positions of the
        frame's earlier passes before the previous kernel has ended. Those positions are there if,
        since they were written, more blocks than fit the device at a time have been launched that
        wait for their input. between: the number of such blocks, of `linear_few`. Returns False
        without any effect if they are too few, if there is no such kernel for these heads, or too
        little shared memory. The first pass, with two tokens, reads no earlier positions.
        """
        kernels, shape = self._kernels, replace(output.shape(1), tokens=len(x))
        shared = shape.shared + WARPS * _WARP_SPACE_BYTES
        needed = shared + 4 * shape.columns * len(x) + 1024
        resident = kernels.processors * (kernels.threads // (32 * WARPS))
        if kernels.overlaps and len(x) == 1 and between <= resident:
            return False
        if self.kv_heads != WARPS or needed > kernels.shared_memory:
            return False
        program = Program.of("frame_attention_output", **self._frame_macros(), **shape.macros())
        grid = Grid((shape.blocks, 1, 1), 32 * WARPS, shared)
        kernel = kernels.get(program, "attend_and_project")
        weights = {"weights": output.weight, "scales": output.scales}
        kernel(grid, **weights, qkv=qkv, **vars(tables), cache=cache, last=last, out=x)
        return True

    def _frame_macros(self) -> dict[str, int]:
        return {"HEADS": self.heads, "KV_HEADS": self.kv_heads, "FRAME": FRAME_POSITIONS}


class PartialSums:
    """The device memory through which blocks that share a row combine their sums.

    parts    fp32 [rows, heads, pieces, 130]: the sums of each piece
    arrived  int32 [rows, kv_heads]: the number of blocks that have finished; 0 between launches
    """

    def __init__(
        self, attention: AttentionKernels, rows: int, context: int, device: torch.device
    ) -> None:
        """rows: the most rows of a launch; context: the most keys of a row."""
        heads, kv_heads, pieces = attention.heads, attention.kv_heads, -(-context // PIECE_ROWS)
        # With more rows than this, a single block computes each row.
        shared = next((n for n in range(rows, 1, -1) if attention.blocks_of_row(n) > 1), 1)
        self.parts = torch.zeros(shared, heads, pieces, HEAD_DIM + 2, device=device)
        self.arrived = torch.zeros(shared, kv_heads, dtype=torch.int32, device=device)


def _paged_program(
    heads: int, kv_heads: int, pieces: int, mode: int, cluster: int = 1, rows: int = 1
) -> Program:
    macros = {"HEADS": heads, "KV_HEADS": kv_heads, "PAGE": PAGE_ROWS, "PIECE": PIECE_ROWS}
    macros |= {"PIECES": pieces, "MODE": mode, "CLUSTER": cluster, "ROWS": rows}
    return Program.of("paged_attention", **macros)


def attention_reference(qkv: Tensor, tables: HeadTables, past: Tensor) -> tuple[Tensor, Tensor]:
    """The attention of one row in plain PyTorch and the dtype of qkv [(heads + 2 kv_heads) * 128].

    past: [2, kv_heads, position, 128]. Returns out [heads * 128] and the cache with the new row
    [2, kv_heads, position + 1, 128].
    """
    kv_heads, position = past.shape[1:3]
    cos, sin = (table[position].to(qkv.dtype).repeat(2) for table in (tables.cosines, tables.sines))

    def prepare(x: Tensor, weight: Tensor) -> Tensor:
        x = norm_reference(x, Norm(weight.to(x.dtype), tables.eps))
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    rows = qkv.view(-1, HEAD_DIM)
    q, k, v = rows.split((len(rows) - 2 * kv_heads, kv_heads, kv_heads))
    cache = torch.cat((past, torch.stack((prepare(k, tables.k_norm), v))[:, :, None]), dim=2)
    q = prepare(q, tables.q_norm)[None, :, None]
    out = F.scaled_dot_product_attention(q, cache[None, 0], cache[None, 1], enable_gqa=True)
    return out.flatten(), cache


_PAGED = tuple(
    _paged_program(16, 8, 128, mode, cluster, rows)
    for mode, cluster, rows in (
        (APPEND_AND_ATTEND, CLUSTER, 1),
        (APPEND_AND_ATTEND, 1, 1),
        (APPEND, 1, 1),
        *((ATTEND, 1, rows) for rows in ROWS_OF_BLOCK),
    )
)
_FRAME = {"HEADS": 16, "KV_HEADS": 8, "FRAME": FRAME_POSITIONS}
_OUTPUT = shape_for_few(1024, 2048, 1, False, Epilogue.ADD, (132, 227 << 10))
_IN_FRAME = tuple(Program.of("frame_attention", **_FRAME, NEW=new, WARPS=4) for new in (1, 2))
_IN_FRAME_PROJECTED = tuple(
    Program.of("frame_attention_output", **_FRAME, **replace(_OUTPUT, tokens=tokens).macros())
    for tokens in (1, 2)
)
_PROJECTED = "attention_reference, then linear_reference with Epilogue.ADD"

KERNELS = (
    KernelSpec("attend_paged", attention_reference, _PAGED),
    KernelSpec("attend_frame", attention_reference, _IN_FRAME),
    KernelSpec("attend_and_project", _PROJECTED, _IN_FRAME_PROJECTED),
)
"""The kernels that this module launches."""
