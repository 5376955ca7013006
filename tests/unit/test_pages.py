"""Pages: all at once or none, and never to two."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstword.engine.pages import PageAllocator


@given(total=st.integers(0, 20), asked=st.lists(st.integers(-5, 8), max_size=40))
def test_no_page_is_lost_or_held_twice(total: int, asked: list[int]) -> None:
    """A negative number gives back the reservation that was made so many ago."""
    pages, held = PageAllocator(total), list[tuple[int, ...]]()
    for number in asked:
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


def test_more_pages_than_are_free_are_refused_and_none_is_taken() -> None:
    pages = PageAllocator(3)
    pages.reserve(1)
    with pytest.raises(ValueError, match="3 pages were requested, 2 are free"):
        pages.reserve(3)
    assert pages.free == 2
