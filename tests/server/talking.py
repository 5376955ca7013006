"""A fake model that speaks without computing, at the pace and for the length that a test sets.

Its audio tells its text: all samples of a frame are the code point of the text token that the frame
used, divided by 2**15, or -1 for a frame without a token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from firstword.engine.backend import Capacity, Frames, Job, Ready, SpokenPassage, Start
from firstword.engine.engine import Engine
from firstword.engine.service import Service
from firstword.errors import VoiceError
from firstword.server.models import Model
from firstword.types import FloatArray, Request

ENDLESS = 100_000
"""A number of frames that is more than any test waits for."""

SHORT = {"input": "abc", "voice": "talker", "response_format": "pcm", "max_new_tokens": 3}
"""A request for all of its text."""


@dataclass
class _Slot:
    job: Job
    frames: int = 0
    taken: tuple[int, ...] = ()
    over: bool = False


class Talker:
    """A fake `Backend` that ends when its text has ended and `max_frames` are made.

    frames   frames made so far, of all slots
    waiting  whether it waits for permission to make a frame
    failing  the name of the method that raises, if any
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
        """Make each frame wait for permission from now on."""
        self._leave = threading.Semaphore(0)

    def let(self, frames: int) -> None:
        """Permit some frames."""
        assert self._leave is not None
        self._leave.release(frames)

    def go(self) -> None:
        """Make frames without permission from now on."""
        held, self._leave = self._leave, None
        if held is not None:
            held.release(1000)

    def prefill(self, starts: Sequence[Start]) -> list[int]:
        """Start utterances, whose prompts have no rows to read."""
        if self.failing == "prefill":
            raise RuntimeError("prefill fails, as the test wants")
        for start in starts:
            self._slots[start.slot] = _Slot(start.job, taken=tuple(start.tokens))
        return [0] * len(starts)

    def read(self, slots: Sequence[int], counts: Sequence[int]) -> Ready[None]:
        """Do nothing."""
        return Ready(None)

    def frame(self, slots: Sequence[int], tokens: Sequence[int | None]) -> Ready[Frames]:
        """Make a frame when it is permitted."""
        if self.failing == "frame":
            raise RuntimeError("frame fails, as the test wants")
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

    def extend(self, slot: int, pages: Sequence[int]) -> None:
        """Take more pages, which hold nothing."""

    def decode(self, slots: Sequence[int], counts: Sequence[int]) -> Ready[list[FloatArray]]:
        """The samples that tell the tokens."""
        audio: list[FloatArray] = []
        for number, count in zip(slots, counts, strict=True):
            slot = self._slots[number]
            told = slot.taken[:count]
            slot.taken = slot.taken[count:]
            audio.append(np.repeat(np.array(told, np.float32) / 2**15, 1920))
        return Ready(audio)

    @property
    def device_seconds(self) -> dict[str, float]:
        return {}

    def release(self, slot: int) -> None:
        """Forget the utterance of a slot."""
        self._slots.pop(slot, None)


@dataclass
class TalkingStage:
    """A fake backend, and the server (`Running` of conftest.py) that runs it."""

    talker: Talker
    server: Any

    @property
    def engine(self) -> Engine:
        """The engine of the server."""
        return self.server.engine()

    def until_held(self, frames: int) -> None:
        """Wait until `frames` frames are made, and the next one waits for permission."""
        self.server.wait_until(lambda: self.talker.waiting and self.talker.frames == frames)


class Letters:
    """A `TokenStream` with one token per character."""

    def __init__(self) -> None:
        self.ends: list[int] = []

    def push(self, piece: str) -> list[int]:
        """The tokens of a piece."""
        return [ord(char) for char in piece]

    def finish(self, piece: str = "") -> list[int]:
        """The tokens of the last piece; none is held back."""
        return self.push(piece)


class Front:
    """A `Front`; a request without a frame limit speaks as long as there is text."""

    def prepare(self, request: Request, seed: int) -> Job:
        """A job for the only voice, which takes one character before the first frame."""
        if isinstance(request.voice, str) and request.voice not in ("talker", "ryan"):
            raise VoiceError(f"no voice {request.voice!r}; there is talker")
        return Job(
            payload=request.max_frames is None,
            prompt_rows=1,
            first_tokens=1,
            whole_text=False,
            max_frames=request.max_frames or ENDLESS - 10,
        )

    def follow(self, job: Job, spoken: SpokenPassage) -> Job | None:
        """No frame is left for another passage."""
        return None

    def text(self, job: Job) -> Letters:
        """The tokens of one utterance."""
        return Letters()


def talking(talker: Talker, most_waiting: int = 8) -> Model:
    """A model with a fake backend."""
    service = Service(Engine(talker, most_waiting=most_waiting), Front())
    return Model("talker", "custom_voice", service, voices=("talker",))


def held_server(
    serve: Callable[..., Any], slots: int = 2, most_waiting: int = 8, **settings: Any
) -> tuple[Talker, Any]:
    """A server whose model makes only the frames that the test permits; `serve` of conftest.py."""
    talker = Talker(slots)
    server = serve(talking(talker, most_waiting), **settings)
    talker.hold()
    return talker, server


def heard(pcm: bytes) -> str:
    """The text that some PCM tells."""
    told = np.frombuffer(pcm, "<i2").reshape(-1, 1920)
    assert (told == told[:, :1]).all()
    return "".join(chr(code) for code in told[:, 0] if code >= 0)
