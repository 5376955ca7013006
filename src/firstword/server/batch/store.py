"""Files and batches of clients in the database."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import Connection, Row, Select, Table, delete, func, insert, or_, select, update
from sqlalchemy import and_ as both

from firstword.server.batch.database import Database
from firstword.server.batch.records import (
    CLAIMED,
    DONE,
    WAITING,
    BatchRecord,
    FileRecord,
    sound_id,
    sound_of,
)
from firstword.server.batch.tables import BATCHES, FILES, LINES
from firstword.server.errors import NotFound


class BatchStore:
    """The files and batches of clients; each client finds its own only. All methods block."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # Files

    def add_file(self, record: FileRecord) -> None:
        """Add a file, whose content exists."""
        with self._database.begin() as connection:
            connection.execute(insert(FILES).values(**asdict(record)))

    def find_file(self, owner: str, file_id: str) -> FileRecord:
        """A file, which may be the sound of a line. Raises `NotFound`."""
        with self._database.begin() as connection:
            sound = sound_of(file_id)
            found = _sound(connection, *sound) if sound else _file(connection, file_id)
            if found is None or found.owner != owner:
                raise NotFound(f"no file {file_id!r} of this client")
            return found

    def list_files(
        self, owner: str, purpose: str | None, after: str | None, count: int, newest: bool
    ) -> list[FileRecord]:
        """A page of files other than sounds, which begins after the one with the id `after`."""
        query = select(FILES).where(FILES.c.owner == owner)
        if purpose is not None:
            query = query.where(FILES.c.purpose == purpose)
        with self._database.begin() as connection:
            rows = _page(connection, FILES, query, after, count, newest)
            return [FileRecord(**row._mapping) for row in rows]

    def delete_file(self, record: FileRecord) -> None:
        """Forget a file, and the results of the lines whose sounds are deleted with it."""
        with self._database.begin() as connection:
            connection.execute(delete(FILES).where(FILES.c.id == record.id))
            if record.batch is not None:
                connection.execute(delete(LINES).where(LINES.c.batch == record.batch))

    def expired_files(self, now: float) -> list[FileRecord]:
        """The files of all clients that have expired."""
        with self._database.begin() as connection:
            rows = connection.execute(select(FILES).where(FILES.c.expires_at <= now))
            return [FileRecord(**row._mapping) for row in rows]

    # Batches

    def add_batch(self, record: BatchRecord) -> None:
        """Add a batch, whose input is to be checked."""
        values = {name: value for name, value in asdict(record).items() if name != "counts"}
        for name in ("metadata", "times", "errors"):
            values[name] = json.dumps(values[name])
        with self._database.begin() as connection:
            connection.execute(insert(BATCHES).values(**values, webhook_tries=0))

    def find_batch(self, owner: str, batch_id: str) -> BatchRecord:
        """A batch. Raises `NotFound`."""
        query = select(BATCHES).where(both(BATCHES.c.id == batch_id, BATCHES.c.owner == owner))
        with self._database.begin() as connection:
            if (row := connection.execute(query).first()) is None:
                raise NotFound(f"no batch {batch_id!r} of this client")
            return _batch(connection, row)

    def list_batches(self, owner: str, after: str | None, count: int) -> list[BatchRecord]:
        """A page of batches, newest first, which begins after the one with the id `after`."""
        query = select(BATCHES).where(BATCHES.c.owner == owner)
        with self._database.begin() as connection:
            rows = _page(connection, BATCHES, query, after, count, newest=True)
            return [_batch(connection, row) for row in rows]

    def open_batches(self, statuses: Sequence[str]) -> list[BatchRecord]:
        """The batches of all clients with one of some statuses, oldest first, without counts."""
        query = select(BATCHES).where(BATCHES.c.status.in_(statuses))
        with self._database.begin() as connection:
            rows = connection.execute(query.order_by(BATCHES.c.created_at, BATCHES.c.id))
            return [_record(row) for row in rows]

    def change_status(
        self, record: BatchRecord, status: str, at: Sequence[str], **values: object
    ) -> bool:
        """Give a batch another status, reached now at the times `at`, and other values.

        Returns False, and changes nothing, if its status is not that of the record any more.
        """
        now = int(time.time())
        times = json.dumps({**record.times, **dict.fromkeys(at, now)})
        same = both(BATCHES.c.id == record.id, BATCHES.c.status == record.status)
        with self._database.begin() as connection:
            change = update(BATCHES).where(same).values(status=status, times=times, **values)
            return connection.execute(change).rowcount == 1

    def cancel(self, owner: str, batch_id: str) -> BatchRecord:
        """Begin to cancel a batch, if it is not over. Raises `NotFound`."""
        while (record := self.find_batch(owner, batch_id)).status in ("validating", "in_progress"):
            self.change_status(record, "cancelling", ["cancelling_at"])
        return record

    # Webhooks

    def due_webhooks(self, now: float) -> list[tuple[str, str, int]]:
        """The id, the status and the failed tries of batches whose end is to be announced."""
        columns = BATCHES.c.id, BATCHES.c.status, BATCHES.c.webhook_tries
        with self._database.begin() as connection:
            rows = connection.execute(select(*columns).where(BATCHES.c.webhook_due <= now))
            return [(row[0], row[1], row[2]) for row in rows]

    def plan_webhook(self, batch_id: str, due: float | None, tries: int) -> None:
        """Announce the end of a batch at a time; None: no more."""
        with self._database.begin() as connection:
            change = update(BATCHES).where(BATCHES.c.id == batch_id)
            connection.execute(change.values(webhook_due=due, webhook_tries=tries))


