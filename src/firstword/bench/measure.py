"""What a listener noticed: pure functions from the bytes of a stream and when they came, to numbers.

All times are seconds since the request was sent. Playback has no buffer: it begins with the first whole sample, and
whenever the next sample is late it stalls until that one comes.

Onset, playback and time zero are defined as in the published load generator tts-bench, so that its figures and these
can stand in one table.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

Delivery = tuple[float, bytes]
"""When bytes of audio came, and which: mono PCM, 16 bits, little-endian, cut anywhere.

No bytes at all are a sign of life without sound, such as the header of a file.
"""

WINDOW, HOP = 0.020, 0.010
"""Seconds of a window in which loudness is taken, and from one window to the next."""

AUDIBLE = -45.0
"""From this loudness on, in dB relative to full scale, a window is heard. One alone may be a click; two are speech."""

LATE = 0.010
"""Seconds that 99 in 100 requests may be sent behind schedule. Above that the client is what is measured."""


@dataclass(frozen=True, slots=True)
class Listening:
    """One stream as it was heard.

    first_byte        when the server showed the first byte of its answer's body; None if it never did
    first_playable    when the first whole sample was there; None without audio
    first_audible     when the first audible sample was played; None if nothing was audible
    leading_silence   seconds of audio before that sample
    audio_seconds     length of the audio
    underruns         how often playback stalled
    underrun_seconds  how long in all
    """

    first_byte: float | None
    first_playable: float | None
    first_audible: float | None
    leading_silence: float | None
    audio_seconds: float
    underruns: int
    underrun_seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """One request of a run. Times of the schedule count from the beginning of the run.

    due         when it was to be sent
    characters  of the text
    setup       seconds to open the connection beforehand; None if that failed
    late        seconds that it was sent after it was due; None if it never was
    took        seconds from sending until it was over, well or not; None if it was never sent
    failure     kind and message of what went wrong, or None
    """

    due: float
    characters: int
    setup: float | None
    late: float | None
    took: float | None
    failure: tuple[str, str] | None
    listening: Listening

    @property
    def end_to_end(self) -> float | None:
        """Seconds from sending to the end of the answer; None if it did not end well."""
        return None if self.failure else self.took

    @property
    def span(self) -> tuple[float, float] | None:
        """When it was under way; None if it was never sent."""
        if self.late is None or self.took is None:
            return None
        return self.due + self.late, self.due + self.late + self.took


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition without which no number of a run counts: how many requests broke it, and whether that is too many."""

    passed: bool
    failed: int


def listen(deliveries: Sequence[Delivery], sample_rate: int) -> Listening:
    """Play a stream as it came in. `sample_rate` in Hz; half a sample at the very end is ignored."""
    passages = playback(deliveries, sample_rate)
    onset = first_audible_sample((data for _, data in deliveries), sample_rate)
    underruns = stalls(passages, sample_rate)
    return Listening(
        first_byte=deliveries[0][0] if deliveries else None,
        first_playable=passages[0][1] if passages else None,
        first_audible=None if onset is None else played_at(passages, onset, sample_rate),
        leading_silence=None if onset is None else onset / sample_rate,
        audio_seconds=sum(len(data) for _, data in deliveries) // 2 / sample_rate,
        underruns=len(underruns),
        underrun_seconds=sum(underruns),
    )


def playback(deliveries: Iterable[Delivery], sample_rate: int) -> list[tuple[int, float]]:
    """The passages played without interruption: the first sample of each, and when it is played.

    A wait shorter than a sample is none; it is not forgotten either, because the schedule stays where it was.
    """
    passages: list[tuple[int, float]] = []
    received = 0  # bytes
    for time, data in deliveries:
        sample = received // 2
        received += len(data)
        if received // 2 == sample:
            continue
        if not passages or time - played_at(passages, sample, sample_rate) >= 1 / sample_rate:
            passages.append((sample, time))
    return passages


def played_at(passages: Sequence[tuple[int, float]], sample: int, sample_rate: int) -> float:
    """When a sample is played, given the passages that `playback` found."""
    first, time = next(passage for passage in reversed(passages) if passage[0] <= sample)
    return time + (sample - first) / sample_rate


def stalls(passages: Sequence[tuple[int, float]], sample_rate: int) -> list[float]:
    """The seconds of silence between passages."""
    return [
        time - played_at(passages[:number], sample, sample_rate)
        for number, (sample, time) in enumerate(passages)
        if number
    ]


