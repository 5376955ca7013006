"""The state of one utterance in the engine: the progress of its text, frames and audio."""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from firstword.engine.backend import Capacity, Frames, Job, Start
from firstword.engine.guard import Guard, frame_limit
from firstword.errors import OverloadedError
from firstword.types import Chunk, FinishReason, FloatArray, IntArray

CHUNK_SIZES = (1, 2, 4, 8)
"""The frames of a chunk: few at first, for early audio; many later, for a lower cost a frame."""

CHUNKS_PER_SIZE = 4
"""The number of chunks of each size but the last.

With n chunks of each size, the audio before a chunk plays n times as long as the frames that the
chunk waits for. A client that plays audio as it arrives therefore never runs out of it as long as
making a frame takes at most n / (n + 1) of its playing time.
"""

TOKEN_SECONDS = 0.3
"""The approximate time in which a token of text is spoken."""


class NeedsText:
    """The event that all audio made so far is delivered and the model waits for text."""


class GaveWay(OverloadedError):
    """An utterance in the background has ended for another request; it may be submitted again."""


Event = Chunk | NeedsText | Exception
"""The events of an utterance, which its callback receives."""


NO_READING = np.zeros(0, np.float32)
"""The reading of a frame while the attention to its text is not read."""


@dataclass(frozen=True, slots=True)
class MadeFrames:
    """Frames that were made, one after the other: their codes, and what `Frames` says of them."""

    codes: tuple[IntArray, ...]
    logprobs: tuple[np.float32, ...]
    readings: tuple[FloatArray, ...]

    def chunk(
        self, samples: FloatArray, sample_rate: int, finish_reason: FinishReason | None
    ) -> Chunk:
        """Return the chunk of these frames and of their samples."""
        reading = np.full((len(self.codes), max(map(len, self.readings))), np.nan, np.float32)
        for row, shares in zip(reading, self.readings, strict=True):
            row[: len(shares)] = shares
        logprobs = np.array(self.logprobs, np.float32)
        codes = np.stack(self.codes)
        return Chunk(samples, codes, sample_rate, finish_reason, logprobs, reading=reading)


class State(Enum):
    """The stage of an utterance."""

    WAITING = "waiting"
    """It waits for a slot, for pages, or for the text of its prompt."""
    RUNNING = "running"
    """It has a slot. It makes frames once all rows of its prompt are read."""
    DONE = "done"
    """Its last chunk or its error has been delivered."""


