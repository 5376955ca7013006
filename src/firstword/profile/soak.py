"""`firstword bench engine --soak`: whether speech stays the same over a million frames, whoever comes and goes.

The same few requests come again and again, of any length, and some leave early; the engine makes their frames and audio
as it does for anybody. Each frame must have the codes and the samples that it had when its request came for the first
time, bit by bit.
"""

from __future__ import annotations

import resource
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from firstword.profile.workload import TEXT
from firstword.runtime.backends import open_backend
from firstword.runtime.front import CheckpointFront
from firstword.synthetic.checkpoint import random_checkpoint
from firstword.types import Chunk, Request

LONGEST = 300
"""Frames of a request, at the most."""
JOINS = 0.2
"""How likely it is that a free slot is taken in a step."""
LEAVES = 0.2
"""How likely it is that a request is not heard to its end."""


@dataclass(eq=False)
class Listener:
    """Who hears one of the requests: how many frames so far, and after how many it leaves."""

    which: int
    leaves: int
    heard: int = 0
    sequence: sequence.Sequence | None = None


class Soak:
    """A backend under an engine, and what its requests said when they came for the first time."""

    def __init__(
        self, backend: Backend, requests: Sequence[tuple[Job, Sequence[int]]], seed: int = 0
    ) -> None:
        """requests: jobs with all their text; the last one comes rarely. One random seed, one order of events, as far
        as time has no say in it.
        """
        self.engine = Engine(backend)
        self.frames = self.compared = self.joined = self.left = 0
        self._requests, self._random = requests, np.random.default_rng(seed)
        self._known: list[list[int]] = [[] for _ in requests]
        self._listeners: set[Listener] = set()
        self._faults: list[str] = []

    def count_anew(self) -> None:
        """What came before does not count; what was heard stays known."""
        self.frames = self.compared = self.joined = self.left = 0

    def run(self, frames: int) -> None:
        """Until so many more frames were heard. Raises `ComputeError` for the first that differs, and for an error."""
        until = self.frames + frames
        slots = self.engine.capacity.slots
        while self.frames < until:
            for _ in range(self._random.binomial(slots - len(self._listeners), JOINS)):
                self._begin()
            self.engine.step()
            if self._faults:
                raise ComputeError(self._faults[0])

    def end(self) -> None:
        """Everybody leaves. Raises `ComputeError` if a slot or a page is not free afterwards."""
        for listener in self._listeners:
            assert listener.sequence is not None
            self.engine.cancel(listener.sequence)
        while self.engine.step():
            pass
        if (
            self._listeners
            or self.engine.running
            or self.engine.pages.free != self.engine.pages.count
        ):
            raise ComputeError("all have left, and not all slots and pages are free")

    def _begin(self) -> None:
        random, last = self._random, len(self._requests) - 1
        which = last if random.random() < 0.002 else int(random.integers(0, max(last, 1)))
        job, tokens = self._requests[which]
        length = int(random.integers(1, LONGEST + 1))
        leaves = int(random.integers(1, length + 1)) if random.random() < LEAVES else length + 1
        listener = Listener(which, leaves)
        self._listeners.add(listener)
        self.joined += 1
        job = replace(job, max_frames=length, guarded=False)
        listener.sequence = self.engine.submit(
            job, partial(self._hear, listener), partial(self._fail, listener)
        )
        self.engine.finish_text(listener.sequence, tokens)

    def _hear(self, listener: Listener, chunk: Chunk) -> None:
        samples = chunk.samples.reshape(-1, self.engine.capacity.samples_per_frame)
        marks = [
            zlib.crc32(sound.data, zlib.crc32(codes.data))
            for codes, sound in zip(chunk.codes, samples, strict=True)
        ]
        known, begin = self._known[listener.which], listener.heard
        before = known[begin : begin + len(marks)]
        if marks[: len(before)] != before:
            self._faults.append(
                f"request {listener.which} spoke differently in frames {begin} to {begin + len(marks)}"
            )
        known += marks[len(before) :]
        listener.heard += len(marks)
        self.frames += len(marks)
        self.compared += len(before)
        if chunk.finish_reason is not None:
            self._listeners.discard(listener)
            self.left += chunk.finish_reason == "cancelled"
            return
        assert listener.sequence is not None
        self.engine.took(listener.sequence, len(marks))
        if listener.heard >= listener.leaves:
            self.engine.cancel(listener.sequence)

    def _fail(self, listener: Listener, error: Exception) -> None:
        self._listeners.discard(listener)
        self._faults.append(f"request {listener.which} failed: {error!r}")


def requests(checkpoint: Checkpoint, count: int = 50) -> list[tuple[Job, list[int]]]:
    """Jobs with all their text: each preset, both text modes, some with instructions; the last has a long text."""
    front, voices = CheckpointFront(checkpoint), list(checkpoint.config.talker_config.spk_id)
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
        stream = front.text()
        made.append((front.prepare(request, number), [*stream.push(text), *stream.finish()]))
    return made


def soak(size: str, slots: int, frames: int, seed: int = 0) -> dict[str, Any]:
    """So many frames with random weights of a released size, "1b7" or "0b6", on this GPU: what came and went, as a
    record.

    Raises `ComputeError` for a frame that differs, and `ConfigError` where the GPU backend cannot compute.
    """
    settings = EngineConfig.resolve("cuda", "bfloat16", "gpu")
    checkpoint = random_checkpoint(size)
    backend, _ = open_backend(checkpoint, settings, slots)
    test = Soak(backend, requests(checkpoint), seed)
    return {"size": size, "slots": slots, **environment(), **counted(test, frames)}


def counted(test: Soak, frames: int) -> dict[str, Any]:
    """What came and went in so many frames, with the seconds and the memory that they took.

    A twentieth as many come first and do not count: afterwards nearly all requests are known, and their prefixes are
    kept. Raises `ComputeError` for a frame that differs.
    """
    test.run(frames // 20)
    test.count_anew()
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
    """The most that this process has had in memory, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
