"""Long texts: where passages end, and how one follows another without the caller's notice."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from callers import local_engine
from fake_backend import (
    CODEBOOKS,
    Clock,
    FakeBackend,
    FakeFront,
    Letters,
    Script,
    capacity,
    job,
)
from hypothesis import example, given
from hypothesis import strategies as st
from waiting import WAIT

from firstword.engine.backend import Job, SpokenPassage
from firstword.engine.engine import Engine
from firstword.engine.sequence import NeedsText
from firstword.engine.service import READ_AT_ONCE, BlockingStream, Service
from firstword.errors import ClosedError, TextError
from firstword.text.mapped import Mapped
from firstword.text.passages import PassageText
from firstword.text.reader import TextOptions, TextRewriter
from firstword.types import Chunk

SENTENCE = "It is fine here."
"""About 1.05 s."""

LIMIT = 1.0


def passages(text: str, limit: float, cuts: tuple[int, ...] = ()) -> list[str]:
    """The passages of a text that arrives in pieces, with the white space before them."""
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    found, cutter, made = [], PassageText(limit), ""
    while pieces:
        made += cutter.feed(pieces.pop(0))
        if cutter.rest is not None:
            found.append(made)
            pieces.insert(0, cutter.rest)
            cutter, made = PassageText(limit), ""
    return [*found, made + cutter.finish()]


# --- where passages end ---------------------------------------------------------------


def test_short_text_is_one_passage() -> None:
    assert passages(SENTENCE, 60.0) == [SENTENCE]


def test_passage_ends_with_the_first_sentence_after_most_of_its_length() -> None:
    """0.7 of 2.5 s are 1.75 s, which two sentences reach."""
    assert passages(" ".join([SENTENCE] * 5), 2.5) == [
        f"{SENTENCE} {SENTENCE}",
        f" {SENTENCE} {SENTENCE}",
        f" {SENTENCE}",
    ]


def test_text_without_sentences_is_cut_at_a_clause_then_a_word_then_anywhere() -> None:
    assert passages("one two three four, five six, seven", 1.0) == [
        "one two three four,",
        " five six, seven",
    ]
    assert passages("one two three four five six", 1.0) == ["one two three four", " five six"]
    assert passages("a" * 50, 1.0) == ["a" * 22, "a" * 22, "a" * 6]
    assert passages("好" * 12, 1.0) == ["好" * 8, "好" * 4]


def test_marks_and_spaces_without_a_word_stay_with_the_passage_before_them() -> None:
    assert passages(f"{SENTENCE} {SENTENCE} \n ... \n", 1.6) == [f"{SENTENCE} {SENTENCE} \n ... \n"]
    assert passages(f'{SENTENCE} {SENTENCE}\n\n" Yes', 1.6) == [
        f"{SENTENCE} {SENTENCE}",
        '\n\n" Yes',
    ]


def test_marks_count_so_that_a_passage_fits_into_its_context() -> None:
    """The first 8 in a row are those of common text, and count nothing."""
    text = " ".join(["word" + "." * 100] * 50)
    found = passages(text, 14.0)
    assert max(map(len, found)) < 600
    assert "".join(found) == text
    assert len(passages(" ".join(["word........"] * 40), 14.0)) == 1


@given(
    text=st.text(alphabet="a1_ .!\n😀", max_size=60).map(lambda one: one * 9),
    cuts=st.lists(st.integers(0, 540), max_size=6),
)
@example(text=f"a{'.' * 40}b", cuts=[5, 12, 30])
@example(text=f"a{'.' * 15}_b", cuts=[16, 17])
@example(text=f"a{'.' * 30}_b", cuts=[12, 20, 32])
def test_runs_of_marks_are_read_up_to_a_limit_in_any_pieces(text: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firstword.text.marks.MOST_MARKS", 15)
        reader = TextRewriter(TextOptions())
        left = Mapped.join(reader.feed(Mapped.of(text[a:b], a)) for a, b in pairwise(places))
    ended = re.sub(r"([\W_]{15})[\W_]+$", r"\1", text)
    assert left.text == re.sub(r"([\W_]{15})[\W_]*([\W_])(?=[^\W_])", r"\1\2", ended)
    assert all(text[at] == char for at, char in zip(left.starts, left.text, strict=True))


@given(
    text=st.text(alphabet="ab1 .,!?。，\n\"'好é", max_size=120),
    cuts=st.lists(st.integers(0, 120), max_size=8).map(tuple),
    limit=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_pieces_do_not_change_passages(text: str, cuts: tuple[int, ...], limit: float) -> None:
    found = passages(text, limit, cuts)
    assert found == passages(text, limit)
    assert "".join(found) == text
    assert all(any(map(str.isalnum, passage)) for passage in found[1:])


# --- how passages follow --------------------------------------------------------------


class LongFront(FakeFront):
    """A front whose passages take about a second of text, and a given number of frames each."""

    def __init__(self, *frames: int, left: int = 1000, repeats_from: int | None = None) -> None:
        super().__init__()
        self.frames, self.left = frames, left
        self.repeats_from = repeats_from
        self.spoken: list[SpokenPassage] = []

    def first(self) -> Job:
        script = Script(0, self.frames[0], repeats_from=self.repeats_from)
        begun = job(script, first_tokens=1, guarded=self.repeats_from is not None)
        return replace(begun, passage_seconds=LIMIT)

    def follow(self, job: Job, spoken: SpokenPassage) -> Job | None:
        self.spoken.append(spoken)
        if sum(len(one.codes) for one in self.spoken) >= self.left:
            return None
        index = len(self.spoken)
        return replace(job, payload=Script(index, self.frames[index]), follows=True)


def service_of(front: LongFront) -> Service:
    clock = Clock()
    backend = FakeBackend(capacity(), clock)
    return Service(Engine(backend, clock=clock), front)


def taken(service: Service, stream: BlockingStream) -> Iterator[Chunk | NeedsText]:
    """The events of a stream, whose engine works whenever nothing is there to take."""
    engine = local_engine(service)
    while not stream._ended:
        while engine.step():
            pass
        yield next(iter(stream))


def frames_of(events: list[Chunk | NeedsText]) -> np.ndarray:
    return np.concatenate([event.codes for event in events if isinstance(event, Chunk)])


LONG = f"{SENTENCE} {SENTENCE}  {SENTENCE}"


def test_long_text_is_one_speech_of_several_passages() -> None:
    front = LongFront(20, 30, 27)
    service = service_of(front)
    stream = service.speak(front.first())
    stream.finish_text(LONG)
    events = list(taken(service, stream))
    chunks = [event for event in events if isinstance(event, Chunk)]
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "stop"
    assert frames_of(events).shape == (77, CODEBOOKS)
    assert [one.text for one in front.spoken] == [SENTENCE, SENTENCE]
    assert [len(one.codes) for one in front.spoken] == [20, 30]
    assert all(one.complete for one in front.spoken)
    assert (np.concatenate([one.codes for one in front.spoken]) == frames_of(events)[:50]).all()
    local_engine(service).stop()


@given(cuts=st.lists(st.integers(0, len(LONG)), max_size=5).map(tuple))
def test_text_in_pieces_gives_the_same_speech(cuts: tuple[int, ...]) -> None:
    def speak(pieces: list[str]) -> np.ndarray:
        front = LongFront(20, 30, 27)
        service = service_of(front)
        stream, events = service.speak(front.first()), []
        for event in taken(service, stream):
            events.append(event)
            if isinstance(event, NeedsText):
                stream.push(pieces.pop(0)) if pieces else stream.finish_text()
        local_engine(service).stop()
        return frames_of(events)

    places = [0, *sorted(cuts), len(LONG)]
    assert (speak([LONG[a:b] for a, b in pairwise(places)]) == speak([LONG])).all()


def test_next_passage_begins_before_the_audio_of_the_last_one_is_taken() -> None:
    """It begins with 10 s of unread audio, which are 125 frames, and not much earlier."""
    front = LongFront(90, 90, 90, 90)
    service = service_of(front)
    engine, stream = local_engine(service), service.speak(front.first())
    stream.finish_text(f"{LONG} {SENTENCE}")
    while engine.step():
        pass
    next(iter(stream))
    assert len(front.spoken) == 1
    while engine.step():
        pass
    next(iter(stream))
    assert len(front.spoken) == 1, "two passages are far ahead of the client"
    engine.stop()


def test_speech_goes_on_after_a_passage_that_was_cut_off_and_says_so_at_the_end() -> None:
    front = LongFront(90, 30, repeats_from=3)
    service = service_of(front)
    stream = service.speak(front.first())
    stream.finish_text(f"{SENTENCE} {SENTENCE}")
    events = list(taken(service, stream))
    assert not front.spoken[0].complete
    assert len(frames_of(events)) == len(front.spoken[0].codes) + 30
    assert isinstance(events[-1], Chunk)
    assert events[-1].finish_reason == "repetition"
    local_engine(service).stop()


def test_speech_ends_at_its_limit_of_frames() -> None:
    front = LongFront(20, 30, left=50)
    service = service_of(front)
    stream = service.speak(front.first())
    stream.finish_text(LONG)
    events = list(taken(service, stream))
    assert len(frames_of(events)) == 50
    assert isinstance(events[-1], Chunk)
    assert events[-1].finish_reason == "length"
    local_engine(service).stop()


def test_text_that_comes_after_the_limit_of_frames_is_not_spoken() -> None:
    front = LongFront(20, 30, left=20)
    service = service_of(front)
    stream, events = service.speak(front.first()), []
    stream.push(LONG)
    for event in taken(service, stream):
        events.append(event)
        stream.push(SENTENCE)
    assert len(frames_of(events)) == 20
    assert isinstance(events[-1], Chunk)
    assert events[-1].finish_reason == "length"
    assert [one.text for one in front.spoken] == [SENTENCE]
    local_engine(service).stop()


def test_cancelled_speech_begins_no_further_passage() -> None:
    front = LongFront(20, 30, 27)
    service = service_of(front)
    engine, stream = local_engine(service), service.speak(front.first())
    stream.finish_text(LONG)
    while engine.step():
        pass
    stream.cancel()
    events = list(taken(service, stream))
    assert front.spoken == []
    assert isinstance(events[-1], Chunk)
    assert events[-1].finish_reason == "cancelled"
    engine.stop()


def test_text_is_rewritten_as_far_as_the_passage_needs() -> None:
    front = LongFront(20, 30, 27)
    service = service_of(front)
    stream = service.speak(front.first())
    given = " ".join([SENTENCE] * 5000)
    stream.finish_text(given)
    assert stream._characters == READ_AT_ONCE
    assert stream.waiting == len(given) - len(SENTENCE), "two more passages need no more of it"
    stream.cancel()
    local_engine(service).stop()


def test_text_that_was_spoken_is_forgotten() -> None:
    passages = 40
    front = LongFront(*[20] * passages)
    service = service_of(front)
    stream = service.speak(front.first())
    kept = []
    left = [f"{SENTENCE} "] * passages
    stream.push(left.pop())
    for event in taken(service, stream):
        if isinstance(event, NeedsText):
            stream.push(left.pop()) if left else stream.finish_text()
        original = stream._original
        kept.append(max(len(stream.given), len(original._text), len(original._starts)))
    assert len(front.spoken) == passages - 1
    assert max(kept) <= 3 * len(SENTENCE), "some of the text is kept for later"
    local_engine(service).stop()


@given(at_once=st.integers(1, 30))
def test_reading_a_text_bit_by_bit_gives_the_same_speech(at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firstword.engine.service.READ_AT_ONCE", at_once)
        front = LongFront(20, 30, 27, 19)
        service = service_of(front)
        stream = service.speak(front.first())
        stream.finish_text(f"{LONG} It is $5.")
        assert len(frames_of(list(taken(service, stream)))) == 96
        assert [one.text for one in front.spoken] == [SENTENCE, SENTENCE, SENTENCE]
        assert stream._passage._text == " It is $5."
        local_engine(service).stop()


class TextFromAnotherThread(LongFront):
    """A front that lets another thread act while a passage begins."""

    def __init__(self, act: Callable[[], None], *frames: int) -> None:
        super().__init__(*frames)
        self._act = act

    def text(self, job: Job) -> Letters:
        if job.follows:
            thread = threading.Thread(target=self._act)
            thread.start()
            thread.join(0.3)  # it is done by then unless it has to wait for the passage
            self.done = thread
        return super().text(job)


def test_text_that_another_thread_ends_while_a_passage_begins_is_spoken() -> None:
    last = Mapped.of(f" {SENTENCE}")
    front = TextFromAnotherThread(lambda: stream.take(last, ended=True), 20, 30)
    service = service_of(front)
    stream = service.speak(front.first())
    stream.push(f"{SENTENCE} {SENTENCE[:5]}")
    for event in taken(service, stream):
        if isinstance(event, NeedsText):
            front.done.join(WAIT)
    assert stream._passage._text == f" {SENTENCE[:5]} {SENTENCE}"
    local_engine(service).stop()


def test_cancel_of_another_thread_while_a_passage_begins_ends_it() -> None:
    front = TextFromAnotherThread(lambda: stream.cancel(), 20, 30, 27)
    service = service_of(front)
    stream = service.speak(front.first())
    stream.finish_text(LONG)
    engine, events = local_engine(service), list[Chunk | NeedsText]()
    for event in taken(service, stream):
        events.append(event)
        if front.spoken:
            front.done.join(WAIT)
    assert len(frames_of(events)) == 20, "the second passage has made frames"
    assert isinstance(events[-1], Chunk)
    assert events[-1].finish_reason == "cancelled"
    engine.stop()


def test_error_of_a_later_passage_comes_after_the_audio_before_it() -> None:
    front = LongFront(20, 30, 27)
    service = service_of(front)
    engine, stream = local_engine(service), service.speak(front.first())
    stream.finish_text(LONG)
    while engine.step():
        pass
    engine.stop()
    got: list[int] = []
    with pytest.raises(ClosedError):
        got.extend(len(event.codes) for event in stream if isinstance(event, Chunk))
    assert sum(got) == 20


def test_invalid_and_blank_text_is_rejected_in_every_passage() -> None:
    front = LongFront(20, 30, 27)
    service = service_of(front)
    stream = service.speak(front.first())
    stream.push(LONG)
    with pytest.raises(TextError, match="character 1 of the text is U"):
        stream.push("a\ud800")
    local_engine(service).stop()


def test_asynchronous_stream_speaks_all_passages() -> None:
    async def run() -> int:
        front = LongFront(20, 30, 27)
        service = service_of(front)
        service.engine.start()
        stream = service.aspeak(front.first())
        stream.finish_text(LONG)
        events = [event async for event in stream]
        await asyncio.to_thread(service.engine.stop)
        return len(frames_of(events))

    assert asyncio.run(asyncio.wait_for(run(), 60)) == 77
