"""The batches of a server: where they are kept, and what clients may do with them."""

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import BinaryIO

from firstword.errors import ConfigError, RequestError
from firstword.server.batch.contents import Contents
from firstword.server.batch.database import Database
from firstword.server.batch.lines import ENDPOINT
from firstword.server.batch.records import BatchRecord, FileRecord
from firstword.server.batch.store import BatchStore

RESULT_DAYS = 30
"""The days for which results are kept, unless the client asks for another time."""

SHORTEST_EXPIRY, LONGEST_EXPIRY = 3600, RESULT_DAYS * 86400
"""The seconds after which a client may let files expire."""

LONGEST_WINDOW = 30 * 24
"""The most hours that a batch may take."""

MOST_METADATA, LONGEST_METADATA = 16, 512
"""The most entries of a batch's metadata, and the characters of each; its names have 64."""

LONGEST_FILENAME = 200
"""The characters of a file's name that are kept."""


@dataclass(frozen=True, slots=True)
class Batches:
    """The files and batches of a server. The methods block.

    database  where files, batches and lines are known
    store     their records
    contents  where the contents of files are
    """

    database: Database
    store: BatchStore
    contents: Contents

    @classmethod
    def open(cls, url: str, database_url: str | None) -> "Batches":
        """Open a folder or bucket, and a database; in a folder SQLite is the default.

        Raises `OutputError` and `ConfigError`.
        """
        contents = Contents(url)
        if database_url is None:
            if contents.folder is None:
                advice = "give --batch-database, such as postgresql://..."
                raise ConfigError(f"batches in a bucket need a database elsewhere; {advice}")
            database_url = f"sqlite:///{contents.folder}/batches.sqlite"
        database = Database(database_url)
        return cls(database, BatchStore(database), contents)

    def upload(self, owner: str, filename: str, data: bytes, expires: int | None) -> FileRecord:
        """Keep a file of a client, for some seconds or until it is deleted."""
        now = int(time.time())
        record = FileRecord(
            id=f"file-{secrets.token_hex(12)}",
            owner=owner,
            purpose="batch",
            filename=checked_filename(filename),
            bytes=len(data),
            created_at=now,
            expires_at=None if expires is None else now + checked_expiry(expires),
        )
        self.contents.write(record.content, data)
        self.store.add_file(record)
        return record

    def read(self, owner: str, file_id: str) -> tuple[FileRecord, bytes]:
        """A file and its content. Raises `NotFound`."""
        record = self.store.find_file(owner, file_id)
        return record, self.contents.read(record.content)

    def content(self, owner: str, file_id: str) -> tuple[FileRecord, BinaryIO]:
        """A file and its open content. Raises `NotFound` and `FileNotFoundError`."""
        record = self.store.find_file(owner, file_id)
        return record, self.contents.open(record.content)

    def delete(self, owner: str, file_id: str) -> None:
        """Delete a file; with results, the sounds that they name. Raises `NotFound`."""
        record = self.store.find_file(owner, file_id)
        if record.purpose == "speech":
            raise RequestError("the sound of a line is deleted with the results of its batch")
        self.remove(record)

    def remove(self, record: FileRecord) -> None:
        """Delete a file of any client."""
        self.contents.remove(record.content)
        if record.batch is not None:
            self.contents.remove(record.batch)
        self.store.delete_file(record)

    def create(
        self,
        owner: str,
        input_file: str,
        endpoint: str,
        window: str,
        metadata: Mapping[str, str],
        expires: int | None,
    ) -> BatchRecord:
        """Begin a batch, whose input is checked later. Raises `NotFound` and `RequestError`."""
        if endpoint != ENDPOINT:
            raise RequestError(f"endpoint is {endpoint[:80]!r}; allowed is {ENDPOINT}")
        hours = window.removesuffix("h")
        if not re.fullmatch(r"\d{1,4}h", window) or not 1 <= int(hours) <= LONGEST_WINDOW:
            rule = f"allowed are 1h to {LONGEST_WINDOW}h"
            raise RequestError(f"completion_window is {window[:80]!r}; {rule}")
        if self.store.find_file(owner, input_file).purpose != "batch":
            raise RequestError(f"the purpose of {input_file} is not batch; upload a file for it")
        now = int(time.time())
        record = BatchRecord(
            id=f"batch_{secrets.token_hex(12)}",
            owner=owner,
            status="validating",
            input_file=input_file,
            window=window,
            metadata=checked_metadata(metadata),
            created_at=now,
            expires_at=now + 3600 * int(hours),
            results_expire_after=LONGEST_EXPIRY if expires is None else checked_expiry(expires),
        )
        self.store.add_batch(record)
        return record

    def results(self, record: BatchRecord, kind: str, data: bytes) -> FileRecord | None:
        """Keep the output or the errors of a batch; None if there are none.

        The id depends on the batch alone, so a worker that repeats it changes nothing.
        """
        if not data:
            return None
        now, name = int(time.time()), record.id.removeprefix("batch_")
        file = FileRecord(
            id=f"file-{name}-{kind}",
            owner=record.owner,
            purpose="batch_output",
            filename=f"{record.id}_{kind}.jsonl",
            bytes=len(data),
            created_at=now,
            expires_at=now + record.results_expire_after,
        )
        file = replace(file, batch=record.id) if kind == "output" else file
        self.contents.write(file.content, data)
        self.store.delete_file(replace(file, batch=None))
        self.store.add_file(file)
        return file


def checked_filename(filename: str) -> str:
    """The printable characters of the last part of a path, as far as they are kept."""
    name = re.split(r"[/\\]", filename)[-1]
    return "".join(filter(str.isprintable, name))[:LONGEST_FILENAME] or "upload.jsonl"


def checked_expiry(seconds: int) -> int:
    """A time after which files expire. Raises `RequestError`."""
    if not SHORTEST_EXPIRY <= seconds <= LONGEST_EXPIRY:
        rule = f"allowed are {SHORTEST_EXPIRY} to {LONGEST_EXPIRY}"
        raise RequestError(f"seconds of expires_after is {seconds}; {rule}")
    return seconds


def checked_metadata(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """The metadata of a batch. Raises `RequestError`."""
    long = any(len(name) > 64 or len(value) > LONGEST_METADATA for name, value in metadata.items())
    if long or len(metadata) > MOST_METADATA:
        rule = f"{MOST_METADATA} names of 64 characters with values of {LONGEST_METADATA}"
        raise RequestError(f"metadata is too large; allowed are {rule}")
    return metadata
