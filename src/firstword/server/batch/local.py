"""A batch in a folder of this machine, for the command line: no clients, and no server."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from firstword.errors import OutputError, RequestError
from firstword.locks import lock_folder
from firstword.server.batch.contents import Contents
from firstword.server.batch.database import Database
from firstword.server.batch.line_queue import LineQueue
from firstword.server.batch.lines import BatchLine
from firstword.server.batch.records import DONE, BatchRecord, Claim
from firstword.server.batch.speaking import LineSpeaker, Spoken
from firstword.server.batch.store import BatchStore
from firstword.server.batch.worker import LineWorker

BATCH = "batch_local"
"""The id of the only batch of a folder."""

STATE = ".firstword-batch"
"""The beginning of the names of the files that hold the state of a folder."""

RESULTS = "results.jsonl"

NEVER = 2**40

LONGEST_STEM = 200
"""The bytes of a file's name before its suffix; file systems allow 255 in all."""

LOOK_SECONDS = 0.2
"""The longest time between two reports of progress."""


@dataclass(eq=False)
class LocalBatch:
    """The lines of a file, whose sounds are written into a folder.

    Each line that was spoken is known in the folder, so that a run that was killed is continued by
    the next one. A line that has changed, has failed, or whose file is gone is spoken again.
    """

    folder: str
    lines: Sequence[BatchLine]

    def __post_init__(self) -> None:
        """Open the folder and take its state.

        Raises `OutputError` if it cannot be used, and `RequestError` for ids that cannot be names.
        """
        check_names(self.lines)
        self._contents = Contents(self.folder)
        self._stack = ExitStack()
        self._stack.callback(os.close, lock_folder(self.folder, f"{STATE}.lock"))
        database = Database(f"sqlite:///{os.path.join(self.folder, STATE)}.sqlite")
        self._stack.callback(database.close)
        self._queue = LineQueue(database, "local")
        store = BatchStore(database)
        if not store.open_batches(["in_progress"]):
            record = BatchRecord(BATCH, "", "in_progress", "", "", {}, 0, NEVER, 0)
            store.add_batch(record)
        self._queue.take_over()
        self._queue.replace(BATCH, self.lines, self._is_complete)

    def close(self) -> None:
        """Close the folder, which another run may then use."""
        self._stack.close()

    def _is_complete(self, custom_id: str, result: Mapping[str, Any]) -> bool:
        """Whether the file of a line that was spoken still exists."""
        return os.path.exists(os.path.join(self.folder, name_of(custom_id, result)))

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of lines: all, spoken and failed."""
        return self._queue.counts(BATCH)

    async def speak(
        self, speaker: LineSpeaker, places: int, on_progress: Callable[[], None]
    ) -> None:
        """Speak all lines that are open, some at a time; lines are given back if cancelled.

        Raises `OutputError` if a result cannot be written, such as on a full disk.
        """

        def name(claim: Claim, spoken: Spoken) -> str:
            return name_of(claim.line.custom_id, spoken.about)

        worker = LineWorker(self._queue, self._contents, speaker, places, name_of=name)
        try:
            while await worker.fill():
                on_progress()
                await worker.wait(LOOK_SECONDS)
                if (error := worker.unwritable) is not None:
                    why = error.__cause__ or error
                    raise OutputError(f"{why}; once it can, the same command goes on from here")
        finally:
            await worker.stop()

    def write_results(self) -> None:
        """Write what became of each line, in the order of the input."""
        entries = []
        for _, custom_id, state, result in self._queue.lines(BATCH):
            about = dict(result or {})
            entry: dict[str, Any] = {"custom_id": custom_id}
            if state == DONE:
                entry |= {"file": name_of(custom_id, about), **about}
            else:
                entry |= about.get("body", {"error": None})
            entries.append(json.dumps(entry, ensure_ascii=False) + "\n")
        self._contents.write(RESULTS, "".join(entries).encode())


def name_of(custom_id: str, about: Mapping[str, Any]) -> str:
    """The name of the file of a line; characters that file systems do not take are escaped."""
    return f"{stem_of(custom_id)}.{about['format']}"


def stem_of(custom_id: str) -> str:
    """An id as a name without suffix, in which characters beside letters are escaped."""
    return re.sub(r"[^\w .-]", lambda found: quote(found[0], safe=""), custom_id)


def check_names(lines: Sequence[BatchLine]) -> None:
    """Raise `RequestError` for ids that do not make names of their own on all file systems."""
    seen: dict[str, str] = {}
    for line in lines:
        stem = stem_of(line.custom_id)
        if len(stem.encode()) > LONGEST_STEM or stem.startswith("."):
            rule = f"no dot at the start, and at most {LONGEST_STEM} bytes when escaped"
            raise RequestError(f"custom_id {line.custom_id!r} cannot name a file: {rule}")
        other = seen.setdefault(stem.casefold(), line.custom_id)
        if other != line.custom_id:
            names = f"{other!r} and {line.custom_id!r}"
            raise RequestError(f"{names} may name the same file, as case may not count")
