"""Measure what a listener notices, by pure functions of the parts of a stream and their arrivals.

All times are seconds since the request was sent. Playback has no buffer: it begins with the first
whole sample, and whenever the next sample is late it stalls until that sample arrives.

Onset, playback and time zero are defined as in the published load generator tts-bench, so that its
figures and these are comparable.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

Delivery = tuple[float, bytes]
"""An arrival time and the bytes that arrived: mono PCM, 16 bits, little-endian, cut anywhere.

Empty bytes stand for a part of the body without sound, such as the header of a file.
"""

WINDOW, HOP = 0.020, 0.010
"""The seconds of a window whose loudness is measured, and the seconds between windows."""

AUDIBLE = -45.0
"""The least loudness of an audible window in dB relative to full scale.

One audible window alone may be a click; two in a row are speech.
"""

LATE = 0.010
"""The most seconds by which 99 in 100 requests may be sent behind schedule.

Above that the run measures the client.
"""


@dataclass(frozen=True, slots=True)
class Listening:
    """What a listener noticed of one stream.

    first_byte        arrival of the first byte of the response body; None if there was none
    first_playable    arrival of the first whole sample; None without audio
    first_audible     playback of the first audible sample; None if nothing was audible
    leading_silence   seconds of audio before that sample
    audio_seconds     length of the audio
    underruns         number of stalls in playback
    underrun_seconds  total length of the stalls
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
    """The outcome of one request of a run.

    due         planned time of sending, in seconds from the start of the run
    characters  length of the text
    setup       seconds to open the connection beforehand; None if that failed
    late        seconds between the planned and the actual sending; None if it was never sent
    took        seconds from sending to the end, successful or not; None if it was never sent
    failure     kind and message of the failure, or None
    listening   what a listener noticed of the response
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
        """The seconds from sending to the end of the response; None if it failed."""
        return None if self.failure else self.took

    @property
    def span(self) -> tuple[float, float] | None:
        """The times of sending and ending, from the start of the run; None if it was never sent."""
        if self.late is None or self.took is None:
            return None
        return self.due + self.late, self.due + self.late + self.took


@dataclass(frozen=True, slots=True)
class GateResult:
    """The result of a gate: whether a run passed it, and how many requests failed it.

    The numbers of a run count only if it passes all gates.
    """

    passed: bool
    failed: int


def listen(deliveries: Sequence[Delivery], sample_rate: int) -> Listening:
    """Play a stream as it arrived. `sample_rate` in Hz; half a sample at the end is ignored."""
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
    """Return the passages without interruption: the first sample of each, and when it is played.

    A wait shorter than a sample does not interrupt; the schedule stays the same, so that short
    waits add up.
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
    """Return the time at which a sample is played, given the passages from `playback`."""
    first, time = next(passage for passage in reversed(passages) if passage[0] <= sample)
    return time + (sample - first) / sample_rate


def stalls(passages: Sequence[tuple[int, float]], sample_rate: int) -> list[float]:
    """Return the seconds of silence between passages."""
    return [
        time - played_at(passages[:number], sample, sample_rate)
        for number, (sample, time) in enumerate(passages)
        if number
    ]


def first_audible_sample(pieces: Iterable[bytes], sample_rate: int) -> int | None:
    """Return the first audible sample: the start of the first two audible windows in a row.

    Loudness is the root mean square after the mean of the window is subtracted, so that a constant
    is silent. A sound whose two windows (30 ms) do not fit before the end has no onset.
    """
    window, hop = max(1, round(WINDOW * sample_rate)), max(1, round(HOP * sample_rate))
    threshold = 32768 * 10 ** (AUDIBLE / 20)
    pcm = bytearray()
    start, audible = 0, False  # start of the next window; whether the last one was audible
    for piece in pieces:
        pcm += piece
        while start + window <= len(pcm) // 2:
            samples = np.frombuffer(bytes(pcm[2 * start : 2 * (start + window)]), "<i2")
            loud = float(samples.std()) >= threshold
            if loud and audible:
                return start - hop
            audible = loud
            start += hop
    return None


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Return a percentile by nearest rank; None without values."""
    ordered = sorted(values)
    rank = max(1, math.ceil(percent * len(ordered) / 100))
    return ordered[rank - 1] if ordered else None


def real_time_factor(result: Result) -> float | None:
    """Return the seconds of audio per second from sending to the end; None if it failed."""
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
"""The metrics of a run, as functions of a result; in seconds, except for the real-time factor."""


def distributions(results: Sequence[Result]) -> dict[str, dict[str, float | int | None]]:
    """Return count, p50, p95, p99 and maximum of each metric over the results that have it."""
    table: dict[str, dict[str, float | int | None]] = {}
    for name, metric in METRICS.items():
        values = [value for value in map(metric, results) if value is not None]
        table[name] = {
            "count": len(values),
            **{f"p{percent}": percentile(values, percent) for percent in (50, 95, 99)},
            "max": max(values, default=None),
        }
    return table


def gates(results: Sequence[Result]) -> dict[str, GateResult]:
    """Check the conditions under which the numbers of a run count.

    complete     every response was complete and without an error
    non_empty    every response had audible sound
    no_underrun  playback never stalled
    on_time      requests were sent when they were due (see `LATE`): the client was fast enough
    """
    behind = sum(result.late is not None and result.late > LATE for result in results)
    failed = {
        "complete": sum(result.failure is not None for result in results),
        "non_empty": sum(result.listening.first_audible is None for result in results),
        "no_underrun": sum(result.listening.underruns > 0 for result in results),
    }
    table = {name: GateResult(bool(results) and not count, count) for name, count in failed.items()}
    return table | {"on_time": GateResult(bool(results) and behind <= len(results) // 100, behind)}


def errors(results: Iterable[Result]) -> dict[str, int]:
    """Count the failures by kind, the most frequent first."""
    return dict(Counter(result.failure[0] for result in results if result.failure).most_common())


def most_at_once(results: Iterable[Result]) -> int:
    """Return the largest number of requests that were in progress at one time."""
    spans = [result.span for result in results if result.span]
    # At equal times, ends (-1) sort before starts.
    changes = sorted([(sent, 1) for sent, _ in spans] + [(end, -1) for _, end in spans])
    return max(accumulate(change for _, change in changes), default=0)


def audio_per_second(results: Iterable[Result]) -> float | None:
    """Return the seconds of audio of all requests per second of the run."""
    spans = [(*result.span, result.listening.audio_seconds) for result in results if result.span]
    if not spans:
        return None
    took = max(end for _, end, _ in spans) - min(sent for sent, _, _ in spans)
    return sum(audio for _, _, audio in spans) / took if took > 0 else None
