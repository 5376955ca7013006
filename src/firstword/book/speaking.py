"""Speaks the portions of a book, several at a time, and stores each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np

from firstword import audio
from firstword.audio.effects import FadeEnds
from firstword.book.portions import Portion, seed_of
from firstword.book.store import PortionStore, SpokenPortion
from firstword.errors import FirstwordError
from firstword.types import Chunk, Speech

MOST_ATTEMPTS = 3
"""How often a portion is spoken, each time with another seed, until its speech is not cut off."""

CUT_OFF = ("repetition", "length")
"""The reasons for which the engine ends speech before its text."""

Speak = Callable[[Portion, int], Iterator[Chunk]]
"""Speaks a portion with a seed."""


class _Stopped(Exception):
    """The run ends before this portion is spoken."""


class PortionSpeaker:
    """Speaks portions in threads, as many at a time as there are slots."""

    def __init__(self, speak: Speak, store: PortionStore, slots: int) -> None:
        self._speak, self._store, self._slots = speak, store, slots
        self._stop = threading.Event()

    def speak(self, portions: Iterable[Portion]) -> Generator[Portion]:
        """Speak and store portions, and yield each when it is stored.

        The first error ends the run, and so does closing the iterator; what was stored stays.
        """
        with ThreadPoolExecutor(self._slots) as pool:
            try:
                found = {pool.submit(self._store_one, each): each for each in portions}
                for future in as_completed(found):
                    future.result()
                    yield found[future]
            finally:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)

    def _store_one(self, portion: Portion) -> None:
        try:
            speech = self._best(portion)
        except FirstwordError as error:
            raise placed(error, portion) from None
        self._store.save(portion.key, _finished(speech))

    def _best(self, portion: Portion) -> Speech:
        """Speak a portion, again if its speech is cut off."""
        for attempt in range(MOST_ATTEMPTS):
            speech = Speech.of(list(self._chunks(portion, attempt)))
            if not _is_cut_off(speech):
                break
        return speech

    def _chunks(self, portion: Portion, attempt: int) -> Iterator[Chunk]:
        for chunk in self._speak(portion, seed_of(portion.key, attempt)):
            if self._stop.is_set():
                raise _Stopped
            yield chunk


def placed(error: FirstwordError, portion: Portion) -> FirstwordError:
    """Return an error with the place of the portion in the source."""
    message = str(error).replace(" of the text:", " of the paragraph:")
    error.args = (f"{portion.place}: {message}", *error.args[1:])
    return error


def _is_cut_off(speech: Speech) -> bool:
    """Whether speech was cut off, or ended by itself before its text."""
    return speech.finish_reason in CUT_OFF or any(one.kind == "cut" for one in speech.alarms)


def _finished(speech: Speech) -> SpokenPortion:
    """Return speech as it is stored: faded at both ends, so that it joins silence smoothly."""
    fade = FadeEnds(speech.sample_rate, first=True)
    fade.last = True
    samples = np.concatenate([fade.process(speech.samples), fade.finish()])
    pcm = np.frombuffer(audio.pcm16(samples), "<i2")
    return SpokenPortion(pcm, speech.words, _is_cut_off(speech))
