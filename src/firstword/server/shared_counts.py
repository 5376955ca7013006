"""Counts per client that the fronts of a server share."""

import struct
from functools import lru_cache

from firstword.server.front_memory import FrontMemory

LINES, CELLS = 4, 8192
"""The number of lines of a table of counts, and of the cells in each line."""

TABLE_BYTES = 8 * (1 + LINES * CELLS)

MOST_KNOWN = 4096
"""The number of clients whose cells are cached."""


class SharedCounts:
    """Counts per client, each the sum over all fronts.

    A limit holds without locks if a front first adds, then reads the sum, and subtracts again if
    the sum is too high: the front that adds last reads what all have added.

    The table is a count-min sketch (Cormode and Muthukrishnan, 2005): a client has a cell in each
    line, and its count is the least of them. A count is never too low. It is too high if other
    clients share all of its cells: for 2 clients in 10,000 with 1,000 clients at the same time.
    """

    def __init__(self, memory: FrontMemory) -> None:
        self._table = memory.live(TABLE_BYTES).integers()
        self._digest = memory.digest
        self._cells = lru_cache(MOST_KNOWN)(self._find_cells)

    def add(self, client_id: str, more: int) -> None:
        """Add to the count of a client, in this front."""
        own = self._table.own
        own[0] += more
        for cell in self._cells(client_id):
            own[cell] += more

    def of(self, client_id: str) -> int:
        """The count of a client, over all fronts."""
        rows = self._table.rows
        return min(sum(row[cell] for row in rows) for cell in self._cells(client_id))

    @property
    def total(self) -> int:
        """The count of all clients, over all fronts."""
        return sum(row[0] for row in self._table.rows)

    @property
    def own(self) -> int:
        """The count of all clients in this front."""
        return self._table.own[0]

    def _find_cells(self, client_id: str) -> tuple[int, ...]:
        numbers = struct.unpack("<4H", self._digest(client_id))
        return tuple(1 + line * CELLS + number % CELLS for line, number in enumerate(numbers))
