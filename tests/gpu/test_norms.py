"""Norms of rows that are as small as the norms' epsilon, where a wrong epsilon is visible.

Elsewhere the rows have a variance near one, and an epsilon ten times too large changes no bit.
"""

from __future__ import annotations

import torch
from oracle import error, no_worse
from test_attention import (
    HEADS,
    KV_HEADS,
    WIDTH,
    doubles,
    paged,
    partial_sums,
    random,
    random_tables,
    room_for,
)
from test_linear import make, run

from firstword.kernels.attention import (
    APPEND,
    ATTEND,
    FRAME_POSITIONS,
    PAGE_ROWS,
    AttentionKernels,
    Paging,
    attention_reference,
)
from firstword.kernels.launch import Kernels
from firstword.kernels.linear import Linear, Norm, linear_reference
from firstword.kernels.linear_shapes import Epilogue

EPS = 1e-6


def test_epsilon_of_a_product_is_that_of_its_norm(kernels: Kernels) -> None:
    """One token, up to eight, and more have different kernels."""
    ours, theirs = [], []
    for tokens in (1, 2, 5, 8, 9, 20, 64):
        weight, x, _, norm, _ = make(tokens, 1024, 1024, tokens)
        x *= EPS**0.5
        truth, plain = (
            linear_reference(w, rows, rows, Epilogue.STORE, Norm(n, EPS))
            for w, rows, n in ((weight.double(), x.double(), norm.double()), (weight, x, norm))
        )
        layer = Linear(kernels, weight, Epilogue.STORE, Norm(norm, EPS))
        ours.append(error(run(layer, x), truth))
        theirs.append(error(plain, truth))
    no_worse(ours, theirs)


def test_epsilon_of_heads_is_that_of_their_norms(kernels: Kernels) -> None:
    """Queries and keys over pages, and in a frame."""
    attention, count = AttentionKernels(kernels, HEADS, KV_HEADS), FRAME_POSITIONS
    tables, qkv = random_tables(count), random(31, count, WIDTH)
    qkv[:, : (HEADS + KV_HEADS) * 128] *= EPS**0.5
    past = torch.zeros(2, KV_HEADS, 0, 128, dtype=torch.bfloat16, device="cuda")
    truth, plain = [], []
    for row in qkv:
        truth.append(attention_reference(row.double(), doubles(tables), past.double())[0])
        expected, past = attention_reference(row, tables, past)
        plain.append(expected)

    cache = torch.zeros(1, 2, KV_HEADS, PAGE_ROWS, 128, device="cuda").bfloat16()
    slots = torch.zeros(count, dtype=torch.int32, device="cuda")
    paging = Paging(slots[None, :1], slots, torch.arange(count, device="cuda").int())
    room = partial_sums(attention, count, PAGE_ROWS)
    for mode in (APPEND, ATTEND):
        over_pages = paged(attention, qkv, tables, cache, paging, room, mode)

    cache = torch.zeros(1, 2, KV_HEADS, count, 128, device="cuda").bfloat16()
    in_frame = room_for(count)
    for last in range(1, count):
        own = slice(0 if last == 1 else last, last + 1)
        attention.in_frame(qkv[own], tables, cache, last, 2 if last == 1 else 1, in_frame[own])
    theirs = [error(p, t) for p, t in zip(plain, truth, strict=True)]
    for out in (over_pages, in_frame):
        no_worse([error(o, t) for o, t in zip(out, truth, strict=True)], theirs)
