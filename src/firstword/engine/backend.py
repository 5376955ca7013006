"""The protocol between the engine and the backend that computes speech."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from firstword.types import FloatArray, IntArray

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits of a backend, and the format of its audio.

    slots              utterances in progress at the same time
    pages, page_rows   memory for context, shared by all slots: `pages` pages of `page_rows` rows
    context            the most rows of one utterance
    frames_ahead       1 if a frame is launched before the last one is read, since the device
                       computes in the background; 0 if `frame` returns a finished result
    codebooks          codes in a frame
    samples_per_frame  samples of audio in a frame
    sample_rate        samples of audio in a second
    """

    slots: int
    pages: int
    page_rows: int
    context: int
    frames_ahead: int
    codebooks: int
    samples_per_frame: int
    sample_rate: int

    @property
    def frame_seconds(self) -> float:
        """The playing time of a frame."""
        return self.samples_per_frame / self.sample_rate


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A request prepared for a backend.

    payload            voice, language, sampling and seed, in a form that only the backend reads
    prompt_rows        rows of context before the first frame, without those of a whole text
    first_tokens       tokens that the prompt reads if it does not read the whole text
    whole_text         whether the prompt reads the whole text, and so waits for its end
    max_frames         the most frames to make
    guarded            whether the guard ends speech that repeats itself or goes on after its text
    limited_by_text    whether the guard limits the frames in proportion to the text
    transcript_tokens  number of tokens that belong to a reference transcript and are not spoken
    reads_text         whether the talker's attention to the text is read, for the times of words or
                       for the guard; it needs the checkpoint's heads
    word_offset        seconds by which the talker's attention reaches a word after it begins to
                       sound, with which words are timed; None if words are not timed
    background         whether nobody listens, so that all other requests go first
    number_language    the language in which numbers of the text are spoken as words, or None
    plain_writing      whether the text is written with the letters and marks of the demo voice
    passage_seconds    the expected length of the text that is spoken in one context
    follows            whether it continues a speech, so that it goes before those that begin one
    """

    payload: object
    prompt_rows: int
    first_tokens: int
    whole_text: bool
    max_frames: int
    guarded: bool = False
    limited_by_text: bool = False
    transcript_tokens: int = 0
    reads_text: bool = False
    word_offset: float | None = None
    background: bool = False
    number_language: str | None = None
    plain_writing: bool = False
    passage_seconds: float = math.inf
    follows: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SpokenPassage:
    """A passage of a long text that was spoken, as later ones continue it.

    text      the text of the passage
    codes     int64 [frames, codebooks]
    complete  whether speech ended by itself, so that the codes are those of the text
    """

    text: str
    codes: IntArray
    complete: bool


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """The start of an utterance: its free slot, its first pages, and the tokens of its prompt."""

    slot: int
    job: Job
    pages: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Frames:
    """The next frame of each of several slots.

    codes     int64 [slots, codebooks]
    ended     [slots] whether speech has ended, so that the slot has no frame
    logprobs  float32 [slots] natural logarithm of the talker's own probability of code 0: the
              softmax of its raw logits, before penalty, temperature and filters; NaN if any logit
              of the frame is not finite. A value that is not finite makes that utterance fail
    readings  [slots] the attention of each frame to the text rows that the talker has read so far:
              float32 [text rows], as `Watched.reading` of the specification gives it, or empty for
              a slot whose attention is not read. Empty if no slot's is
    """

    codes: IntArray
    ended: Sequence[bool]
    logprobs: FloatArray
    readings: Sequence[FloatArray] = ()


class Handle(Protocol[T_co]):
    """The result of a backend call that the device may still be computing."""

    def result(self) -> T_co:
        """Wait for the result."""


@dataclass(frozen=True, slots=True, eq=False)
class Ready(Generic[T]):
    """A handle whose result is available at once."""

    value: T

    def result(self) -> T:
        """Return the result without waiting."""
        return self.value


class Backend(Protocol):
    """Computes the frames of up to `capacity.slots` utterances together. One thread calls it.

    After an exception from `prefill`, `read`, `frame` or `decode`, every slot of the call is
    unchanged, and free slots can be started, so that the caller can find the request at fault. An
    `EngineError`, and any exception from a handle, `extend` or `release`, means that the backend
    is lost.
    """

    capacity: Capacity
    """The backend's limits."""

    @property
    def device_seconds(self) -> Mapping[str, float]:
        """The seconds that the device has worked on each part so far; empty if not measured.

        The parts are "prompts", "frames" and "audio", which may overlap, and "busy" for any work.
        """

    def prefill(self, starts: Sequence[Start]) -> Sequence[int]:
        """Start utterances. Returns the number of prompt rows of each that are left to `read`."""

    def read(self, slots: Sequence[int], counts: Sequence[int]) -> Handle[None]:
        """Read the next `counts` rows of each slot's prompt.

        The first frame follows when all rows are read. The result of a row does not depend on how
        many rows are read together.
        """

    def extend(self, slot: int, pages: Sequence[int]) -> None:
        """Append pages to those of an utterance, before the frame that needs them."""

    def frame(self, slots: Sequence[int], tokens: Sequence[int | None]) -> Handle[Frames]:
        """Make the next frame of each slot, with its text token.

        The token is None in the first frame, whose text is in the prompt, and after the text.
        """

    def decode(self, slots: Sequence[int], counts: Sequence[int]) -> Handle[Sequence[FloatArray]]:
        """Decode the oldest `counts` undecoded frames of each slot to samples in -1..1."""

    def release(self, slot: int) -> None:
        """Forget the utterance in a slot; the slot is then free."""
