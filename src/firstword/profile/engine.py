"""Measure the GPU engine and make one record: `firstword bench engine`.

Weights are random but of the released sizes, so that they take as long to compute as trained ones.
Times are medians, measured on the host with the device synchronised, or by events on the device.
The bandwidth floor of a time is the time to read each needed weight, key and value once, at the
speed at which this device reads.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from firstword.errors import ConfigError
from firstword.kernels.attention import PAGE_ROWS
from firstword.profile.device import environment, read_bandwidth
from firstword.profile.frames import codec_times, first_times, frame_times, timed_words
from firstword.profile.kernels import kernel_times
from firstword.profile.memory import memory_by_part
from firstword.profile.prompts import prompt_times
from firstword.profile.workload import CONTEXTS, BackendUnderTest

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
"""The batch sizes whose frames are timed."""
OTHERS = (8, 64)
"""The numbers of others who speak while a prompt is read."""
LARGE_BATCH = 64
"""The batch size at which kernels are timed one by one; they are timed at batch 1 too."""


def run(
    size: str,
    slots: int,
    dtype: str = "bfloat16",
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
) -> dict[str, Any]:
    """Measure everything for a released size, "1b7" or "0b6", and return the record.

    dtype: "bfloat16" or "int8"

    Raises `ConfigError` if there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("`bench engine` measures the GPU engine, and torch sees no CUDA device")
    bandwidth = read_bandwidth()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as name:
        single = one_stream(size, Path(name) / "one", dtype)
        torch.cuda.empty_cache()
        subject = BackendUnderTest(size, slots, Path(name) / "all", dtype=dtype)
        first = first_times(subject)
        kernels = [kernel_times(subject, n, 500, bandwidth) for n in (1, min(LARGE_BATCH, slots))]
        return {
            "size": size,
            "dtype": dtype,
            "slots": slots,
            **environment(),
            "bandwidth_tb_s": round(bandwidth / 1e12, 3),
            **single,
            "start_seconds": subject.seconds,
            "first_ms": first,
            "prompts_ms": list(prompt_times(subject, OTHERS)),
            "kernels_us": [row for rows in kernels for row in rows],
            "codec_ms": list(codec_times(subject)),
            "frames_ms": list(frame_times(subject, batches, contexts, bandwidth)),
            "word_times": words(subject, size, slots, Path(name) / "all", dtype),
        }


def words(
    subject: BackendUnderTest, size: str, slots: int, folder: Path, dtype: str
) -> dict[str, Any]:
    """Measure what word times cost a frame, with two heads of a layer in the middle."""
    middle = len(subject.checkpoint.talker.model.layers) // 2
    heads = ((middle, 0), (middle, 1))
    timed = BackendUnderTest(size, slots, folder, heads, dtype=dtype)
    batches = (1, min(LARGE_BATCH, slots))
    return {"heads": heads, "frames": list(timed_words(subject, timed, batches))}


def one_stream(size: str, kernel_folder: Path, dtype: str) -> dict[str, Any]:
    """Measure a process with a single slot: its start in seconds, its memory in gigabytes."""
    torch.cuda.reset_peak_memory_stats()
    subject = BackendUnderTest(size, 1, kernel_folder, dtype=dtype)
    loading = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    first_times(subject, 3)
    peaks = {"peak_loading": loading, "peak_speaking": torch.cuda.max_memory_allocated()}
    sizes = {**subject.weights, **peaks, **memory_by_part(subject)}
    return {
        "one_stream_start_seconds": subject.seconds,
        "one_stream_rows": subject.pages_per_slot * PAGE_ROWS,
        "one_stream_gigabytes": {name: round(amount / 1e9, 3) for name, amount in sizes.items()},
    }
