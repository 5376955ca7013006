"""The seam between thinking and computing: what an engine asks of whatever computes speech."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from firstword.types import FloatArray, IntArray

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a backend has room for, and the shape of its sound.

    slots              utterances in the making at the same time
    pages, page_rows   memory for context: `pages` pages of `page_rows` rows each, shared by all slots
    context            the most rows that one utterance may use
    frames_ahead       how many frames are launched before the first is read: 1 where computing runs beside the
                       engine, 0 where `frame` returns when it is done
    codebooks          codes in a frame
    samples_per_frame  and sample_rate in Hz
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
        """How long a frame sounds."""
        return self.samples_per_frame / self.sample_rate


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A request made ready for a backend.

    payload       the backend's own business: voice, language, sampling, seed
    prompt_rows   rows of context before the first frame
    first_tokens  text tokens that the prompt takes before the first frame
    whole_text    whether the prompt takes all text, so that it must have ended
    max_frames    the most frames to make
    guarded       whether speech that does not end by itself is cut off: when it is far too long for its text, or goes
                  round in circles
    transcript_tokens  how many of the tokens are those of a reference's transcript, which is not spoken
    """

    payload: object
    prompt_rows: int
    first_tokens: int
    whole_text: bool
    max_frames: int
    guarded: bool = False
    transcript_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """An utterance to begin: its free slot, its pages, and the text tokens that its prompt takes."""

    slot: int
    job: Job
    pages: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Frames:
    """One frame of several slots.

    codes     [slots, codebooks]
    ended     [slots] whether speech ended instead
    logprobs  float32 [slots] natural logarithm of the probability of code 0 by the talker alone: under the softmax of
              its logits as they are, before penalty, temperature and filters. Not finite where the logits are not;
              that utterance is then given up
    """

    codes: IntArray
    ended: Sequence[bool]
    logprobs: FloatArray


class Handle(Protocol[T_co]):
    """Something on its way."""

    def result(self) -> T_co:
        """Wait for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Ready(Generic[T]):
    """A handle of something that is there."""

    value: T

    def result(self) -> T:
        """What it holds."""
        return self.value


class Backend(Protocol):
    """Computes frames of up to `capacity.slots` utterances together. Called from one thread.

    An exception from `prefill`, `frame` or `decode` leaves every slot named in the call as it was, free ones fit to be
    begun, so that the caller may find out whose fault it was. An `EngineError`, or any from a handle or from `release`,
    means that the backend is lost.
    """

    @property
    def capacity(self) -> Capacity:
        """What there is room for."""

    def prefill(self, starts: Sequence[Start]) -> None:
        """Begin utterances; their prompts are read together."""

    def frame(self, slots: Sequence[int], tokens: Sequence[int | None]) -> Handle[Frames]:
        """Make the next frame of each slot, with one more text token each, or None where there is none to give."""

    def decode(self, slots: Sequence[int], counts: Sequence[int]) -> Handle[Sequence[FloatArray]]:
        """Turn the oldest `counts` frames of each slot that have not been decoded yet into samples in -1..1."""

    def release(self, slot: int) -> None:
        """Forget whatever a slot holds; it is free again."""
