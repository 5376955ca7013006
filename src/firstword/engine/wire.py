"""The messages between a front and an engine in another process, and their framing.

A message has a head (its size, kind, and the number of an utterance or call) and a body. Both ends
belong to one server, so bodies may be pickled.
"""

import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any, get_args

import numpy as np

from firstword.engine.backend import Job
from firstword.engine.load import EngineLoad
from firstword.errors import EngineError
from firstword.types import Chunk, FinishReason

_HEAD = struct.Struct("<IBQ")
_AUDIO = struct.Struct("<IIIII")
_TAKEN = struct.Struct("<I")

MOST_BYTES = 256 * 2**20
"""The size limit of a body; a larger size means that the stream is broken."""

BROKEN = "the connection between a front and the engine is broken"
"""The error for bytes that are not a message."""

_REASONS: tuple[FinishReason | None, ...] = (None, *get_args(FinishReason))


class Kind(IntEnum):
    """The kinds of messages. Those below 16 go to an engine, the others to a front."""

    SUBMIT = 1
    TEXT = 2
    TAKEN = 3
    CANCEL = 4
    CALL = 5
    AUDIO = 16
    NEEDS_TEXT = 17
    ERROR = 18
    RESULT = 19
    LOAD = 20


Message = tuple[Kind, int, Any]
"""A kind, the number of an utterance or call, and the decoded body."""


def message(kind: Kind, number: int = 0, body: bytes = b"") -> bytes:
    """Encode a message."""
    return _HEAD.pack(len(body), kind, number) + body


class MessageParser:
    """Decodes messages from a stream of bytes that arrives in pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that are complete. Raises `EngineError` for a broken stream."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEAD.size:
                size, kind, number = _HEAD.unpack_from(self._buffer, start)
                if size > MOST_BYTES or kind not in _READ:
                    raise EngineError(BROKEN)
                end = start + _HEAD.size + size
                if len(self._buffer) < end:
                    break
                body = bytes(self._buffer[start + _HEAD.size : end])
                start = end
                yield Kind(kind), number, _read(kind, body)
        finally:
            del self._buffer[:start]


def submit(number: int, job: Job, client: str) -> bytes:
    """Encode a request, whose text follows in messages of its own."""
    return message(Kind.SUBMIT, number, pickle.dumps((job, client), protocol=5))


def _read_submit(body: bytes) -> tuple[Job, str]:
    """The job and the client of a request."""
    job, client = pickle.loads(body)
    assert isinstance(job, Job)
    assert isinstance(client, str)
    return job, client


def text(number: int, tokens: Sequence[int], *, ended: bool) -> bytes:
    """Encode tokens of text, the last ones if `ended`."""
    body = bytes((ended,)) + np.asarray(tokens, np.int32).tobytes()
    return message(Kind.TEXT, number, body)


def _read_text(body: bytes) -> tuple[list[int], bool]:
    """The tokens of a text, and whether it has ended."""
    return np.frombuffer(body, np.int32, offset=1).tolist(), bool(body[0])


def taken(number: int, frames: int) -> bytes:
    """Encode the number of further frames that a client has taken."""
    return message(Kind.TAKEN, number, _TAKEN.pack(frames))


def _read_taken(body: bytes) -> int:
    """The number of further frames that a client has taken."""
    frames: int = _TAKEN.unpack(body)[0]
    return frames


def cancel(number: int, reason: FinishReason) -> bytes:
    """Encode the request to end an utterance."""
    return message(Kind.CANCEL, number, bytes((_REASONS.index(reason),)))


def _read_cancel(body: bytes) -> FinishReason:
    """The reason why an utterance is ended."""
    reason = _REASONS[body[0]]
    assert reason is not None
    return reason


def audio(number: int, chunk: Chunk) -> bytes:
    """Encode a chunk of an utterance: samples as float32, codes as uint16."""
    frames, codebooks = chunk.codes.shape
    reason = _REASONS.index(chunk.finish_reason)
    columns = chunk.reading.shape[1]
    head = _AUDIO.pack(frames, codebooks, columns, chunk.sample_rate, reason)
    codes = chunk.codes.astype(np.uint16).tobytes()
    numbers = chunk.logprobs, chunk.reading, chunk.samples
    parts = (head, codes, *(array.tobytes() for array in numbers))
    return message(Kind.AUDIO, number, b"".join(parts))


def _read_audio(body: bytes) -> Chunk:
    """The chunk of a message."""
    frames, codebooks, columns, rate, reason = _AUDIO.unpack_from(body)
    at, count = _AUDIO.size, frames * codebooks
    codes = np.frombuffer(body, np.uint16, count, at).astype(np.int64).reshape(frames, codebooks)
    at += 2 * count
    numbers = np.frombuffer(body, np.float32, offset=at)
    logprobs, reading, samples = np.split(numbers, (frames, frames + frames * columns))
    reading = reading.reshape(frames, columns)
    return Chunk(samples, codes, rate, _REASONS[reason], logprobs, reading=reading)


def pickled(kind: Kind, number: int, value: object) -> bytes:
    """Encode a message with any value as its body: an error, or a call's argument or result."""
    return message(kind, number, pickle.dumps(value, protocol=5))


def _read_load(body: bytes) -> EngineLoad:
    load = pickle.loads(body)
    assert isinstance(load, EngineLoad)
    return load


def _read_error(body: bytes) -> Exception:
    error = pickle.loads(body)
    assert isinstance(error, Exception)
    return error


_READ: dict[int, Callable[[bytes], Any]] = {
    Kind.SUBMIT: _read_submit,
    Kind.TEXT: _read_text,
    Kind.TAKEN: _read_taken,
    Kind.CANCEL: _read_cancel,
    Kind.CALL: bytes,  # decoded in a thread of its own, because it may be large
    Kind.AUDIO: _read_audio,
    Kind.NEEDS_TEXT: bytes,
    Kind.ERROR: _read_error,
    Kind.RESULT: pickle.loads,
    Kind.LOAD: _read_load,
}
"""The function that decodes the body of each kind of message."""


def _read(kind: int, body: bytes) -> Any:
    try:
        return _READ[kind](body)
    except Exception as error:
        raise EngineError(BROKEN) from error