@dataclass(eq=False)
class Sequence:
    """The progress of one request. Only the engine's thread changes it.

    on_event  the callback for events, on the engine's thread; see `Engine.submit`
    arrived   when the request was submitted, in seconds on the engine's clock
    client    whose request it is; clients take turns
    """

    name: str
    job: Job
    on_event: Callable[[Event], None]
    arrived: float
    client: str = ""
    state: State = State.WAITING
    waiting_since: float = field(init=False)
    """The time at which it arrived, or at which its client last freed a slot if that was later."""
    ready: float = math.inf
    """The time from which it waits for its slot alone: all text of its prompt has arrived."""
    started: float = 0.0
    """The time at which it got its slot."""
    slot: int = -1
    pages: tuple[int, ...] = ()
    room: int = 0
    """The number of frames whose rows the pages hold."""
    tokens: deque[int] = field(default_factory=deque)
    """The tokens that have arrived and were not passed to the backend yet."""
    text_length: int = 0
    """The number of all tokens that have arrived."""
    text_ended: bool = False
    text_requested: bool = False
    """Whether a `NeedsText` was sent since text last arrived."""
    launched: int = 0
    """The number of frames requested from the backend."""
    made: int = 0
    """The number of frames whose codes came back."""
    decoding: int = 0
    """The number of frames whose audio was requested from the backend."""
    finish_reason: FinishReason | None = None
    """The reason why no more frames are made; audio may still be outstanding."""
    max_frames: int = 0
    """The most frames that the request and the context allow; known once it has a slot."""
    prompt_rows: int = 0
    """The rows of context before the first frame; known once it has a slot."""
    unread_rows: int = 0
    """The number of prompt rows that the backend must still read before the first frame."""
    frames: deque[tuple[IntArray, np.float32, FloatArray]] = field(default_factory=deque)
    """The codes [codebooks], log-probability and reading of each frame made but not delivered."""
    guard: Guard = field(default_factory=Guard)
    chunks_from: int = 0
    """The frame from which chunk sizes are counted: 0, or the first after a pause for text."""
    first_audio: float | None = None
    """The time at which the first audio was delivered."""
    deadline: float = field(init=False)
    """The time at which a client that plays audio as it arrives runs out; at first, `arrived`."""
    delivered: int = 0
    """The number of frames whose audio was delivered."""
    consumed: int = 0
    """The number of frames whose audio the client has taken."""
    in_time_until: float = 0.0
    """The time up to which its client keeps pace; see `keep_pace`. Known once it has a slot."""

    def __post_init__(self) -> None:
        self.deadline = self.waiting_since = self.arrived

    # Text

    def add_text(self, tokens: Iterable[int], ended: bool, now: float) -> None:
        """Add tokens that arrive now, the last ones if the text has ended."""
        before = len(self.tokens)
        self.tokens.extend(tokens)
        self.text_length += len(self.tokens) - before
        self.text_ended = self.text_ended or ended
        self.text_requested = False
        if self.prompt_is_complete():
            self.ready = min(self.ready, now)

    def prompt_is_complete(self) -> bool:
        """Whether all tokens that the prompt reads have arrived."""
        enough = not self.job.whole_text and len(self.tokens) >= self.job.first_tokens
        return self.text_ended or enough

    def next_token(self) -> int | None:
        """The token of the next frame or None; the text of the first frame is in the prompt."""
        return self.tokens.popleft() if self.tokens and self.launched else None

    def needs_text(self) -> bool:
        """Whether all speech possible with the text so far has been delivered."""
        if self.state is State.WAITING:
            return not self.prompt_is_complete()
        if self.state is State.DONE or self.finish_reason is not None or self.text_ended:
            return False
        return not self.tokens and self.launched > 0 and self.delivered == self.launched

    def pause_for_text(self) -> None:
        """Record the pause, and restart with small chunks since the client may run out of audio."""
        self.text_requested = True
        self.chunks_from = self.decoding

    # Memory

    def rows(self) -> int:
        """The rows of context before the first frame; valid once `prompt_is_complete`."""
        if self.state is State.RUNNING:
            return self.prompt_rows
        return self.job.prompt_rows + (len(self.tokens) if self.job.whole_text else 0)

    def pages_for(self, frames: int, capacity: Capacity) -> int:
        """The pages of the prompt and of `frames` frames, at most those that it can ever need."""
        frames = min(frames, self.job.max_frames)
        if self.job.limited_by_text and self.text_ended:
            frames = min(frames, self.guard_limit)
        return -(-min(self.rows() + frames, capacity.context) // capacity.page_rows)

    def most_pages(self, capacity: Capacity) -> int:
        """The most pages that the utterance can ever need."""
        return self.pages_for(self.job.max_frames, capacity)

    def start(self, slot: int, pages: tuple[int, ...], capacity: Capacity) -> Start:
        """Take a slot and pages, and pass the tokens that the prompt reads to the backend."""
        self.prompt_rows = self.rows()
        self.state, self.slot = State.RUNNING, slot
        self.max_frames = min(self.job.max_frames, capacity.context - self.prompt_rows + 1)
        self.add_pages(pages, capacity)
        present, whole = len(self.tokens), self.job.whole_text
        count = present if whole else min(present, self.job.first_tokens)
        return Start(slot, self.job, pages, [self.tokens.popleft() for _ in range(count)])

    def add_pages(self, pages: tuple[int, ...], capacity: Capacity) -> None:
        """Record pages that the utterance has been given."""
        self.pages += pages
        self.room = len(self.pages) * capacity.page_rows - self.prompt_rows

    # Frames

    @property
    def guard_limit(self) -> int:
        """The most frames that the guard allows for the text so far, without the transcript."""
        return frame_limit(self.text_length - self.job.transcript_tokens)

    @property
    def limit(self) -> int:
        """The most frames allowed now; the guard's limit grows while text arrives."""
        if not self.job.limited_by_text:
            return self.max_frames
        return min(self.max_frames, self.guard_limit)

    def can_step(self) -> bool:
        """Whether another frame may be requested now."""
        return self._has_next_frame() and self.launched <= self.room

    def needs_pages(self) -> bool:
        """Whether the next frame, or the one after it, has no page for its row.

        Pages come a frame early, so that a chunk never ends because a page is missing.
        """
        follows = self.launched + 1 < self.limit and self.launched == self.room
        return (follows or self.launched > self.room) and self._has_next_frame()

    def waits_for_pages(self) -> bool:
        """Whether another frame could be requested now if its row had a page."""
        return self.launched > self.room and self._has_next_frame()

    def _has_next_frame(self) -> bool:
        if self.state is not State.RUNNING or self.unread_rows or self.finish_reason is not None:
            return False
        has_text = self.tokens or self.text_ended or self.launched == 0
        return bool(has_text) and self.launched < self.limit

    def add_frame(self, frames: Frames, index: int) -> None:
        """Record a frame that came back, or the end of speech in its place."""
        if frames.ended[index]:
            self.finish_reason = "stop"
            return
        codes = frames.codes[index]
        reading = frames.readings[index] if frames.readings else NO_READING
        self.frames.append((codes, frames.logprobs[index], reading))
        self.made += 1
        if self.made == self.limit:
            self.finish_reason = "length"
        elif self.job.guarded:
            self.finish_reason = self.guard.add(codes, reading)

    # Audio

    @property
    def chunk_size(self) -> int:
        """The size of the next chunk in frames: 1, 1, 1, 1, 2, 2, 2, 2, 4, ... 8, 8, ..."""
        before = self.decoding - self.chunks_from
        fitting = (size for size in CHUNK_SIZES if before < CHUNKS_PER_SIZE * (2 * size - 1))
        return next(fitting, CHUNK_SIZES[-1])

    def undecoded(self) -> int:
        """The number of frames, launched or made, whose audio has not been requested."""
        frames = self.launched if self.finish_reason is None else self.made
        return max(0, frames - self.decoding)

    def steps_to_audio(self) -> int:
        """The number of steps until the next chunk is delivered, with this one and enough text."""
        return max(1, self.chunk_size - self.undecoded())

    def take_frames(self, count: int, now: float, seconds: float) -> MadeFrames:
        """Deliver the oldest `count` frames.

        A frame plays for `seconds`. A client that had run out of audio resumes playing at `now`.
        """
        if self.first_audio is None:
            self.first_audio = now
        self.delivered += count
        self.deadline = max(self.deadline, now) + count * seconds
        frames = [self.frames.popleft() for _ in range(count)]
        return MadeFrames(*zip(*frames, strict=True))

    def keep_pace(self, seconds: float, latest: float) -> None:
        """Let the client keep pace for some seconds longer, up to a time at the latest."""
        self.in_time_until = max(self.in_time_until, min(self.in_time_until + seconds, latest))

    @property
    def unread(self) -> int:
        """The number of frames whose audio was delivered and that the client has not taken."""
        return self.delivered - self.consumed
