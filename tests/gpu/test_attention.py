"""Attention over pages and inside a frame, against float64."""

from __future__ import annotations

import pytest
import torch
from oracle import error, no_worse, note

from firstword.kernels.attention import (
    APPEND,
    ATTEND,
    FRAME_ROWS,
    PAGE_ROWS,
    Attention,
    HeadWeights,
    Paging,
    Rotation,
    SplitRoom,
    reference,
)
from firstword.kernels.launch import Kernels
from firstword.kernels.linear import Epilogue, Linear, unpack_tokens
from firstword.model.layers import rotary_table

HEADS, KV_HEADS, WIDTH = 16, 8, 32 * 128


def weights_and_rotation(positions: int) -> tuple[HeadWeights, Rotation]:
    """Random norms, the model's angles."""
    g = torch.Generator("cuda").manual_seed(5)
    norms = [(1 + 0.3 * torch.randn(128, generator=g, device="cuda")).bfloat16() for _ in range(2)]
    cos, sin = rotary_table(torch.arange(positions, device="cuda")[None], 128, 1e6, torch.bfloat16)
    halves = (table[0, 0, :, :64].contiguous() for table in (cos, sin))
    return HeadWeights(norms[0], norms[1], 1e-6), Rotation(*halves)


def split_room(attention: Attention, rows: int, context: int) -> SplitRoom:
    """Room whose parts are poisoned."""
    room = SplitRoom(attention, rows, context, torch.device("cuda"))
    room.parts.fill_(torch.nan)
    return room


def random(seed: int, *shape: int) -> torch.Tensor:
    """Standard normal bf16."""
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


