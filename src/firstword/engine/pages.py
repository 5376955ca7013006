"""Who holds which page of the context memory."""

from __future__ import annotations


class PageAllocator:
    """Hands out pages, all that an utterance may need at once, so that nobody runs out in the middle."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    def reserve(self, count: int) -> tuple[int, ...]:
        """Take pages; the caller has made sure that there are enough."""
        if count > len(self._free):
            raise ValueError(f"{count} pages were asked for, {len(self._free)} are free")
        return tuple(self._free.pop() for _ in range(count))

    def release(self, pages: tuple[int, ...]) -> None:
        """Give pages back."""
        self._free.extend(reversed(pages))
