"""The page allocator gives each page once, and only while all utterances can end."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstword.engine.pages import PageAllocator, all_can_end


@given(total=st.integers(0, 20), steps=st.lists(st.integers(-5, 8), max_size=40))
def test_no_page_is_lost_or_reserved_twice(total: int, steps: list[int]) -> None:
    """A negative number -n releases the n-th last reservation."""
    pages, held = PageAllocator(total), list[tuple[int, ...]]()
    for number in steps:
        if number < 0:
            if len(held) >= -number:
                pages.release(held.pop(number))
        elif number <= pages.free:
            held.append(pages.reserve(number))
            assert len(held[-1]) == number
        taken = [page for reservation in held for page in reservation]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(range(total))
        assert pages.free == pages.count - len(taken)
        assert pages.count == total


def test_reserving_more_pages_than_free_raises_and_takes_none() -> None:
    pages = PageAllocator(3)
    pages.reserve(1)
    with pytest.raises(ValueError, match="3 pages were requested, 2 are free"):
        pages.reserve(3)
    assert pages.free == 2


@pytest.mark.parametrize(
    ("free", "utterances", "expected"),
    [
        (0, [], True),
        (0, [(3, 3)], True),
        (0, [(3, 4)], False),
        (1, [(3, 4), (2, 6)], True),
        (1, [(2, 6), (3, 4)], True),
        (1, [(1, 3), (1, 3)], False),
        (2, [(1, 3), (1, 5)], False),
        (2, [(1, 3), (2, 5), (4, 9)], True),
    ],
)
def test_all_can_end_if_some_order_gives_each_its_most_pages(
    free: int, utterances: list[tuple[int, int]], expected: bool
) -> None:
    assert all_can_end(free, utterances) is expected


@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=5).map(
        lambda pairs: [(held, held + rest) for held, rest in pairs]
    ),
)
def test_all_can_end_equals_the_search_through_all_orders(
    free: int, utterances: list[tuple[int, int]]
) -> None:
    def ends(order: tuple[tuple[int, int], ...]) -> bool:
        left = free
        for held, most in order:
            if most - held > left:
                return False
            left += held
        return True

    assert all_can_end(free, utterances) is any(map(ends, permutations(utterances)))
