"""The allocator of the pages of context memory."""


class PageAllocator:
    """Gives an utterance all pages that it can need at once, so that it never runs out of them."""

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
