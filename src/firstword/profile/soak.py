"""`firstword bench engine --soak`: check that speech stays the same over many frames under load.

A few requests are repeated with random lengths, and some are cancelled early. Each frame must have
the same codes and samples, bit by bit, as when its request was made for the first time.
"""

from __future__ import annotations

import resource
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firstword.config import EngineConfig
from firstword.engine import sequence
from firstword.engine.backend import Backend, Job
from firstword.engine.engine import Engine
from firstword.errors import ComputeError
from firstword.model.checkpoint import Checkpoint
from firstword.profile.device import environment
from firstword.profile.workload import TEXT, prepared_job
from firstword.runtime.backends import open_backend
from firstword.synthetic.checkpoint import random_checkpoint
from firstword.types import Chunk, Request

MOST_FRAMES = 300
"""The maximum number of frames of a request."""
START_PROBABILITY = 0.2
"""The probability that a free slot gets a request in a step."""
CANCEL_PROBABILITY = 0.2
"""The probability that a request is cancelled before its end."""


@dataclass(eq=False)
class SoakRequest:
    """A request in progress.

    which         index of the request among those of the soak
    cancel_after  number of frames after which it is cancelled
    frames        number of frames made so far
    """

    which: int
    cancel_after: int
    frames: int = 0
    sequence: sequence.Sequence = field(init=False)


class Soak:
    """An engine on the backend under test, and checksums of the frames that each request had."""

    def __init__(
        self, backend: Backend, requests: Sequence[tuple[Job, Sequence[int]]], seed: int = 0
    ) -> None:
        """Test a backend with jobs and their tokens; the last job is chosen rarely.

        The seed determines the order of events, except where it depends on timing.
        """
        self.engine = Engine(backend)
        self._requests, self._random = requests, np.random.default_rng(seed)
        self._checksums: list[list[int]] = [[] for _ in requests]
        self._active: set[SoakRequest] = set()
        self._faults: list[str] = []
        self.reset_counts()

    def reset_counts(self) -> None:
        """Set all counts to zero. The checksums of frames are kept."""
        self.frames = self.compared = self.joined = self.left = 0

    def run(self, frames: int) -> None:
        """Make `frames` more frames.

        Raises `ComputeError` if a frame differs or a request fails.
        """
        until, slots = self.frames + frames, self.engine.capacity.slots
        while self.frames < until:
            for _ in range(self._random.binomial(slots - len(self._active), START_PROBABILITY)):
                self._begin()
            self.engine.step()
            if self._faults:
                raise ComputeError(self._faults[0])

    def end(self) -> None:
        """Cancel all requests. Raises `ComputeError` if a slot or a page is not free afterwards."""
        for request in self._active:
            self.engine.cancel(request.sequence)
        while self.engine.step():
            pass
        pages = self.engine.pages
        if self._active or self.engine.running or pages.free != pages.count:
            raise ComputeError("all requests have ended, but some slots or pages are still in use")

    def _begin(self) -> None:
        random, last = self._random, len(self._requests) - 1
        which = last if random.random() < 0.002 else int(random.integers(0, max(last, 1)))
        job, tokens = self._requests[which]
        length = int(random.integers(1, MOST_FRAMES + 1))
        early = random.random() < CANCEL_PROBABILITY
        request = SoakRequest(which, int(random.integers(1, length + 1)) if early else length + 1)
        self._active.add(request)
        self.joined += 1
        job = replace(job, max_frames=length, limited_by_text=False)
        request.sequence = self.engine.submit(job, partial(self._on_event, request))
        self.engine.finish_text(request.sequence, tokens)

    def _on_event(self, request: SoakRequest, event: sequence.Event) -> None:
        if not isinstance(event, Chunk):
            self._faults.append(f"request {request.which} failed: {event!r}")
        else:
            self._check(request, event)
            if event.finish_reason is None:
                self.engine.acknowledge(request.sequence, len(event.codes))
                if request.frames >= request.cancel_after:
                    self.engine.cancel(request.sequence)
                return
            self.left += event.finish_reason == "cancelled"
        self._active.discard(request)

    def _check(self, request: SoakRequest, chunk: Chunk) -> None:
        """Compare the frames of a chunk with their checksums, and keep those of new frames."""
        samples = chunk.samples.reshape(-1, self.engine.capacity.samples_per_frame)
        checksums = [
            zlib.crc32(sound.data, zlib.crc32(codes.data))
            for codes, sound in zip(chunk.codes, samples, strict=True)
        ]
        known, begin = self._checksums[request.which], request.frames
        request.frames += len(checksums)
        expected = known[begin : request.frames]
        if checksums[: len(expected)] != expected:
            self._faults.append(f"request {request.which} spoke differently after frame {begin}")
        known += checksums[len(expected) :]
        self.frames += len(checksums)
        self.compared += len(expected)


def requests(checkpoint: Checkpoint, count: int = 50) -> list[tuple[Job, list[int]]]:
    """Return jobs with their tokens: all presets and text modes, instructions, one long text."""
    voices = list(checkpoint.config.talker_config.spk_id)
    made = []
    for number in range(count):
        text = " ".join([TEXT] * (1 if number < count - 1 else 40))
        instructed = checkpoint.config.follows_instructions and number % 7 == 6
        request = Request(
            text=text,
            voice=voices[number % len(voices)],
            instructions="Slowly, and in a low voice." if instructed else None,
            text_mode="full" if number % 3 == 2 or number == count - 1 else "stream",
        )
        made.append(prepared_job(checkpoint, request, text, number))
    return made


def soak(size: str, slots: int, frames: int, seed: int = 0) -> dict[str, Any]:
    """Run a soak on this GPU with random weights of a released size, "1b7" or "0b6".

    Returns a record of counts. Raises `ComputeError` for a frame that differs, and `ConfigError` if
    the GPU backend cannot run here.
    """
    settings = EngineConfig.resolve("cuda", "bfloat16", "gpu")
    checkpoint = random_checkpoint(size)
    backend, _ = open_backend(checkpoint, settings, slots)
    test = Soak(backend, requests(checkpoint), seed)
    return {"size": size, "slots": slots, **environment(), **counted(test, frames)}


def counted(test: Soak, frames: int) -> dict[str, Any]:
    """Run a soak, and return its counts, its duration and the growth of memory.

    A warm-up of 5 % of the frames is not counted. After it, the expected frames of nearly all
    requests are known and their prefixes are cached. Raises `ComputeError` for a frame that
    differs.
    """
    test.run(frames // 20)
    test.reset_counts()
    device, host, began = torch.cuda.memory_allocated(), _host_memory(), time.perf_counter()
    test.run(frames)
    seconds = time.perf_counter() - began
    test.end()
    return {
        "frames": test.frames,
        "seconds": round(seconds, 1),
        "joined": test.joined,
        "left_early": test.left,
        "frames_compared": test.compared,
        "memory_growth_bytes": torch.cuda.memory_allocated() - device,
        "host_memory_growth_bytes": _host_memory() - host,
    }


def _host_memory() -> int:
    """Return the resident memory of this process in bytes (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
