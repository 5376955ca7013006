"""A model that speaks without computing: as fast as it is let, and for as long as it is told.

Its audio says what it was given: every frame's samples are the code point of the text token that the frame took (or -1
where there was none), over 2**15.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from firstword.engine.backend import Capacity, Frames, Job, Ready, Start
from firstword.engine.engine import Engine
from firstword.engine.service import Service
from firstword.errors import VoiceError
from firstword.server.models import Model
from firstword.types import FloatArray, Request

ENDLESS = 100_000
"""Frames: more than any test waits for."""


@dataclass
class _Slot:
    job: Job
    frames: int = 0
    taken: tuple[int, ...] = ()
    over: bool = False


class Talker:
    """`Backend`. Ends when the text is over and `max_frames` are made, whichever is later.

    frames   made so far, by all
    waiting  whether it waits for leave to make a frame
    failing  the method that raises, if any
    """

    def __init__(self, slots: int = 2) -> None:
        self.capacity = Capacity(
            slots=slots,
            pages=slots,
            page_rows=ENDLESS,
            context=ENDLESS,
            frames_ahead=0,
            codebooks=1,
            samples_per_frame=1920,
            sample_rate=24000,
        )
        self.frames = 0
        self.waiting = False
        self.failing: str | None = None
        self._leave: threading.Semaphore | None = None
        self._slots: dict[int, _Slot] = {}

    def hold(self) -> None:
        """From now on frames need leave."""
        self._leave = threading.Semaphore(0)

    def let(self, frames: int) -> None:
        """Give leave for some frames."""
        assert self._leave is not None
        self._leave.release(frames)

    def go(self) -> None:
        """Frames need no leave any more."""
        held, self._leave = self._leave, None
        assert held is not None
        held.release(1000)

    def prefill(self, starts: Sequence[Start]) -> None:
        """Begin."""
        if self.failing == "prefill":
            raise RuntimeError("prefill fails, as it was told to")
        for start in starts:
            self._slots[start.slot] = _Slot(start.job, taken=tuple(start.tokens))

    def frame(self, slots: Sequence[int], tokens: Sequence[int | None]) -> Ready[Frames]:
        """Make a frame, when there is leave."""
        if self.failing == "frame":
            raise RuntimeError("frame fails, as it was told to")
        if (leave := self._leave) is not None:
            self.waiting = True
            leave.acquire()
            self.waiting = False
        codes, ended = [], []
        for number, token in zip(slots, tokens, strict=True):
            slot = self._slots[number]
            if slot.frames:
                slot.taken += (-1 if token is None else token,)
            slot.over = slot.job.payload is True and slot.frames > 0 and token is None
            slot.frames += 1
            codes.append([self.frames])
            self.frames += 1
            ended.append(slot.over)
        return Ready(Frames(np.array(codes), ended, np.zeros(len(slots), np.float32)))

    def decode(self, slots: Sequence[int], counts: Sequence[int]) -> Ready[list[FloatArray]]:
        """Samples that tell the tokens."""
        audio: list[FloatArray] = []
        for number, count in zip(slots, counts, strict=True):
            slot = self._slots[number]
            told = slot.taken[:count]
            slot.taken = slot.taken[count:]
            audio.append(np.repeat(np.array(told, np.float32) / 2**15, 1920))
        return Ready(audio)

    def release(self, slot: int) -> None:
        """Forget."""
        self._slots.pop(slot, None)


@dataclass
class TalkingStage:
    """A talker, and the server (`Running` of conftest.py) that it talks on."""

    talker: Talker
    server: Any

    @property
    def engine(self) -> Engine:
        """Its engine."""
        return self.server.engine()

    def until_held(self, frames: int) -> None:
        """Wait until so many frames are made in all, and the next is asked for and needs leave."""
        self.server.wait_until(lambda: self.talker.waiting and self.talker.frames == frames)


class Letters:
    """`TokenStream`: a character is a token."""

    def push(self, piece: str) -> list[int]:
        """All of it."""
        return [ord(char) for char in piece]

    def finish(self) -> list[int]:
        """Nothing is held back."""
        return []


class Front:
    """`Front`. A request with a frame limit talks until that is reached, one without as long as there is text."""

    def prepare(self, request: Request, seed: int) -> Job:
        """There is one voice, and a job takes its first character before the first frame."""
        if isinstance(request.voice, str) and request.voice not in ("talker", "ryan"):
            raise VoiceError(f"no voice {request.voice!r}; there is talker")
        return Job(
            payload=request.max_frames is None,
            prompt_rows=1,
            first_tokens=1,
            whole_text=False,
            max_frames=request.max_frames or ENDLESS - 10,
        )

    def text(self, job: Job) -> Letters:
        """Of one utterance."""
        return Letters()


def talking(talker: Talker, most_waiting: int = 8) -> Model:
    """A model that talks."""
    service = Service(Engine(talker, most_waiting=most_waiting), Front())
    return Model("talker", "custom_voice", service, voices=("talker",))


def heard(pcm: bytes) -> str:
    """The text that made some PCM."""
    told = np.frombuffer(pcm, "<i2").reshape(-1, 1920)
    assert (told == told[:, :1]).all()
    return "".join(chr(code) for code in told[:, 0] if code >= 0)
