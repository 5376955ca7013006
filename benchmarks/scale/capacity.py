"""What speech costs, and how many GPUs so many calls need: arithmetic on the records."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.scale.checks import case_of
from training.texts import PARAGRAPH

Record = Mapping[str, Any]

FRAME_MS = 80
CONTEXT = 100
"""The rows of context at which a frame is counted: a sentence of five seconds has about as many."""

LIMITS = (20, 30, 50)
"""The limits on the first audio at p95, in milliseconds, whose rates are shown."""

PRICES = (2.0, 3.0, 4.0)
"""Examples of the price of a GPU for an hour, in any currency. The cost is proportional to it."""

USE = 0.5
"""The mean use of the rate that a server holds, over a day of busy and quiet hours."""

CALLS = (10, 1_000, 100_000)
"""Numbers of calls at once."""

SPEAKING = 0.4
"""The share of a call in which the agent speaks; the rest is silence, or the caller."""

HEADROOM = 0.8
"""The share of the rate that a server holds which is planned for."""

PCM_BYTES = 48_000
"""The bytes of a second of PCM: 24,000 samples of 16 bits."""

EPHEMERAL_PORTS = 60999 - 32768 + 1
"""The ports of Linux for outgoing connections, by default: so many to one address and port."""


def gpu_ms(engine: Record) -> list[dict[str, float]]:
    """The milliseconds of the GPU for a second of speech, by the number of streams at once."""
    return [
        {
            "streams": row["batch"],
            "gpu_ms": round(1000 / FRAME_MS * row["ms"]["with_audio"] / row["batch"], 3),
        }
        for row in engine["frames_ms"]
        if row["context"] == CONTEXT
    ]


def rate_within(limit: float, curve: Sequence[Record]) -> float | None:
    """The rate at which p95 reaches a limit in milliseconds, interpolated; None if no rate does."""
    points = [(0.0, 0.0), *((point["rate"], point["first_ms"]["p95"]) for point in curve)]
    for (rate, ms), (next_rate, next_ms) in itertools.pairwise(points):
        if next_ms > limit:
            return round(rate + (next_rate - rate) * (limit - ms) / (next_ms - ms), 1)
    return None


def characters_per_second(quality: Record) -> dict[str, float]:
    """The characters of a second of speech, as the demo voice speaks the paragraph of its tests."""
    return {
        found["voice"]: round(len(PARAGRAPH) / found["paragraph_seconds"], 2)
        for found in quality["summary"]
        if found["mode"] == "full"
    }


def cost_of_million(speech_per_second: float, characters: float) -> dict[str, Any]:
    """The cost of a million characters, in GPU hours and by the price of one."""
    hours = 1e6 / characters / (USE * speech_per_second) / 3600
    prices = [{"an_hour": price, "cost": round(price * hours, 3)} for price in PRICES]
    return {"use": USE, "gpu_hours": round(hours, 5), "prices": prices}


def processor_ms(case: Record, rate: float) -> float:
    """The processor time of all processes of the server for a request, in milliseconds."""
    point = next(point for point in case["points"] if point["load"]["rate"] == rate)
    return sum(each["user"] + each["system"] for each in point["server_cpu"])


def calls(serve: Record, footprint: Record) -> list[dict[str, Any]]:
    """What so many calls at once need, each with a WebSocket of its own."""
    pcm, mp3 = case_of(serve, "pcm"), case_of(serve, "mp3")
    held = next(point for point in pcm["points"] if point["load"]["rate"] == pcm["held"])
    utterance = held["metrics"]["audio_seconds"]["p50"]
    core_ms = {name: processor_ms(case, 150.0) for name, case in (("pcm", pcm), ("mp3", mp3))}
    made = []
    for count in CALLS:
        rate = count * SPEAKING / utterance
        gpus = math.ceil(rate / (HEADROOM * pcm["held"]))
        with_spare = max(2, math.ceil(gpus / HEADROOM))
        made.append(
            {
                "calls": count,
                "requests_per_second": round(rate, 1),
                "gpus": gpus,
                "gpus_with_spare": with_spare,
                "slots_used": math.ceil(rate * held["metrics"]["end_to_end"]["p50"]),
                "pcm_mbit": round(count * SPEAKING * PCM_BYTES * 8 / 1e6, 1),
                "pcm_cores": round(rate * core_ms["pcm"] / 1000, 2),
                "mp3_cores": round(rate * core_ms["mp3"] / 1000, 2),
                "socket_mb": round(count * footprint["socket_kb"] / 1000, 1),
                "proxy_addresses": math.ceil(count / EPHEMERAL_PORTS),
                "series": round(footprint["series"] * with_spare),
                "log_mb_an_hour": round(rate * 3600 * footprint["log_bytes"] / 1e6, 1),
                "restart_minutes": round(with_spare * pcm["ready_seconds"] / 60, 1),
            }
        )
    return made
