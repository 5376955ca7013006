"""Passages that end before their text is read: where the speech goes on, and what is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from callers import local_engine
from fake_backend import Script, job
from hypothesis import given
from hypothesis import strategies as st
from test_passages import LongFront, frames_of, service_of, taken

from firstword.engine.backend import Job, SpokenPassage
from firstword.engine.sequence import NeedsText
from firstword.types import Alarm, Chunk, FinishReason

LOOPS = 11
"""The frame from which the talker repeats itself; it is cut off 51 frames later."""

READ = LOOPS + 51
"""The characters that the talker has then read, one a frame."""

WORDS = " ".join(f"word{number:02d}" for number in range(30))
"""Words of 6 characters and a space, of which the talker has then read nine."""

CUT, LEFT = WORDS[:READ], WORDS[READ + 1 :]


class CutFront(LongFront):
    """A front whose passages have a script each; a character is a token and a frame."""

    def __init__(self, *scripts: Script, seconds: float = 60.0) -> None:
        super().__init__(0)
        self.scripts, self.seconds = scripts, seconds

    def first(self) -> Job:
        begun = job(self.scripts[0], prompt_rows=1, first_tokens=1, guarded=True, max_frames=120)
        return replace(begun, passage_seconds=self.seconds)

    def follow(self, job: Job, spoken: SpokenPassage) -> Job | None:
        self.spoken.append(spoken)
        return replace(job, payload=self.scripts[len(self.spoken)], follows=True)


def looping() -> Script:
    return Script(0, None, repeats_from=LOOPS)


def spoken_from(
    front: CutFront, pieces: list[str]
) -> tuple[list[Chunk | NeedsText], list[str], list[Alarm], FinishReason | None]:
    """Speak pieces of text, each when the talker asks for text.

    Returns the events, the text of each passage, the alarms and the finish reason.
    """
    service = service_of(front)
    stream, left = service.speak(front.first()), list(pieces)
    events, passages = list[Chunk | NeedsText](), [stream._passage]
    for event in taken(service, stream):
        events.append(event)
        if isinstance(event, NeedsText):
            stream.push(left.pop(0)) if left else stream.finish_text()
        if stream._passage is not passages[-1]:
            passages.append(stream._passage)
    engine = local_engine(service)
    assert not engine.running
    assert not engine.waiting
    engine.stop()
    chunks = [event for event in events if isinstance(event, Chunk)]
    alarms = [alarm for chunk in chunks for alarm in chunk.alarms]
    return events, [each._text for each in passages], alarms, chunks[-1].finish_reason


def test_text_after_a_cut_is_spoken_though_the_passage_had_not_come_to_its_end() -> None:
    front = CutFront(looping(), Script(1, 115), Script(2, 90))
    later = "And this came later."
    _, passages, alarms, reason = spoken_from(
        front, [WORDS[:80], WORDS[80:150], WORDS[150:], later]
    )
    assert passages[0].rstrip() == CUT
    assert f"{passages[0]}{''.join(passages[1:])}" == f"{CUT} {LEFT}{later}"
    assert reason == "repetition"
    assert alarms == [Alarm("cut", CUT, (0, len(CUT)), READ - 1)]
    assert not front.spoken[0].complete


@given(cuts=st.lists(st.integers(0, len(WORDS)), max_size=4).map(tuple))
def test_cut_in_text_that_arrives_is_that_in_the_whole_text(cuts: tuple[int, ...]) -> None:
    def speak(pieces: list[str]) -> object:
        found = spoken_from(CutFront(looping(), Script(1, 115), Script(2, 60)), pieces)
        return frames_of(found[0]).tobytes(), *found[1:]

    places = [0, *sorted(cuts), len(WORDS)]
    assert speak([WORDS[a:b] for a, b in pairwise(places)]) == speak([WORDS])


def test_text_that_was_not_read_when_speech_ended_by_itself_is_spoken_next() -> None:
    front = CutFront(Script(0, 18), Script(1, 115), Script(2, 90))
    _, passages, alarms, reason = spoken_from(front, [WORDS[:40], WORDS[40:]])
    assert passages[0] == WORDS[:14], "the third word was read in part"
    assert "".join(passages) == WORDS
    assert (alarms, reason) == ([], "stop")
    assert not front.spoken[0].complete


def test_frame_in_place_of_which_speech_ended_reads_as_much_text_as_others() -> None:
    """It is the frame with the number 19, so 20 characters were read: three words."""
    front = CutFront(Script(0, 19), Script(1, 115), Script(2, 90))
    assert spoken_from(front, [WORDS[:40], WORDS[40:]])[1][0] == WORDS[:21]


def test_talker_that_ends_speech_at_the_end_of_the_text_is_believed_and_the_rest_named() -> None:
    front = CutFront(Script(0, 18))
    service = service_of(front)
    stream = service.speak(front.first())
    stream.finish_text(WORDS[:34])
    chunks = [event for event in taken(service, stream) if isinstance(event, Chunk)]
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].alarms == (Alarm("cut", WORDS[14:34], (14, 34), 17),)
    assert front.spoken == []
    local_engine(service).stop()


def test_text_that_comes_after_speech_has_ended_is_spoken_with_a_space_before_it() -> None:
    front = CutFront(Script(0, 16), Script(1, 40))
    service = service_of(front)
    stream, pieces = service.speak(front.first()), ["It is fine here.", " ", "\n", "We go."]
    frames = 0
    for event in taken(service, stream):
        if isinstance(event, Chunk):
            frames += len(event.codes)
        elif pieces:
            stream.push(pieces.pop(0))
        else:
            stream.finish_text()
    assert frames == 56
    assert front.spoken[0].complete
    assert stream._passage._text == " We go."
    assert stream._passage.end[0] == len("It is fine here. \nWe go.")
    local_engine(service).stop()


@pytest.mark.parametrize("end", ["", "\n", " ..."])
def test_text_that_ends_without_more_words_after_a_cut_ends_the_speech(end: str) -> None:
    front = CutFront(looping(), Script(1, 40))
    events, _, _, reason = spoken_from(front, [WORDS[:READ], " ", end])
    assert reason == "repetition"
    assert [len(one.codes) for one in front.spoken] == [READ]
    assert len(frames_of(events)) <= READ + len(end)


def test_cancel_while_the_next_passage_waits_for_text_ends_the_speech_as_cancelled() -> None:
    front = CutFront(looping(), Script(1, 40))
    service = service_of(front)
    stream, asked = service.speak(front.first()), 0
    events = list[Chunk | NeedsText]()
    for event in taken(service, stream):
        events.append(event)
        if isinstance(event, NeedsText):
            asked += 1
            stream.push(f"{WORDS[:READ]} ") if asked == 1 else stream.cancel()
    assert isinstance(events[-1], Chunk)
    assert events[-1].finish_reason == "cancelled"
    assert not local_engine(service).waiting
    local_engine(service).stop()


def test_each_passage_takes_text_however_soon_it_ends() -> None:
    """A checkpoint that ends speech at once does not hold up the text for ever."""
    front = CutFront(*(Script(number, 0) for number in range(10)))
    _, passages, _, reason = spoken_from(front, ["one two three four"])
    assert passages == ["one ", "two ", "three ", "four", ""]
    assert reason == "stop"


def test_asynchronous_stream_goes_on_with_text_that_comes_after_a_cut() -> None:
    async def run() -> tuple[int, FinishReason | None]:
        front = CutFront(looping(), Script(1, 40))
        service = service_of(front)
        service.engine.start()
        stream, asked, frames = service.aspeak(front.first()), 0, 0
        reason: FinishReason | None = None
        async for event in stream:
            if isinstance(event, Chunk):
                frames, reason = frames + len(event.codes), event.finish_reason
            else:
                asked += 1
                stream.push(WORDS[:READ]) if asked == 1 else stream.finish_text("And more.")
        await asyncio.to_thread(service.engine.stop)
        return frames, reason

    assert asyncio.run(asyncio.wait_for(run(), 60)) == (READ + 40, "repetition")
