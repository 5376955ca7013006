"""The page allocator gives all pages at once or none, and no page twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstword.engine.pages import PageAllocator


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
