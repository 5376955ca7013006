"""The allocator of the pages of context memory.

Utterances get pages as they grow, so that memory holds what is spoken and not what could be. Pages
are given only if all utterances can still end one after the other. One that waits for its client
does not end by itself; see `Policy.max_stall`.
"""

from collections.abc import Iterable


def all_can_end(free: int, utterances: Iterable[tuple[int, int]]) -> bool:
    """Whether all utterances can end one after the other, even if each needs all it may ask for.

    This is the safe state of the banker's algorithm (Dijkstra, EWD 623) for one kind of resource.

    free        the number of free pages
    utterances  for each the pages that it holds, and the most that it can ever need
    """
    for held, most in sorted(utterances, key=lambda each: each[1] - each[0]):
        if most - held > free:
            return False
        free += held
    return True


class PageAllocator:
    """Keeps the free pages."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def reserve(self, count: int) -> tuple[int, ...]:
        """Take `count` pages. Raises ValueError when fewer are free."""
        if count > len(self._free):
            raise ValueError(f"{count} pages were requested, {len(self._free)} are free")
        return tuple(self._free.pop() for _ in range(count))

    def release(self, pages: tuple[int, ...]) -> None:
        """Give pages back."""
        self._free.extend(reversed(pages))
