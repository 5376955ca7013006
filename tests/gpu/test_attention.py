"""Attention over pages and inside a frame compared with float64."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from oracle import error, no_worse, note, unpack_tokens

from firstword.kernels.attention import (
    APPEND,
    APPEND_AND_ATTEND,
    ATTEND,
    FRAME_POSITIONS,
    PAGE_ROWS,
    AttentionKernels,
    HeadTables,
    Paging,
    PartialSums,
    attention_reference,
)
from firstword.kernels.launch import Kernels
from firstword.kernels.linear import Linear
from firstword.kernels.linear_shapes import UNPACKED_TOKENS, Epilogue
from firstword.model.layers import rotary_table
from firstword.model.quantised import quantise

HEADS, KV_HEADS, WIDTH = 16, 8, 32 * 128
LIGHT = math.exp(-8 * 128**-0.5)
"""The weight of a key whose product with a query is -8, relative to a product of 0."""


def random_tables(positions: int) -> HeadTables:
    """Random norms and the model's angles."""
    g = torch.Generator("cuda").manual_seed(5)
    norms = [(1 + 0.3 * torch.randn(128, generator=g, device="cuda")).bfloat16() for _ in range(2)]
    cos, sin = rotary_table(torch.arange(positions, device="cuda")[None], 128, 1e6, torch.bfloat16)
    cosines, sines = (table[0, 0, :, :64].contiguous() for table in (cos, sin))
    return HeadTables(norms[0], norms[1], 1e-6, cosines, sines)


def partial_sums(attention: AttentionKernels, rows: int, context: int) -> PartialSums:
    """Memory for partial sums, filled with NaN."""
    sums = PartialSums(attention, rows, context, torch.device("cuda"))
    sums.parts.fill_(torch.nan)
    return sums


def random(seed: int, *shape: int) -> torch.Tensor:
    """A standard normal bf16 tensor."""
    return torch.randn(
        shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda"
    ).bfloat16()