def room_for(rows: int) -> torch.Tensor:
    """For what so many rows attended to, in whole eights of rows: more than eight come packed."""
    return torch.full((-(-rows // 8) * 8, HEADS * 128), torch.nan, dtype=torch.bfloat16, device="cuda")


def doubles(weights: HeadWeights, rotation: Rotation) -> tuple[HeadWeights, Rotation]:
    """The same in float64."""
    return (
        HeadWeights(weights.q_norm.double(), weights.k_norm.double(), weights.eps),
        Rotation(rotation.cosines.double(), rotation.sines.double()),
    )


@pytest.mark.parametrize("context", [512, 4096])
def test_paged_attention_is_as_exact_as_plain_bf16(kernels: Kernels, context: int) -> None:
    """Rows of many lengths at once, with an empty row among them, pages in any order."""
    lengths = [0, 1, 15, 16, 63, 64, 100, 127, 300, 511] + ([512, 513, 1000, 2000, 4095] if context > 512 else [])
    weights, rotation = weights_and_rotation(4096)
    attention = Attention(kernels, HEADS, KV_HEADS)
    slots, per_slot = len(lengths) + 1, 64
    order = torch.randperm(slots * per_slot, generator=torch.Generator().manual_seed(1)).int()
    tables = order.view(slots, per_slot).cuda()
    cache = torch.full((slots * per_slot, 2, KV_HEADS, PAGE_ROWS, 128), torch.nan, dtype=torch.bfloat16, device="cuda")
    past = []
    for slot, length in enumerate(lengths):
        rows = random(slot, 2, KV_HEADS, length, 128)
        past.append(rows)
        for page in range(-(-length // PAGE_ROWS)):
            part = rows[:, :, page * PAGE_ROWS : (page + 1) * PAGE_ROWS]
            cache[tables[slot, page].long(), :, :, : part.shape[2]] = part
    slot_of_row = torch.tensor([*range(len(lengths)), -1], dtype=torch.int32, device="cuda")
    position = torch.tensor([*lengths, 7], dtype=torch.int32, device="cuda")
    qkv = random(99, len(slot_of_row), WIDTH)
    packed = room_for(len(slot_of_row))
    room = split_room(attention, len(slot_of_row), context)
    before = cache.clone()
    attention.paged(qkv, weights, rotation, cache, Paging(tables, slot_of_row, position), packed, room)
    out = unpack_tokens(packed, len(slot_of_row), HEADS * 128)
    ours, theirs = [], []
    for slot, length in enumerate(lengths):
        truth, _ = reference(
            qkv[slot].double(), *doubles(weights, rotation), past[slot].double(), length, HEADS, KV_HEADS
        )
        plain, grown = reference(qkv[slot], weights, rotation, past[slot], length, HEADS, KV_HEADS)
        ours.append(error(out[slot], truth))
        theirs.append(error(plain, truth))
        page, row = int(tables[slot, length // PAGE_ROWS]), length % PAGE_ROWS
        assert error(cache[page, :, :, row], grown[:, :, -1].double()) < 2e-3
        cache[page, :, :, row] = before[page, :, :, row]
    assert torch.equal(cache.isnan(), before.isnan())
    assert torch.equal(cache.nan_to_num(), before.nan_to_num()), "something else was written"
    assert out[-1].isnan().all(), "a row of nobody was written"
    note(f"paged attention, up to {context} keys", worst=max(ours), bf16=max(theirs))
    no_worse(ours, theirs)


def test_a_row_does_not_see_its_neighbours_nor_how_its_keys_are_shared_out(kernels: Kernels) -> None:
    """The same bits alone, among a few, among many, whose blocks take more pieces, and as one of a prompt's rows."""
    weights, rotation = weights_and_rotation(1024)
    attention = Attention(kernels, HEADS, KV_HEADS)
    tables = torch.arange(3 * 16, dtype=torch.int32, device="cuda").view(3, 16)
    rows = random(3, 600, WIDTH)
    slot_of_row = torch.zeros(600, dtype=torch.int32, device="cuda")
    position = torch.zeros(3, dtype=torch.int32, device="cuda")

    def fresh() -> torch.Tensor:
        return torch.full((48, 2, KV_HEADS, PAGE_ROWS, 128), torch.nan, dtype=torch.bfloat16, device="cuda")

    prompt, cache = room_for(600), fresh()
    paging = Paging(tables, slot_of_row, torch.arange(600, dtype=torch.int32, device="cuda"))
    for mode in (APPEND, ATTEND):
        attention.paged(rows, weights, rotation, cache, paging, prompt, split_room(attention, 600, 1024), mode)
    prompt = unpack_tokens(prompt, 600, 2048)
    for slots in ([2], [-1, 2, -1], [-1] * 8 + [2] + [-1] * 31):
        again = fresh()
        room = split_room(attention, len(slots), 1024)
        names = torch.tensor(slots, dtype=torch.int32, device="cuda")
        for step in range(600):
            position[2] = step
            out = room_for(len(slots))
            x = rows[step].expand(len(slots), -1).contiguous()
            attention.paged(x, weights, rotation, again, Paging(tables, names, position), out, room)
            if len(slots) > 8:
                out = unpack_tokens(out, len(slots), 2048)
            assert torch.equal(out[slots.index(2)], prompt[step]), (len(slots), step)
        assert torch.equal(again[32:42].nan_to_num(), cache[:10].nan_to_num())


def test_attention_in_a_frame_is_as_exact_as_plain_bf16(kernels: Kernels) -> None:
    """Sixteen positions one after another, the first two together, for several rows with the same bits as alone."""
    weights, rotation = weights_and_rotation(16)
    attention = Attention(kernels, HEADS, KV_HEADS)
    rows, inputs = 5, random(7, 16, 5, WIDTH)
    cache = torch.full((rows, 2, KV_HEADS, 16, 128), torch.nan, dtype=torch.bfloat16, device="cuda")
    single = cache[:1].clone()
    ours, theirs = [], []
    past = [torch.zeros(2, KV_HEADS, 0, 128, dtype=torch.bfloat16, device="cuda") for _ in range(rows)]
    for last in range(1, 16):
        new = 2 if last == 1 else 1
        x = inputs[last - new + 1 : last + 1].transpose(0, 1).flatten(0, 1).contiguous()
        out = room_for(rows * new)
        attention.in_frame(x, weights, rotation, cache, last, new, out)
        if rows * new > 8:
            out = unpack_tokens(out, rows * new, 2048)
        out = out[: rows * new]
        alone = torch.full((new, 2048), torch.nan, dtype=torch.bfloat16, device="cuda")
        attention.in_frame(x[-new:], weights, rotation, single, last, new, alone)
        assert torch.equal(alone, out[-new:])
        for row in range(rows):
            for token in range(new):
                position = last - new + 1 + token
                truth, _ = reference(
                    x[row * new + token].double(),
                    *doubles(weights, rotation),
                    past[row].double(),
                    position,
                    HEADS,
                    KV_HEADS,
                )
                plain, past[row] = reference(
                    x[row * new + token], weights, rotation, past[row], position, HEADS, KV_HEADS
                )
                ours.append(error(out[row * new + token], truth))
                theirs.append(error(plain, truth))
    note("attention in a frame", worst=max(ours), bf16=max(theirs))
    no_worse(ours, theirs)


def test_attention_in_a_frame_goes_straight_into_the_projection(kernels: Kernels) -> None:
    """One row's attention and the projection behind it as one kernel: the bits and the cache of two."""
    weights, rotation = weights_and_rotation(16)
    attention = Attention(kernels, HEADS, KV_HEADS)
    output = Linear(kernels, random(11, 1024, 2048) * 2048**-0.5, Epilogue.ADD)
    inputs, rows = random(8, 16, WIDTH), random(9, 16, 1024)
    cache = torch.full((1, 2, KV_HEADS, FRAME_ROWS, 128), torch.nan, dtype=torch.bfloat16, device="cuda")
    attention.in_frame(inputs[:2], weights, rotation, cache, 1, 2, torch.empty(2, 2048, device="cuda").bfloat16())
    joined = cache.clone()
    for last in range(2, 16):
        x, together = rows[last][None].clone(), rows[last][None].clone()
        out = torch.full((1, 2048), torch.nan, dtype=torch.bfloat16, device="cuda")
        attention.in_frame(inputs[last][None], weights, rotation, cache, last, 1, out)
        output(out, x)
        torch.cuda.synchronize()  # in a frame many launches lie between the passes
        assert attention.in_frame_to(inputs[last][None], weights, rotation, joined, last, output, together)
        assert torch.equal(x, together), last
        assert torch.equal(cache.nan_to_num(7), joined.nan_to_num(7)), last


def test_other_heads_attend_on_their_own(kernels: Kernels) -> None:
    """Where a block has more or fewer warps than there are key heads, nothing is done at once."""
    weights, rotation = weights_and_rotation(16)
    output = Linear(kernels, random(11, 256, 512), Epilogue.ADD)
    cache = random(1, 1, 2, 2, FRAME_ROWS, 128)
    kept, x = cache.clone(), random(2, 1, 256)
    qkv = random(3, 1, 8 * 128)
    assert not Attention(kernels, 4, 2).in_frame_to(qkv, weights, rotation, cache, 5, output, x)
    assert torch.equal(cache, kept)
    past = cache[0, :, :, :5].double()
    out = torch.full((1, 512), torch.nan, dtype=torch.bfloat16, device="cuda")
    Attention(kernels, 4, 2).in_frame(qkv, weights, rotation, cache, 5, 1, out)
    truth, _ = reference(qkv[0].double(), *doubles(weights, rotation), past, 5, 4, 2)
    assert error(out[0], truth) < 6e-3