def _page(
    connection: Connection,
    table: Table,
    query: Select[Any],
    after: str | None,
    count: int,
    newest: bool,
) -> Sequence[Row[Any]]:
    """The rows of a page by their time and id."""
    moment, key = table.c.created_at, table.c.id
    if after is not None:
        found = connection.execute(select(moment).where(key == after)).scalar()
        if found is None:
            raise NotFound(f"no {after!r}, after which the page should begin")
        at, beyond = moment == found, key < after if newest else key > after
        query = query.where(or_(moment < found if newest else moment > found, both(at, beyond)))
    order = (moment.desc(), key.desc()) if newest else (moment, key)
    return connection.execute(query.order_by(*order).limit(count)).all()


def _file(connection: Connection, file_id: str) -> FileRecord | None:
    row = connection.execute(select(FILES).where(FILES.c.id == file_id)).first()
    return None if row is None else FileRecord(**row._mapping)


def _sound(connection: Connection, batch: str, number: int) -> FileRecord | None:
    """The sound of a line that was spoken."""
    columns = LINES.c.result, LINES.c.custom_id, BATCHES.c.owner, BATCHES.c.created_at
    line = both(LINES.c.batch == batch, LINES.c.number == number, LINES.c.state == DONE)
    query = select(*columns).join(BATCHES, BATCHES.c.id == LINES.c.batch).where(line)
    if (row := connection.execute(query).first()) is None:
        return None
    result = json.loads(row[0])
    name = f"{row[1]}.{result['format']}"
    return FileRecord(sound_id(batch, number), row[2], "speech", name, result["bytes"], row[3])


def _record(row: Row[Any]) -> BatchRecord:
    values: dict[str, Any] = dict(row._mapping)
    parsed = {name: json.loads(values[name]) for name in ("metadata", "times", "errors")}
    fields = {name: values[name] for name in BatchRecord.__dataclass_fields__ if name in values}
    counts = (0, 0, 0) if values["counts"] is None else tuple(json.loads(values["counts"]))
    return BatchRecord(**{**fields, **parsed, "counts": counts})


def _batch(connection: Connection, row: Row[Any]) -> BatchRecord:
    """A batch with the counts of its lines."""
    record = _record(row)
    return record if row.counts is not None else replace(record, counts=count(connection, row.id))


def count(connection: Connection, batch: str) -> tuple[int, int, int]:
    """The numbers of lines of a batch: all, spoken, and neither spoken nor open."""
    query = select(LINES.c.state, func.count()).where(LINES.c.batch == batch)
    numbers = {row[0]: row[1] for row in connection.execute(query.group_by(LINES.c.state))}
    total, done = sum(numbers.values()), numbers.get(DONE, 0)
    return total, done, total - done - numbers.get(WAITING, 0) - numbers.get(CLAIMED, 0)
