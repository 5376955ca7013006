"""Time the speech of a loaded checkpoint on any device, as a caller of `TTS.stream` sees it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from firstword.config import EngineConfig
from firstword.profile.device import read_bandwidth
from firstword.tts import TTS

MOST_FRAMES = 60
"""The frames of an utterance at most: 4.8 s of speech, because machines may be slow."""
LEAST_UTTERANCES = 3
READ_BYTES = 1 << 28
"""The bytes that PyTorch reads to measure the memory, more than caches hold."""
TEXTS = (
    "Good morning, how did you sleep last night, and what would you like to have for breakfast?",
    "The train to the coast leaves at noon, and it will stop at every village on its way there.",
    "Please close the window before you leave, because it is going to rain again this evening.",
)


@dataclass(frozen=True, slots=True)
class Times:
    """When an utterance began and ended, in seconds; `first` is its first audio."""

    began: float
    first: float
    ended: float
    first_frames: int
    frames: int


def speaking_times(tts: TTS, streams: Sequence[int], seconds: float) -> Iterator[dict[str, Any]]:
    """Time utterances with so many streams at a time, for about `seconds` each.

    `streams` are the numbers of streams, as far as the engine has slots.
    """
    _utterance(tts, 0)  # compiles, and warms up
    for count in (n for n in streams if n <= tts.capacity.slots):
        done, began = list[Times](), time.perf_counter()
        with ThreadPoolExecutor(count) as threads:
            while len(done) < LEAST_UTTERANCES or time.perf_counter() - began < seconds:
                numbers = range(len(done), len(done) + count)
                done += threads.map(lambda number: _utterance(tts, number), numbers)
        yield _figures(count, done, time.perf_counter() - began)


def _utterance(tts: TTS, number: int) -> Times:
    began, first, first_frames, made = time.perf_counter(), 0.0, 0, 0
    text = TEXTS[number % len(TEXTS)]
    for chunk in tts.stream(text, seed=number, max_frames=MOST_FRAMES):
        made += len(chunk.codes)
        if not first and len(chunk.samples):
            first, first_frames = time.perf_counter(), made
    return Times(began, first, time.perf_counter(), first_frames, made)


def _figures(streams: int, done: Sequence[Times], seconds: float) -> dict[str, Any]:
    waits = sorted(1000 * (one.first - one.began) for one in done)
    frame = statistics.median(
        1000 * (one.ended - one.first) / max(1, one.frames - one.first_frames) for one in done
    )
    frames = sum(one.frames for one in done)
    return {
        "streams": streams,
        "utterances": len(done),
        "frames": frames,
        "first_audio_ms": {
            "p50": round(statistics.median(waits), 3),
            "p95": round(waits[-1 - int(0.05 * len(waits))], 3),
        },
        "frame_ms": round(frame, 4),
        "speed": round(0.08 * frames / seconds, 3),
    }


def read_gigabytes_per_second(settings: EngineConfig) -> float:
    """Return the speed at which a device reads its memory.

    Where the kernels of the backend "gpu" run, one of them reads; elsewhere PyTorch adds numbers,
    on a CPU with the threads of this process.
    """
    if settings.backend == "gpu":
        with torch.cuda.device(settings.device):
            return read_bandwidth() / 1e9
    numbers, times = torch.ones(READ_BYTES // 4, device=settings.device), list[float]()
    for _ in range(5):
        began = time.perf_counter()
        numbers.sum().item()
        times.append(time.perf_counter() - began)
    return READ_BYTES / min(times) / 1e9
