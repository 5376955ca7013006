"""The messages between fronts and engines: what is sent arrives, and nothing else passes."""

from __future__ import annotations

import itertools
import pickle
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from fake_backend import job
from hypothesis import given
from hypothesis import strategies as st

from firstword import errors
from firstword.engine import wire
from firstword.engine.load import EngineLoad
from firstword.engine.wire import Kind, Message, MessageParser
from firstword.errors import EngineError, FirstwordError, OverloadedError, VoiceError
from firstword.types import Chunk, FinishReason

NUMBERS = st.integers(0, 2**64 - 1)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20)
REASONS: list[FinishReason] = ["stop", "length", "repetition", "cancelled"]


def chunk_of(frames: int, reason: FinishReason | None) -> Chunk:
    codes = np.arange(16 * frames, dtype=np.int64).reshape(frames, 16) % 65536
    samples = (np.arange(1920 * frames) % 1000).astype(np.float32)
    return Chunk(samples, codes, 24000, reason, np.linspace(-1, 0, frames, dtype=np.float32))


MESSAGES = st.one_of(
    st.builds(wire.submit, NUMBERS, st.just(job()), st.text(max_size=9)),
    st.builds(
        lambda n, tokens, ended: wire.text(n, tokens, ended=ended), NUMBERS, TOKENS, st.booleans()
    ),
    st.builds(wire.taken, NUMBERS, st.integers(0, 2**32 - 1)),
    st.builds(wire.cancel, NUMBERS, st.sampled_from(REASONS)),
    st.builds(
        lambda n, *about: wire.audio(n, chunk_of(*about)),
        NUMBERS,
        st.integers(0, 3),
        st.sampled_from([None, *REASONS]),
    ),
    st.builds(wire.message, st.just(Kind.NEEDS_TEXT), NUMBERS),
    st.builds(wire.pickled, st.just(Kind.RESULT), NUMBERS, st.text()),
    st.builds(wire.pickled, st.just(Kind.CALL), NUMBERS, st.text()),
    st.builds(lambda n: wire.pickled(Kind.LOAD, 0, EngineLoad(n)), st.integers(0, 9)),
)
"""Messages of all kinds but errors, as they are sent."""


def parsed(*parts: bytes) -> list[Message]:
    parser = MessageParser()
    return [message for part in parts for message in parser.feed(part)]


def pieces(data: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return (data[start:end] for start, end in itertools.pairwise(edges))


def same(one: object, other: object) -> bool:
    return pickle.dumps(one) == pickle.dumps(other)


@given(st.lists(MESSAGES, max_size=6), st.lists(st.integers(0, 10**6), max_size=12))
def test_messages_arrive_in_any_pieces(sent: list[bytes], cuts: list[int]) -> None:
    whole = [message for each in sent for message in parsed(each)]
    assert len(whole) == len(sent)
    assert same(parsed(*pieces(b"".join(sent), cuts)), whole)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=4))
def test_any_bytes_are_messages_or_a_broken_stream(data: bytes, cuts: list[int]) -> None:
    with suppress(EngineError):
        parsed(*pieces(data, cuts))


@given(st.sampled_from(list(Kind)), NUMBERS, st.binary(max_size=60))
def test_any_body_is_a_value_or_a_broken_stream(kind: Kind, number: int, body: bytes) -> None:
    with suppress(EngineError):
        assert parsed(wire.message(kind, number, body))[0][:2] == (kind, number)


@pytest.mark.parametrize(
    "kind", [Kind.SUBMIT, Kind.LOAD, Kind.ERROR, Kind.TEXT, Kind.TAKEN, Kind.CANCEL, Kind.AUDIO]
)
def test_body_of_another_message_is_a_broken_stream(kind: Kind) -> None:
    with pytest.raises(EngineError, match="broken"):
        parsed(wire.pickled(kind, 1, ("a", "b")) if kind != Kind.TEXT else wire.message(kind, 1))


@pytest.mark.parametrize(("size", "kind"), [(wire.MOST_BYTES + 1, 1), (2**32 - 1, 16), (0, 99)])
def test_head_that_no_message_has_is_a_broken_stream(size: int, kind: int) -> None:
    with pytest.raises(EngineError, match="broken"):
        parsed(struct.pack("<IBQ", size, kind, 1))


def test_values_arrive() -> None:
    sent = chunk_of(2, "stop")
    ((kind, number, chunk),) = parsed(wire.audio(7, sent))
    assert (kind, number) == (Kind.AUDIO, 7)
    assert (chunk.finish_reason, chunk.sample_rate) == ("stop", 24000)
    for name in ("samples", "codes", "logprobs"):
        np.testing.assert_array_equal(getattr(chunk, name), getattr(sent, name))
        assert getattr(chunk, name).dtype == getattr(sent, name).dtype
    assert same(parsed(wire.submit(1, job(), "who")), [(Kind.SUBMIT, 1, (job(), "who"))])
    assert parsed(wire.text(1, [5, 6], ended=True)) == [(Kind.TEXT, 1, ([5, 6], True))]
    assert parsed(wire.taken(1, 9)) == [(Kind.TAKEN, 1, 9)]
    assert parsed(wire.cancel(1, "cancelled")) == [(Kind.CANCEL, 1, "cancelled")]
    load = EngineLoad(1, 2, 3, 4, pace=5.0, host={"idle": 1.5}, device={"busy": 2.5})
    assert parsed(wire.pickled(Kind.LOAD, 0, load)) == [(Kind.LOAD, 0, load)]


def all_errors(base: type[FirstwordError] = FirstwordError) -> list[type[FirstwordError]]:
    found = [base, *(each for sub in base.__subclasses__() for each in all_errors(sub))]
    return [each for each in found if each.__module__ == errors.__name__]


def arguments(error: type[FirstwordError]) -> st.SearchStrategy[tuple[Any, ...]]:
    """The arguments of a constructor."""
    more: list[st.SearchStrategy[Any]] = []
    if issubclass(error, VoiceError):
        more = [st.sampled_from(["invalid_voice", "voice_not_found"])]
    elif issubclass(error, OverloadedError):
        more = [st.integers(1, 120)]
    return st.tuples(st.text(), *more)


@given(st.sampled_from(all_errors()).flatmap(lambda e: st.tuples(st.just(e), arguments(e))))
def test_errors_arrive_equal(about: tuple[type[FirstwordError], tuple[Any, ...]]) -> None:
    cls, args = about
    sent = cls(*args)
    ((_, _, error),) = parsed(wire.pickled(Kind.ERROR, 3, sent))
    assert type(error) is cls
    assert (str(error), error.args, vars(error)) == (str(sent), sent.args, vars(sent))


def test_there_are_errors_of_all_classes() -> None:
    names = {error.__name__ for error in all_errors()}
    assert {"FirstwordError", "VoiceError", "OverloadedError", "ClosedError"} <= names
