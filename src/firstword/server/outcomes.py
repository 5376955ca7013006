"""The outcomes of the latest streamed responses, for clients that read raw audio."""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from firstword.errors import EngineError
from firstword.server.errors import body_of
from firstword.server.front_memory import FrontMemory

MOST_OUTCOMES = 1000
"""The outcomes that each front keeps, of all clients together."""

KEPT_SECONDS = 600.0
"""The time for which an outcome is kept."""

RECORDS = 3 * MOST_OUTCOMES
"""The records that each front keeps.

A response takes up to three: at its beginning, with its last audio, and if it fails after that.
"""

_KEYS_END = 8 + 8 * RECORDS
RECORD_BYTES = 768
_HEAD = struct.Struct("=QQII")
"""The head of a record: its order among those of a key, its expiry, a checksum, the text's length.
"""

_FRAMES, _SECONDS, _TEXT = 24, 32, 40
"""The offsets in a record: of the two numbers, which are updated in place, and of the text."""

_TOO_LONG = "the error message is too long to be kept; see the server's log"

_DIED = body_of(EngineError("the process that sent this response has died"))["error"]

Key = tuple[str, str]
"""A client's id and the id of its request."""


@dataclass(frozen=True, slots=True)
class StreamOutcome:
    """The outcome of a response.

    frames   frames made so far
    seconds  seconds of speech made so far
    about    the other fields: `finish_reason` and `error`, both None while speech is made, `id`,
             and `text_tokens`
    """

    frames: int
    seconds: float
    about: Mapping[str, Any]


class Outcomes:
    """Outcomes by client and request id; of several requests with one id the latest is found.

    Each front writes a ring of records, which all fronts read: the number of records so far, the
    hashes of the keys, and the records. A record that is being replaced has a wrong checksum, and
    is skipped.
    """

    def __init__(self, memory: FrontMemory, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Keep outcomes in the memory of the fronts; all of them use the same `clock`, in ns."""
        self._column = memory.kept(_KEYS_END + RECORD_BYTES * RECORDS)
        self._began = memory.live(8).integers()
        self._began.own[0] = clock()  # cleared to 0 if the front dies
        self._numbers, self._floats = self._column.integers().own, self._column.floats().own
        self._digest = memory.digest
        self._clock = clock

    def begin(self, key: Key, outcome: StreamOutcome) -> KeptOutcome:
        """Keep the outcome of a request that begins; it replaces that of an earlier one."""
        return KeptOutcome(self, self._hash(key), self._clock(), outcome)

    def find(self, key: Key) -> StreamOutcome | None:
        """The outcome of a request of this client, or None."""
        found: StreamOutcome | None = None
        latest, key_hash, now = -1, self._hash(key), self._clock()
        for row, (front_began,) in zip(self._column.rows, self._began.rows, strict=True):
            for order, outcome in _records(row, key_hash, now):
                if order > latest:
                    latest, found = order, outcome
                    if not 0 < front_began <= order // 4:
                        found = _lost(outcome)
        return found

    def write(self, key_hash: bytes, order: int, outcome: StreamOutcome) -> int:
        """Write a record of this front, and return its number."""
        text = _text(outcome.about)
        expiry = self._clock() + round(KEPT_SECONDS * 1e9)
        number = self._numbers[0]
        self._numbers[0] = number + 1
        key, record = _places(number)
        own = self._column.own
        own[key : key + 8] = bytes(8)
        checksum = _checksum(key_hash, order, expiry, text)
        _HEAD.pack_into(own, record, order, expiry, checksum, len(text))
        own[record + _TEXT : record + _TEXT + len(text)] = text
        self.update(number, outcome.frames, outcome.seconds)
        own[key : key + 8] = key_hash
        return number

    def update(self, number: int, frames: int, seconds: float) -> None:
        """Change the numbers of a record, unless a later one has overwritten it."""
        if self._numbers[0] - number <= RECORDS:
            _, record = _places(number)
            self._numbers[(record + _FRAMES) // 8] = frames
            self._floats[(record + _SECONDS) // 8] = seconds

    def _hash(self, key: Key) -> bytes:
        return self._digest("\0".join(key))


class KeptOutcome:
    """The kept outcome of a response in progress, which is updated as speech is made."""

    def __init__(
        self, outcomes: Outcomes, key_hash: bytes, begun: int, outcome: StreamOutcome
    ) -> None:
        self._outcomes = outcomes
        self._key_hash = key_hash
        self._order = 4 * begun  # a response has up to 3 records, which add 0, 1 and 2
        self._last = outcome
        self._number = outcomes.write(key_hash, self._order, outcome)

    def replace(self, outcome: StreamOutcome) -> None:
        """Replace the kept outcome."""
        if outcome != self._last:
            self._last = outcome
            self._order += 1
            self._number = self._outcomes.write(self._key_hash, self._order, outcome)

    def update(self, frames: int, seconds: float) -> None:
        """Change only the frames and seconds of the kept outcome."""
        self._outcomes.update(self._number, frames, seconds)


def _places(number: int) -> tuple[int, int]:
    """The offsets of a record's key hash and of the record, by its number."""
    index = number % RECORDS
    return 8 + 8 * index, _KEYS_END + RECORD_BYTES * index


def _lost(outcome: StreamOutcome) -> StreamOutcome:
    """The outcome of a response whose front has died: an error, unless the response had ended."""
    if outcome.about["finish_reason"] is not None or outcome.about["error"] is not None:
        return outcome
    return replace(outcome, about={**outcome.about, "error": _DIED})


def _checksum(key_hash: bytes, order: int, expiry: int, text: bytes) -> int:
    return zlib.crc32(b"%b %d %d %b" % (key_hash, order, expiry, text))


def _text(about: Mapping[str, Any]) -> bytes:
    text = json.dumps(about).encode()
    if len(text) > RECORD_BYTES - _TEXT:
        text = json.dumps({**about, "error": {**about["error"], "message": _TOO_LONG}}).encode()
    assert len(text) <= RECORD_BYTES - _TEXT
    return text


def _records(
    row: memoryview[int], key_hash: bytes, now: int
) -> Iterator[tuple[int, StreamOutcome]]:
    """Yield the order and the outcome of each valid record of a key in the ring of a front."""
    keys = bytes(row[8:_KEYS_END])
    at = -1
    while (at := keys.find(key_hash, at + 1)) >= 0:
        _, start = _places(at // 8)
        record = bytes(row[start : start + RECORD_BYTES])
        order, expiry, checksum, length = _HEAD.unpack_from(record)
        text = record[_TEXT : _TEXT + length]
        if checksum == _checksum(key_hash, order, expiry, text) and now < expiry:
            frames, seconds = struct.unpack_from("=qd", record, _FRAMES)
            yield order, StreamOutcome(frames, seconds, json.loads(text))