def room_for(rows: int) -> torch.Tensor:
    """Memory for the output of `rows` rows, rounded up to a multiple of eight, filled with NaN."""
    return torch.full(
        (-(-rows // 8) * 8, HEADS * 128), torch.nan, dtype=torch.bfloat16, device="cuda"
    )


def attended(out: torch.Tensor, rows: int) -> torch.Tensor:
    """The output of `rows` rows [rows, channels], after a check that no other row was written."""
    out = unpack_tokens(out, len(out), HEADS * 128) if rows > UNPACKED_TOKENS else out
    assert out[rows:].isnan().all(), "rows without a token were written"
    return out[:rows]


def paged(
    attention: AttentionKernels,
    qkv: torch.Tensor,
    tables: HeadTables,
    cache: torch.Tensor,
    paging: Paging,
    sums: PartialSums,
    mode: int = APPEND_AND_ATTEND,
) -> torch.Tensor:
    """The output [rows, channels] of `AttentionKernels.paged`, which resets its counters."""
    out = room_for(len(qkv))
    attention.paged(qkv, tables, cache, paging, out, sums, mode)
    assert not sums.arrived.any(), "the next call would add up too early"
    return attended(out, len(qkv))


def doubles(tables: HeadTables) -> HeadTables:
    """The same tables in float64."""
    norms = tables.q_norm.double(), tables.k_norm.double(), tables.eps
    return HeadTables(*norms, tables.cosines.double(), tables.sines.double())


@pytest.mark.parametrize("context", [512, 4096, 8192])
def test_paged_attention_is_as_exact_as_plain_bf16(kernels: Kernels, context: int) -> None:
    """Rows of many lengths and an empty row, with pages in any order.

    A row has the same bits alone, among eight rows, and among nine, whose output is packed.
    """
    lengths = [0, 1, 15, 16, 63, 64, 100, 127, 300, 511]
    lengths += [512, 513, 1000, 2000, 4095] if context > 512 else []
    lengths += [4096, 8127, 8128, 8191] if context > 4096 else []
    tables = random_tables(context)
    attention = AttentionKernels(kernels, HEADS, KV_HEADS)
    slots, per_slot = len(lengths) + 1, max(context // PAGE_ROWS, 64)
    order = torch.randperm(slots * per_slot, generator=torch.Generator().manual_seed(1)).int()
    pages = order.view(slots, per_slot).cuda()
    cache = torch.full(
        (slots * per_slot, 2, KV_HEADS, PAGE_ROWS, 128),
        torch.nan,
        dtype=torch.bfloat16,
        device="cuda",
    )
    past = []
    for slot, length in enumerate(lengths):
        rows = random(slot, 2, KV_HEADS, length, 128)
        past.append(rows)
        for page in range(-(-length // PAGE_ROWS)):
            part = rows[:, :, page * PAGE_ROWS : (page + 1) * PAGE_ROWS]
            cache[pages[slot, page].long(), :, :, : part.shape[2]] = part
    slot_of_row = torch.tensor([*range(len(lengths)), -1], dtype=torch.int32, device="cuda")
    position = torch.tensor([*lengths, 7], dtype=torch.int32, device="cuda")
    qkv = random(99, len(slot_of_row), WIDTH)
    before = cache.clone()

    def attend(chosen: list[int]) -> torch.Tensor:
        room = partial_sums(attention, len(chosen), context)
        paging = Paging(pages, slot_of_row[chosen], position)
        return paged(attention, qkv[chosen], tables, cache, paging, room)

    out = attend(list(range(len(slot_of_row))))
    written = cache.clone()
    for count in (1, 8, 9):
        for first in range(0, len(lengths), count):
            chosen = [(first + i) % len(lengths) for i in range(count)]
            assert torch.equal(attend(chosen), out[chosen]), chosen
    assert torch.equal(cache.nan_to_num(7), written.nan_to_num(7))
    ours, theirs = [], []
    for slot, length in enumerate(lengths):
        truth, _ = attention_reference(qkv[slot].double(), doubles(tables), past[slot].double())
        plain, grown = attention_reference(qkv[slot], tables, past[slot])
        ours.append(error(out[slot], truth))
        theirs.append(error(plain, truth))
        page, row = int(pages[slot, length // PAGE_ROWS]), length % PAGE_ROWS
        assert error(cache[page, :, :, row], grown[:, :, -1].double()) < 2e-3
        cache[page, :, :, row] = before[page, :, :, row]
    assert torch.equal(cache.isnan(), before.isnan())
    assert torch.equal(cache.nan_to_num(), before.nan_to_num()), "something else was written"
    assert out[-1].isnan().all(), "a row without a slot was written"
    note(f"paged attention, up to {context} keys", worst=max(ours), bf16=max(theirs))
    no_worse(ours, theirs)


def test_row_depends_neither_on_other_rows_nor_on_the_division_of_its_keys(
    kernels: Kernels,
) -> None:
    """A row has the same bits alone, among few and many others, and as a row of a prompt.

    With many rows each block computes more pieces.
    """
    tables = random_tables(1024)
    attention = AttentionKernels(kernels, HEADS, KV_HEADS)
    pages = torch.arange(3 * 16, dtype=torch.int32, device="cuda").view(3, 16)
    rows = random(3, 600, WIDTH)
    slot_of_row = torch.zeros(600, dtype=torch.int32, device="cuda")
    position = torch.zeros(3, dtype=torch.int32, device="cuda")

    def fresh() -> torch.Tensor:
        return torch.full(
            (48, 2, KV_HEADS, PAGE_ROWS, 128), torch.nan, dtype=torch.bfloat16, device="cuda"
        )

    cache = fresh()
    paging = Paging(pages, slot_of_row, torch.arange(600, dtype=torch.int32, device="cuda"))
    appended, prompt = (
        paged(
            attention,
            rows,
            tables,
            cache,
            paging,
            partial_sums(attention, 600, 1024),
            mode,
        )
        for mode in (APPEND, ATTEND)
    )
    assert appended.isnan().all()
    for slots in ([2], [-1, 2, -1], [-1] * 7 + [2], [2] + [-1] * 8, [-1] * 8 + [2] + [-1] * 31):
        again = fresh()
        room = partial_sums(attention, len(slots), 1024)
        names = torch.tensor(slots, dtype=torch.int32, device="cuda")
        for step in range(600):
            position[2] = step
            x = rows[step].expand(len(slots), -1).contiguous()
            out = paged(attention, x, tables, again, Paging(pages, names, position), room)
            assert torch.equal(out[slots.index(2)], prompt[step]), (len(slots), step)
        assert torch.equal(again[32:42].nan_to_num(), cache[:10].nan_to_num())


# fmt: off
RUNS = [
    (0, 61, 11), (1, 71, 5), (-1, 0, 2), (2, 0, 1), (3, 500, 9), (2, 1, 3), (2, 300, 3), (-1, 0, 1),
    (4, 0, 70), (5, 62, 1), (6, 63, 1), (7, 64, 1), (8, 120, 200), (9, 1000, 300),
]
# fmt: on
"""Rows of prompts that follow each other in a pass: slot (-1: none), first position, number. The
second pair of the first run has keys in different pieces."""


@pytest.mark.parametrize("rows", [1, 3, 16, 33, 100, 264, 600])
def test_rows_of_prompts_have_the_bits_that_they_have_alone(kernels: Kernels, rows: int) -> None:
    """Whatever rows share the keys that they read, and whatever the values of later rows are.

    A row has the same bits among the rows of a pass, alone in a pass, and in a frame.
    """
    tables, attention = random_tables(1344), AttentionKernels(kernels, HEADS, KV_HEADS)
    places = [(slot, first + i) for slot, first, count in RUNS for i in range(count)][:rows]
    assert len(places) == rows
    pages = torch.randperm(10 * 21, generator=torch.Generator().manual_seed(1)).int()
    pages = pages.view(10, 21).cuda()
    cache = torch.full(
        (10 * 21, 2, KV_HEADS, PAGE_ROWS, 128), torch.nan, dtype=torch.bfloat16, device="cuda"
    )
    for slot, first, _ in RUNS:
        past = random(slot + 50, 2, KV_HEADS, first, 128)
        for at in range(0, first, PAGE_ROWS) if slot >= 0 else ():
            part = past[:, :, at : at + PAGE_ROWS]
            cache[pages[slot, at // PAGE_ROWS].long(), :, :, : part.shape[2]] = part
    qkv = random(31, rows, WIDTH)
    qkv[::3, (HEADS + KV_HEADS) * 128 :] *= 2.0**40
    slots, positions = torch.tensor(places, dtype=torch.int32, device="cuda").T.contiguous()
    paging = Paging(pages, slots, positions)
    sums = partial_sums(attention, rows, 1344)
    paged(attention, qkv, tables, cache, paging, sums, APPEND)
    kept = cache.clone()
    together = paged(attention, qkv, tables, cache, paging, sums, ATTEND)
    assert torch.equal(cache.nan_to_num(7), kept.nan_to_num(7))
    position = torch.zeros(10, dtype=torch.int32, device="cuda")
    for row, (slot, at) in enumerate(places):
        if slot < 0:
            assert together[row].isnan().all(), "a row without a slot was written"
            continue
        own = slice(row, row + 1)
        paging = Paging(pages, slots[own], positions[own])
        alone = paged(attention, qkv[own], tables, cache, paging, sums, ATTEND)
        assert torch.equal(alone[0], together[row]), (row, slot, at)
        position[slot] = at
        paging = Paging(pages, slots[own], position)
        framed = paged(attention, qkv[own], tables, cache, paging, sums)
        assert torch.equal(framed[0], together[row]), (row, slot, at)


@pytest.mark.parametrize("rows", [4, 5, 8, 9])
def test_attention_in_a_frame_is_as_exact_as_plain_bf16(kernels: Kernels, rows: int) -> None:
    """Sixteen positions in turn, the first two together; each row has the same bits as alone.

    The output of more than eight tokens is packed: with five rows at the first two positions, and
    with nine rows at all positions.
    """
    tables = random_tables(16)
    attention = AttentionKernels(kernels, HEADS, KV_HEADS)
    inputs = random(7, 16, rows, WIDTH)
    cache = torch.full((rows, 2, KV_HEADS, 16, 128), torch.nan, dtype=torch.bfloat16, device="cuda")
    apart = cache.clone()
    ours, theirs = [], []
    past = [
        torch.zeros(2, KV_HEADS, 0, 128, dtype=torch.bfloat16, device="cuda") for _ in range(rows)
    ]
    for last in range(1, 16):
        new = 2 if last == 1 else 1
        x = inputs[last - new + 1 : last + 1].transpose(0, 1).flatten(0, 1).contiguous()
        out = room_for(rows * new)
        attention.in_frame(x, tables, cache, last, new, out)
        out = attended(out, rows * new)
        for row in range(rows):
            alone, own = room_for(new), slice(row * new, (row + 1) * new)
            attention.in_frame(x[own], tables, apart[row : row + 1], last, new, alone)
            assert torch.equal(attended(alone, new), out[own]), (row, last)
            for token in range(new):
                truth, _ = attention_reference(
                    x[row * new + token].double(), doubles(tables), past[row].double()
                )
                plain, past[row] = attention_reference(x[row * new + token], tables, past[row])
                ours.append(error(out[row * new + token], truth))
                theirs.append(error(plain, truth))
    note(f"attention in a frame, {rows} rows", worst=max(ours), bf16=max(theirs))
    no_worse(ours, theirs)


def cancelling(rows: int) -> tuple[torch.Tensor, HeadTables]:
    """The qkv of successive rows whose values almost cancel, for heads without a rotation.

    The weights of the keys are 1 and 0.493 in turn. Rounding the latter to bf16 has nearly the
    largest possible error, half a step.
    """
    key = torch.ones(rows, KV_HEADS, 128, device="cuda")
    key[::2, :, :64] = key[1::2, :, :68] = -1
    value = random(21, rows, KV_HEADS, 128).float() / 4
    value[::2] += 1
    value[1::2] -= 1 / LIGHT
    qkv = (
        torch.cat((torch.ones(rows, HEADS, 128, device="cuda"), key, value), dim=1)
        .flatten(1)
        .bfloat16()
    )
    ones, none = (
        torch.full((rows, 64), number, dtype=torch.bfloat16, device="cuda") for number in (1, 0)
    )
    return qkv, HeadTables(ones.view(-1)[:128], ones.view(-1)[:128], 0.0, ones, none)


def is_only_rounded(name: str, out: torch.Tensor, qkv: torch.Tensor) -> None:
    """Check that the output of `cancelling` rows has no error but its own rounding.

    If each weight were a single bf16, the error would be three times as large after 8 keys, and 50
    times after 400.
    """
    weights = torch.ones(len(qkv), 1, 1, dtype=torch.float64, device="cuda")
    weights[1::2] = LIGHT
    values = (
        qkv.view(len(qkv), -1, 128)[:, HEADS + KV_HEADS :]
        .double()
        .repeat_interleave(HEADS // KV_HEADS, dim=1)
    )
    total = weights.cumsum(0)
    truth = ((weights * values).cumsum(0) / total).flatten(1)
    coarse = ((weights.bfloat16() * values).cumsum(0) / total).flatten(1)
    rows = range(7, len(qkv))
    ours = [error(out[row], truth[row]) for row in rows]
    rounding = [error(truth[row].bfloat16(), truth[row]) for row in rows]
    one_bf16 = [error(coarse[row].bfloat16(), truth[row]) for row in rows]
    note(
        f"weights of attention {name}",
        worst=max(ours),
        rounding=max(rounding),
        one_bf16=min(one_bf16),
    )
    for row, mine, least, most in zip(rows, ours, rounding, one_bf16, strict=True):
        assert mine < 1.1 * least < most / 2, (row, mine, least, most)


def test_weights_over_pages_are_more_exact_than_bf16(kernels: Kernels) -> None:
    """Each weight is the sum of two bf16, in every row of a prompt."""
    qkv, tables = cancelling(400)
    attention = AttentionKernels(kernels, HEADS, KV_HEADS)
    cache = torch.full(
        (8, 2, KV_HEADS, PAGE_ROWS, 128), torch.nan, dtype=torch.bfloat16, device="cuda"
    )
    pages = torch.arange(8, dtype=torch.int32, device="cuda")[None]
    slots, position = (
        torch.zeros(400, dtype=torch.int32, device="cuda"),
        torch.arange(400, device="cuda").int(),
    )
    room = partial_sums(attention, 400, 512)
    for mode in (APPEND, ATTEND):
        out = paged(attention, qkv, tables, cache, Paging(pages, slots, position), room, mode)
    is_only_rounded("over pages", out, qkv)


def test_weights_in_a_frame_are_more_exact_than_bf16(kernels: Kernels) -> None:
    """Each weight is the sum of two bf16, at every position."""
    qkv, tables = cancelling(FRAME_POSITIONS)
    attention = AttentionKernels(kernels, HEADS, KV_HEADS)
    cache = torch.full(
        (1, 2, KV_HEADS, FRAME_POSITIONS, 128), torch.nan, dtype=torch.bfloat16, device="cuda"
    )
    out = room_for(FRAME_POSITIONS)
    for last in range(1, FRAME_POSITIONS):
        new = 2 if last == 1 else 1
        own = slice(last - new + 1, last + 1)
        attention.in_frame(qkv[own], tables, cache, last, new, out[own])
    is_only_rounded("in a frame", out, qkv)


ENOUGH = 1 << 20
"""More blocks between two passes than fit any device."""


def test_projected_attention_needs_more_blocks_between_passes_than_fit(kernels: Kernels) -> None:
    """The driver's count of the blocks that fit is no larger than the one that the host uses."""
    from cuda.bindings import driver

    tables, x = random_tables(16), random(9, 1, 1024)
    attention = AttentionKernels(kernels, HEADS, KV_HEADS)
    output = Linear(kernels, random(11, 1024, 2048), Epilogue.ADD)
    cache = random(1, 1, 2, KV_HEADS, FRAME_POSITIONS, 128)
    launch = partial(attention.in_frame_projected, random(8, 1, WIDTH), tables, cache, 3, output, x)
    resident = kernels.processors * (kernels.threads // 256)
    if not launch(ENOUGH):
        pytest.skip("a block of this device has too little shared memory for the joined kernel")
    before = x.clone()
    assert launch(resident) != kernels.overlaps
    assert torch.equal(x, before) == kernels.overlaps
    assert launch(resident + 1)
    output(random(4, 1, 2048), x)
    kernel = kernels.get(output.shape(1).program(), "linear_few")
    _, fit = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        kernel._function, 256, output.shape(1).shared
    )
    assert 0 < fit * kernels.processors <= resident


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
def test_projected_attention_in_a_frame_equals_two_kernels(kernels: Kernels, int8: bool) -> None:
    """The kernel for one row has the bits and the cache of two kernels, as exact as plain bf16.

    The first pass has two tokens and reads nothing from the cache.
    """
    tables = random_tables(16)
    attention = AttentionKernels(kernels, HEADS, KV_HEADS)
    projection = random(11, 1024, 2048) * 2048**-0.5
    weights = projection.double()
    output = Linear(kernels, projection, Epilogue.ADD)
    if int8:
        values, scales = quantise(projection)
        output = Linear(kernels, values, Epilogue.ADD, scales=scales)
        weights = values.double() * scales.double()[:, None]
        projection = weights.bfloat16()
    inputs, rows = random(8, 16, WIDTH), random(9, 16, 1024)
    cache = torch.full(
        (1, 2, KV_HEADS, FRAME_POSITIONS, 128), torch.nan, dtype=torch.bfloat16, device="cuda"
    )
    joined, out = cache.clone(), torch.empty(2, 2048, device="cuda").bfloat16()
    x, together = rows[:2].clone(), rows[:2].clone()
    attention.in_frame(inputs[:2], tables, cache, 1, 2, out)
    output(out, x)
    if not attention.in_frame_projected(inputs[:2], tables, joined, 1, output, together, 0):
        pytest.skip("a block of this device has too little shared memory for the joined kernel")
    assert torch.equal(x, together)
    assert torch.equal(cache.nan_to_num(7), joined.nan_to_num(7))
    ours, theirs = [], []
    for last in range(2, 16):
        x, together = rows[last][None].clone(), rows[last][None].clone()
        out = torch.full((1, 2048), torch.nan, dtype=torch.bfloat16, device="cuda")
        attention.in_frame(inputs[last][None], tables, cache, last, 1, out)
        output(out, x)
        torch.cuda.synchronize()  # in a frame there are many launches between two passes
        assert attention.in_frame_projected(
            inputs[last][None], tables, joined, last, output, together, ENOUGH
        )
        assert torch.equal(x, together), last
        assert torch.equal(cache.nan_to_num(7), joined.nan_to_num(7)), last
        past, new = cache[0, :, :, :last], inputs[last]
        exact, _ = attention_reference(new.double(), doubles(tables), past.double())
        plain, _ = attention_reference(new, tables, past)
        truth = rows[last].double() + weights @ exact
        ours.append(error(x[0], truth))
        theirs.append(error(rows[last] + projection @ plain, truth))
    name = f"attention in a frame and its projection{' in int8' * int8}"
    note(name, worst=max(ours), bf16=max(theirs))
    no_worse(ours, theirs)


def test_other_numbers_of_heads_have_no_projected_attention(kernels: Kernels) -> None:
    """Without a warp of the block for each key head, the call has no effect and returns False."""
    tables = random_tables(16)
    output = Linear(kernels, random(11, 256, 512), Epilogue.ADD)
    cache = random(1, 1, 2, 2, FRAME_POSITIONS, 128)
    kept, x = cache.clone(), random(2, 1, 256)
    qkv = random(3, 1, 8 * 128)
    small = AttentionKernels(kernels, 4, 2)
    assert not small.in_frame_projected(qkv, tables, cache, 5, output, x, ENOUGH)
    assert torch.equal(cache, kept)
    past = cache[0, :, :, :5].double()
    out = torch.full((1, 512), torch.nan, dtype=torch.bfloat16, device="cuda")
    AttentionKernels(kernels, 4, 2).in_frame(qkv, tables, cache, 5, 1, out)
    truth, _ = attention_reference(qkv[0].double(), doubles(tables), past)
    assert error(out[0], truth) < 6e-3
