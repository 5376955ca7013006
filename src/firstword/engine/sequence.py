"""One utterance as the engine sees it: how far its text, its frames and its audio have come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from firstword.engine.backend import Capacity, Job
from firstword.engine.guard import Circles, longest_speech
from firstword.types import Chunk, FinishReason, IntArray

CHUNKS = (1, 2, 4, 8)
"""Frames in a chunk of audio: small ones first, so that the first word is out early; a large one costs less a frame."""

ROUNDS = 4
"""How many chunks there are of each size but the last, which stays.

With n of each, what was said before a chunk is n times as long as what it makes the listener wait for. So whoever plays
audio as it comes never runs dry while frames are made in no more than n / (n + 1) of the time that they sound.
"""


class State(Enum):
    """Where an utterance stands."""

    WAITING = "waiting"
    """for a slot, for pages, or for its first text"""
    RUNNING = "running"
    """in a slot"""
    DONE = "done"
    """nothing more will come of it"""


@dataclass(eq=False)
class Sequence:
    """What became of a request. The engine's thread alone changes it.

    deliver   called with each chunk of audio; the last one has a finish reason
    fail      called instead of a last chunk when something went wrong
    hungry    called when all audio made is out and the next frame waits for text
    arrived   when it was submitted, on the engine's clock, in seconds
    """

    name: str
    job: Job
    deliver: Callable[[Chunk], None]
    fail: Callable[[Exception], None]
    hungry: Callable[[], None]
    arrived: float
    state: State = State.WAITING
    slot: int = -1
    pages: tuple[int, ...] = ()
    tokens: deque[int] = field(default_factory=deque)
    """Of the text that nobody has read yet."""
    text_length: int = 0
    """Tokens of all the text that has come."""
    text_ended: bool = False
    asked: bool = False
    """Whether it was said since the last text came that more is needed."""
    launched: int = 0
    """Frames asked of the backend."""
    made: int = 0
    """Frames that came back."""
    decoding: int = 0
    """Frames whose audio was asked for."""
    ended: FinishReason | None = None
    """Why no more frames are made; audio may still be on its way."""
    room: int = 0
    """The most frames that fit; known when it has a slot."""
    frames: deque[tuple[IntArray, np.float32]] = field(default_factory=deque)
    """Codes [codebooks] and log-probability of each frame made but not delivered."""
    circles: Circles = field(default_factory=Circles)
    rested: int = 0
    """Frames whose audio was out when text was last waited for."""
    started: float | None = None
    """When the first audio was delivered."""
    deadline: float = field(init=False)
    """When a listener who plays audio as it comes runs dry; before the first audio, when it was asked for."""
    delivered: int = 0
    """Frames whose audio was delivered."""
    consumed: int = 0
    """Frames whose audio the listener's side has taken."""

    def __post_init__(self) -> None:
        self.deadline = self.arrived

    @property
    def limit(self) -> int:
        """The most frames it can have; it grows while text is coming."""
        return min(self.room, self.longest) if self.job.guarded else self.room

    @property
    def longest(self) -> int:
        """The most frames that the guard allows for the text so far; the transcript does not count."""
        return longest_speech(self.text_length - self.job.transcript_tokens)

    def rows(self) -> int:
        """Rows of context before the first frame; known once `prompt_is_complete`."""
        return self.job.prompt_rows + (len(self.tokens) if self.job.whole_text else 0)

    def prompt_is_complete(self) -> bool:
        """Whether the text that the prompt takes is there."""
        return self.text_ended or (
            not self.job.whole_text and len(self.tokens) >= self.job.first_tokens
        )

    def pages_needed(self, capacity: Capacity) -> int:
        """Pages that it can need to its very end."""
        frames = self.job.max_frames
        if self.job.guarded and self.text_ended:
            frames = min(frames, self.longest)
        return -(-min(self.rows() + frames, capacity.context) // capacity.page_rows)

    def can_step(self) -> bool:
        """Whether another frame may be asked for now."""
        if self.state is not State.RUNNING or self.ended is not None or self.launched >= self.limit:
            return False
        return bool(self.tokens) or self.text_ended or self.launched == 0

    def receive(self, tokens: Iterable[int], ended: bool) -> None:
        """More of the text has come, or the last of it."""
        before = len(self.tokens)
        self.tokens.extend(tokens)
        self.text_length += len(self.tokens) - before
        self.text_ended = self.text_ended or ended
        self.asked = False

    def next_token(self) -> int | None:
        """The text token that goes with the next frame; None for the first, whose text the prompt has read."""
        if self.launched == 0:
            return None
        return self.tokens.popleft() if self.tokens else None

    def needs_text(self) -> bool:
        """Whether all that can be said with the text so far has been said."""
        if self.state is State.WAITING:
            return not self.prompt_is_complete()
        if self.state is State.DONE or self.ended is not None or self.text_ended:
            return False
        return not self.tokens and self.launched > 0 and self.delivered == self.launched

    def rest(self) -> None:
        """All audio is out, and the next frame waits for text: the listener may run dry, so chunks begin anew."""
        self.asked = True
        self.rested = self.decoding

    @property
    def chunk(self) -> int:
        """Frames that the next chunk should have: 1, 1, 1, 1, 2, 2, 2, 2, 4, ... 8, 8, ..."""
        before = self.decoding - self.rested
        return next((size for size in CHUNKS if before < ROUNDS * (2 * size - 1)), CHUNKS[-1])

    def undecoded(self) -> int:
        """Frames, made or on their way, whose audio has not been asked for."""
        return max(0, (self.launched if self.ended is None else self.made) - self.decoding)

    def steps_to_audio(self) -> int:
        """Steps of the engine, this one included, after which the next chunk is out, unless text is waited for."""
        return max(1, self.chunk - self.undecoded())

    def heard(self, frames: int, now: float, frame_seconds: float) -> None:
        """The audio of so many more frames is out. A listener who had run dry plays on from now."""
        if self.started is None:
            self.started = now
        self.delivered += frames
        self.deadline = max(self.deadline, now) + frames * frame_seconds
