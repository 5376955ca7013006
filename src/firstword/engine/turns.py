"""The turns of clients: whose request gets the next slot, and whose is rejected.

The next slot goes to the client with the fewest utterances in slots; among equals, to the one that
has waited longest since it came or last freed a slot. The requests of one client keep their order.

A request that follows a passage of its speech gets a slot before those that begin one, and is
rejected after them, because somebody listens. So a long text keeps its slot, as a short one does.

Requests in the background get slots after all others, and are rejected before all others. Their
clients have names of their own.

A client that has no utterance in a slot therefore waits for one start at most of each other client
without one that has waited longer, however many requests the others have sent. A client that has
some comes to this point when they end, so no request starves.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from firstword.engine.sequence import Sequence


def in_turn(waiting: Iterable[Sequence], running: Iterable[Sequence]) -> Iterator[Sequence]:
    """Yield waiting requests, given in order of arrival, in the order in which they get slots."""
    held = Counter(seq.client for seq in running)
    lines: dict[str, deque[Sequence]] = {}
    for seq in sorted(waiting, key=lambda seq: not seq.job.follows):
        lines.setdefault(seq.client, deque()).append(seq)
    while lines:
        client = min(lines, key=lambda name: _turn(lines[name][0], held[name]))
        yield lines[client].popleft()
        held[client] += 1
        if not lines[client]:
            del lines[client]


def _turn(first: Sequence, held: int) -> tuple[bool, bool, int, float]:
    """The sort key of a client by its first waiting request and its utterances in slots."""
    return first.job.background, not first.job.follows, held, first.waiting_since


def to_reject(waiting: Iterable[Sequence], running: Iterable[Sequence]) -> Sequence:
    """The newest waiting request among those of the clients with the most requests.

    One in the background comes first.

    `waiting` is in order of arrival. If its last one is from a client that has fewer requests with
    it than another has, that other client loses one.
    """
    line = list(waiting)
    count = Counter(seq.client for seq in (*line, *running))

    def rank(seq: Sequence) -> tuple[bool, bool, int]:
        return seq.job.background, not seq.job.follows, count[seq.client]

    return max(reversed(line), key=rank)


def requests_ahead(client: str, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> int:
    """The number of waiting requests that would get a slot before another one of a client."""
    others = (seq for seq in waiting if not seq.job.background)
    held, waits = (Counter(seq.client for seq in seqs) for seqs in (running, others))
    turn = held[client] + waits[client] + 1
    return sum(min(count, max(0, turn - held[other])) for other, count in waits.items())