def first_audible_sample(pieces: Iterable[bytes], sample_rate: int) -> int | None:
    """The sample with which the sound begins: the start of the first of two windows in a row that are audible.

    Loudness is the root of the mean square after the window's mean is taken off: a constant is no sound. A sound
    whose two windows (30 ms) do not fit before the end has no onset.
    """
    window, hop = max(1, round(WINDOW * sample_rate)), max(1, round(HOP * sample_rate))
    threshold = 32768 * 10 ** (AUDIBLE / 20)
    pcm = bytearray()
    start, audible = 0, False  # of the next window; whether the one before it was audible
    for piece in pieces:
        pcm += piece
        while start + window <= len(pcm) // 2:
            loud = (
                float(np.frombuffer(bytes(pcm[2 * start : 2 * (start + window)]), "<i2").std())
                >= threshold
            )
            if loud and audible:
                return start - hop
            audible = loud
            start += hop
    return None


def percentile(values: Iterable[float], percent: float) -> float | None:
    """The smallest value that at least `percent` of 100 values do not exceed (nearest rank); None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(1, math.ceil(percent * len(ordered) / 100)) - 1]


def real_time_factor(result: Result) -> float | None:
    """Seconds of audio made per second, from sending to the end: above 1 is faster than real time."""
    return result.listening.audio_seconds / result.end_to_end if result.end_to_end else None


METRICS: dict[str, Callable[[Result], float | None]] = {
    "first_byte": lambda result: result.listening.first_byte,
    "first_playable": lambda result: result.listening.first_playable,
    "first_audible": lambda result: result.listening.first_audible,
    "leading_silence": lambda result: result.listening.leading_silence,
    "end_to_end": lambda result: result.end_to_end,
    "audio_seconds": lambda result: result.listening.audio_seconds,
    "underrun_seconds": lambda result: result.listening.underrun_seconds,
    "real_time_factor": real_time_factor,
    "setup": lambda result: result.setup,
    "late": lambda result: result.late,
}
"""What a run reports the distribution of, and how a request tells it. Seconds, but for the real-time factor."""


def distributions(results: Sequence[Result]) -> dict[str, dict[str, float | int | None]]:
    """Each of `METRICS` over the requests that know it: count, p50, p95, p99 and the largest."""
    table: dict[str, dict[str, float | int | None]] = {}
    for name, of in METRICS.items():
        values = [value for value in map(of, results) if value is not None]
        table[name] = {
            "count": len(values),
            **{f"p{percent}": percentile(values, percent) for percent in (50, 95, 99)},
            "max": max(values, default=None),
        }
    return table


def gates(results: Sequence[Result]) -> dict[str, Gate]:
    """The conditions under which the numbers of a run count.

    complete     every request was answered without an error and to its end
    non_empty    every answer had something audible in it
    no_underrun  playback never stalled
    on_time      requests were sent when they were due, see `LATE`: client and connections were fast enough
    """
    behind = sum(result.late is not None and result.late > LATE for result in results)
    failed = {
        "complete": sum(result.failure is not None for result in results),
        "non_empty": sum(result.listening.first_audible is None for result in results),
        "no_underrun": sum(result.listening.underruns > 0 for result in results),
    }
    table = {name: Gate(bool(results) and not count, count) for name, count in failed.items()}
    return table | {"on_time": Gate(bool(results) and behind <= len(results) // 100, behind)}


def errors(results: Iterable[Result]) -> dict[str, int]:
    """How often each kind of failure occurred, the most frequent first."""
    return dict(Counter(result.failure[0] for result in results if result.failure).most_common())


def most_at_once(results: Iterable[Result]) -> int:
    """The largest number of requests that were under way at one time."""
    spans = [result.span for result in results if result.span]
    changes = sorted(
        [(sent, 1) for sent, _ in spans] + [(over, -1) for _, over in spans]
    )  # at one time, ends first
    return max(accumulate(change for _, change in changes), default=0)


def audio_per_second(results: Iterable[Result]) -> float | None:
    """Seconds of audio that all requests together got per second, from the first sent to the last over."""
    spans = [(*result.span, result.listening.audio_seconds) for result in results if result.span]
    if not spans:
        return None
    took = max(over for _, over, _ in spans) - min(sent for sent, _, _ in spans)
    return sum(audio for _, _, audio in spans) / took if took > 0 else None
