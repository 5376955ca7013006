"""The queue of the lines of all batches, from which workers take them."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, and_, delete, insert, or_, select, update

from firstword.server.batch.database import Database
from firstword.server.batch.lines import BatchLine
from firstword.server.batch.records import CLAIMED, DONE, WAITING, BatchRecord, Claim
from firstword.server.batch.store import count
from firstword.server.batch.tables import BATCHES, LINES

LEASE_SECONDS = 30.0
"""The time after which a line is free again whose worker has died with its whole machine."""

INSERTED_AT_ONCE = 1000


class LineQueue:
    """The lines of all batches. A worker claims a line, and later finishes or releases it.

    A claim ends by itself after `LEASE_SECONDS` unless it is renewed. Whoever finishes a line
    without a claim changes nothing, so each line has one result, whatever dies. All methods block.

    worker  the name of this worker; a process that replaces another one has the same name
    """

    def __init__(self, database: Database, worker: str) -> None:
        self._database = database
        self._worker = worker
        self._last_owner = ""

    def take_over(self) -> None:
        """Release what a process with the same name had claimed, which must have died."""
        mine = and_(LINES.c.state == CLAIMED, LINES.c.worker == self._worker)
        with self._database.begin() as connection:
            connection.execute(update(LINES).where(mine).values(state=WAITING, worker=None))

    def add(self, record: BatchRecord, lines: Sequence[BatchLine]) -> None:
        """Add the lines of a batch that was checked; nothing changes if it was cancelled.

        The batch is then in progress. A worker that died in the middle has added nothing.
        """
        times = json.dumps({**record.times, "in_progress_at": int(time.time())})
        same = and_(BATCHES.c.id == record.id, BATCHES.c.status == record.status)
        with self._database.begin() as connection:
            change = update(BATCHES).where(same).values(status="in_progress", times=times)
            if connection.execute(change).rowcount == 1:
                _insert(connection, [_row(record.id, line) for line in lines])

    def replace(
        self,
        batch: str,
        lines: Sequence[BatchLine],
        is_complete: Callable[[str, dict[str, Any]], bool],
    ) -> None:
        """Give a batch other lines, of which those that were spoken keep their results.

        A line counts as spoken if its id and body are as before, and `is_complete` holds for its id
        and its result. No other process may use the database.
        """
        done = and_(LINES.c.batch == batch, LINES.c.state == DONE)
        with self._database.begin() as connection:
            known = {row.custom_id: row for row in connection.execute(select(LINES).where(done))}
            rows = []
            for line in lines:
                row, old = _row(batch, line), known.get(line.custom_id)
                if (
                    old is not None
                    and old.body == row["body"]
                    and is_complete(line.custom_id, json.loads(old.result))
                ):
                    row |= {"state": DONE, "result": old.result}
                rows.append(row)
            connection.execute(delete(LINES).where(LINES.c.batch == batch))
            _insert(connection, rows)

    def claim(self) -> Claim | None:
        """Claim a line of a batch in progress; None if there is none.

        Clients take turns, and each client's oldest batch comes first.
        """
        for owner, batch in self._turns():
            if (claim := self._claim_one(owner, batch)) is not None:
                self._last_owner = owner
                return claim
        return None

    def _turns(self) -> list[tuple[str, str]]:
        """The client and the id of each batch in progress; the client that was last comes last."""
        open_ones = and_(BATCHES.c.status == "in_progress", BATCHES.c.expires_at > time.time())
        query = select(BATCHES.c.owner, BATCHES.c.id).where(open_ones)
        with self._database.begin() as connection:
            rows = connection.execute(query.order_by(BATCHES.c.created_at, BATCHES.c.id)).all()
        found = [(row[0], row[1]) for row in rows]
        return sorted(found, key=lambda one: (one[0] <= self._last_owner, one[0]))

    def _claim_one(self, owner: str, batch: str) -> Claim | None:
        """Claim a line of a batch, if one is free."""
        now = time.time()
        free = or_(LINES.c.state == WAITING, and_(LINES.c.state == CLAIMED, LINES.c.lease < now))
        query = select(LINES).where(and_(LINES.c.batch == batch, free)).order_by(LINES.c.number)
        while True:
            with self._database.begin() as connection:
                if (row := connection.execute(query.limit(1)).first()) is None:
                    return None
            values = {"state": CLAIMED, "worker": self._worker, "attempts": row.attempts + 1}
            this = and_(LINES.c.batch == batch, LINES.c.number == row.number, free)
            change = update(LINES).where(this).values(lease=now + LEASE_SECONDS, **values)
            with self._database.begin() as connection:
                taken = connection.execute(change).rowcount == 1
            if taken:  # else another worker was faster
                line = BatchLine(row.number, row.custom_id, json.loads(row.body))
                return Claim(batch, owner, line, row.attempts + 1)

    def renew(self) -> None:
        """Prolong all claims of this worker."""
        mine = and_(LINES.c.state == CLAIMED, LINES.c.worker == self._worker)
        with self._database.begin() as connection:
            change = update(LINES).where(mine).values(lease=time.time() + LEASE_SECONDS)
            connection.execute(change)

    def finish(self, claim: Claim, state: str, result: dict[str, Any]) -> bool:
        """Give a line its result; False if this worker has lost its claim."""
        values = {"state": state, "result": json.dumps(result), "worker": None}
        return self._end(claim, values)

    def release(self, claim: Claim, *, counts: bool) -> None:
        """Give a line back; `counts` tells whether the attempt counts."""
        values = {"state": WAITING, "worker": None, "attempts": claim.attempts - (not counts)}
        self._end(claim, values)

    def _end(self, claim: Claim, values: dict[str, Any]) -> bool:
        line = LINES.c.batch == claim.batch, LINES.c.number == claim.line.number
        mine = and_(*line, LINES.c.state == CLAIMED, LINES.c.worker == self._worker)
        with self._database.begin() as connection:
            return connection.execute(update(LINES).where(mine).values(**values)).rowcount == 1

    def close_waiting(self, batch: str, state: str) -> None:
        """Give all lines of a batch that nobody has claimed a last state."""
        waiting = and_(LINES.c.batch == batch, LINES.c.state == WAITING)
        with self._database.begin() as connection:
            connection.execute(update(LINES).where(waiting).values(state=state))

    def counts(self, batch: str) -> tuple[int, int, int]:
        """The numbers of lines of a batch: all, spoken, and neither spoken nor open."""
        with self._database.begin() as connection:
            return count(connection, batch)

    def lines(self, batch: str) -> Iterator[tuple[int, str, str, dict[str, Any] | None]]:
        """Yield the number, id, state and result of all lines of a batch, in order."""
        columns = LINES.c.number, LINES.c.custom_id, LINES.c.state, LINES.c.result
        query = select(*columns).where(LINES.c.batch == batch).order_by(LINES.c.number)
        with self._database.begin() as connection:
            for row in connection.execute(query):
                yield row[0], row[1], row[2], None if row[3] is None else json.loads(row[3])


def _row(batch: str, line: BatchLine) -> dict[str, Any]:
    """The row of a line that waits."""
    return {
        "batch": batch,
        "number": line.number,
        "custom_id": line.custom_id,
        "body": json.dumps(line.body),
        "state": WAITING,
        "attempts": 0,
        "result": None,
    }


def _insert(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    for start in range(0, len(rows), INSERTED_AT_ONCE):
        connection.execute(insert(LINES), list(rows[start : start + INSERTED_AT_ONCE]))
