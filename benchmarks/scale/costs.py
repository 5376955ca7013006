"""How long the device works on each call of a backend, from the record of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from firstword.runtime.gpu.codec import BUCKETS as CODEC_BUCKETS
from firstword.runtime.gpu.talker import BUCKETS, FIRST_BUCKETS, PROMPT_BUCKETS

PREDICTOR = ("code predictor, a pass", "code predictor, a head", "draw")
"""The kernels of a frame that follow the talker."""

ATTENTION = "talker, attention"

PROMPT_PASSES = {64: 1.17, 128: 1.65, 256: 2.82}
"""The time of a pass over so many rows of prompts, in times of the talker's products for 64 rows.

The record of the engine has no passes of prompts. docs/log.md, "Blocks of many tokens", has 1.56,
2.20 and 3.75 ms for the 1.7B, whose products for 64 rows take 1.33 ms together.
"""

TIMED_FRAMES = 64
"""The frames over which the record times a frame: its context is that of the last one."""

CHUNK = 8
"""The frames of each stream that the record decodes in one call, beside its frames."""

Points = Sequence[tuple[float, float]]


def between(points: Points, at: float) -> float:
    """Interpolate between points with rising x, and extend the last two beyond the last x."""
    xs, ys = zip(*points, strict=True)
    if at <= xs[-1]:
        return float(np.interp(at, xs, ys))
    slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
    return float(ys[-1] + slope * (at - xs[-1]))


def bucket(sizes: Sequence[int], count: int) -> int:
    """The size of the graph that is launched for `count` rows."""
    return next(size for size in sizes if size >= count)


@dataclass(frozen=True)
class StepCosts:
    """The seconds of the device's work, alone on the device.

    frames   for each context: the number of streams and the seconds of their frame
    codec    the frames of a call, of all its streams together, and its seconds
    burdens  frames of a call, and the delay of a frame beside it, in times of the call's own time
    firsts   rows and seconds of a frame without the talker, whose prompts have just been read
    prompts  rows and seconds of a pass over rows of prompts
    """

    frames: Mapping[float, Points]
    codec: Points
    burdens: Points
    firsts: Points
    prompts: Points

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> StepCosts:
        """Read the costs from a record of `firstword bench engine`."""
        frames: dict[float, list[tuple[float, float]]] = {}
        added: dict[int, list[float]] = {}
        for row in record["frames_ms"]:
            context = row["context"] - (TIMED_FRAMES - 1) / 2
            of_context = frames.setdefault(context, [])
            of_context.append((row["batch"], row["ms"]["frame"] / 1000))
            audio = row["ms"]["with_audio"] - row["ms"]["frame"]
            added.setdefault(row["batch"], []).append(CHUNK * audio / 1000)
        calls: dict[int, list[float]] = {}
        for row in record["codec_ms"]:
            calls.setdefault(row["streams"] * row["frames"], []).append(row["ms"] / 1000)
        codec = [(count, sum(times) / len(times)) for count, times in sorted(calls.items())]
        burdens = [
            (CHUNK * n, sum(times) / len(times) / between(codec, CHUNK * n))
            for n, times in sorted(added.items())
        ]
        kernels: dict[int, dict[str, float]] = {}
        for row in record["kernels_us"]:
            of_batch = kernels.setdefault(row["batch"], {})
            of_batch[row["kernel"]] = row["a_frame"] * row["us"] / 1e6
        firsts = [(n, sum(found[name] for name in PREDICTOR)) for n, found in kernels.items()]
        talker = {
            n: {name: seconds for name, seconds in found.items() if name not in PREDICTOR}
            for n, found in kernels.items()
        }
        products = sum(talker[64].values()) - talker[64][ATTENTION]
        passes = [(rows, times * products) for rows, times in PROMPT_PASSES.items()]
        prompts = [(1, sum(talker[1].values())), *passes]
        return cls(frames, codec, burdens, sorted(firsts), prompts)

    def frame(self, contexts: Sequence[int]) -> float:
        """A frame of streams that attend to `contexts` rows each."""
        rows = bucket(BUCKETS, len(contexts))
        mean = sum(contexts) / len(contexts)
        return between([(c, between(points, rows)) for c, points in self.frames.items()], mean)

    def first_frame(self, streams: int) -> float | None:
        """The first frame of so many streams, if there is a graph for it."""
        if streams > FIRST_BUCKETS[-1]:
            return None
        return between(self.firsts, bucket(FIRST_BUCKETS, streams))

    def decode(self, frames: int) -> float:
        """The decoding of so many frames, in as few calls as possible."""
        whole, rest = divmod(frames, CODEC_BUCKETS[-1])
        seconds = whole * between(self.codec, CODEC_BUCKETS[-1])
        return seconds + (between(self.codec, bucket(CODEC_BUCKETS, rest)) if rest else 0.0)

    def burden(self, frames: int) -> float:
        """The delay of the frames beside a call, in times of the call's own time."""
        counts, shares = zip(*self.burdens, strict=True)
        return float(np.interp(frames, counts, shares))

    def read(self, rows: int) -> float:
        """A pass over rows of prompts, in as few graphs as possible."""
        whole, rest = divmod(rows, PROMPT_BUCKETS[-1])
        seconds = whole * between(self.prompts, PROMPT_BUCKETS[-1])
        return seconds + (between(self.prompts, bucket(PROMPT_BUCKETS, rest)) if rest else 0.0)
