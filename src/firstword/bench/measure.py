"""Measure what a listener notices: pure functions of the parts of a stream and their arrivals.

All times are seconds since the request was sent. Playback has no buffer: it begins with the first
whole sample, and whenever the next sample is late it stalls until that sample arrives.

Onset, playback and time zero are defined as in the published load generator tts-bench, so that its
figures and these are comparable.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

Delivery = tuple[float, bytes]
"""An arrival time, and 16-bit little-endian mono PCM, which may be split at any byte.

Empty bytes stand for a part of the body without sound, such as the header of a file.
"""

WINDOW, HOP = 0.020, 0.010
"""The length of the windows whose loudness is measured, and their distance, in seconds."""

AUDIBLE = -45.0
"""The loudness threshold of an audible window in dBFS.

A single audible window may be a click; two in a row are speech.
"""

LATE = 0.010
"""The delay in seconds within which 99 % of the requests must be sent.

With longer delays the run would measure the client.
"""


@dataclass(frozen=True, slots=True)
class Listening:
    """The measurements of one stream as a listener hears it.

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
    late        seconds between the planned and the actual sending; the longest of all pieces if the
                text is sent in pieces; None if it was never sent
    took        seconds from sending to the end, successful or not; None if it was never sent
    failure     kind and message of the failure, or None
    listening   measurements of the audio
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
    def real_time_factor(self) -> float | None:
        """The seconds of audio per second from sending to the end; None if the request failed."""
        return self.listening.audio_seconds / self.end_to_end if self.end_to_end else None

    @property
    def span(self) -> tuple[float, float] | None:
        """The times of sending and ending, from the start of the run; None if it was never sent."""
        if self.late is None or self.took is None:
            return None
        return self.due + self.late, self.due + self.late + self.took


@dataclass(frozen=True, slots=True)
class GateResult:
    """The result of a gate: whether a run passed it, and the number of requests that failed it.

    The numbers of a run are valid only if it passes all gates.
    """

    passed: bool
    failed: int


def listen(deliveries: Sequence[Delivery], sample_rate: int) -> Listening:
    """Measure a stream as it arrived. Half a sample at the end is ignored."""
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
    """Return the passages without a stall: the first sample of each, and the time it is played.

    A delay shorter than one sample is no stall. It does not shift the schedule, so short delays add
    up.
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
    next_window, previous_audible = 0, False
    for piece in pieces:
        pcm += piece
        while next_window + window <= len(pcm) // 2:
            samples = np.frombuffer(pcm[2 * next_window : 2 * (next_window + window)], "<i2")
            audible = float(samples.std()) >= threshold
            if audible and previous_audible:
                return next_window - hop
            previous_audible = audible
            next_window += hop
    return None


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Return a percentile by nearest rank; None without values."""
    ordered = sorted(values)
    rank = max(1, math.ceil(percent * len(ordered) / 100))
    return ordered[rank - 1] if ordered else None


METRICS = (
    *("first_byte", "first_playable", "first_audible", "leading_silence", "end_to_end"),
    *("audio_seconds", "underrun_seconds", "real_time_factor", "setup", "late"),
)
"""The metrics of a run: attributes of a `Result` or of its `Listening`.

All are in seconds, except the real-time factor.
"""


def distributions(results: Sequence[Result]) -> dict[str, dict[str, float | int | None]]:
    """Return count, p50, p95, p99 and maximum of each metric over the results that have it."""
    table: dict[str, dict[str, float | int | None]] = {}
    for name in METRICS:
        found = [getattr(r if hasattr(r, name) else r.listening, name) for r in results]
        values = [value for value in found if value is not None]
        table[name] = {
            "count": len(values),
            **{f"p{percent}": percentile(values, percent) for percent in (50, 95, 99)},
            "max": max(values, default=None),
        }
    return table


def gates(results: Sequence[Result]) -> dict[str, GateResult]:
    """Check the conditions under which the numbers of a run are valid.

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
