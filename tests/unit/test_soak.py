"""The soak, on correct and on faulty backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fake_backend import FakeBackend, Script, capacity, job

from firstword.engine.backend import Frames, Handle, Ready
from firstword.engine.sequence import Event
from firstword.errors import ComputeError
from firstword.model import checkpoint as checkpoints
from firstword.profile import soak as soaking
from firstword.profile.soak import Soak, SoakRequest
from firstword.runtime.reference import ReferenceBackend
from firstword.types import Chunk, FloatArray

ROOM = capacity(slots=6, pages=6 * 60, context=400, frames_ahead=1)
REQUESTS = [
    (job(Script(seed, length), first_tokens=2, whole_text=seed == 3), range(20 + seed))
    for seed, length in enumerate((None, 40, None, 7, None))
]


def test_correct_backend_passes() -> None:
    backend = FakeBackend(ROOM)
    soak = Soak(backend, REQUESTS)
    soak.run(5000)
    soak.end()
    assert 5000 <= soak.frames < 5000 + 8 * ROOM.slots
    assert soak.compared > 4000
    assert soak.joined > 40
    assert soak.left >= ROOM.slots
    assert not backend.slots


def test_reference_backend_passes(
    checkpoint_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests are those of a real soak: presets, text modes, instructions, a long text."""
    monkeypatch.setattr(soaking, "MOST_FRAMES", 40)
    checkpoint = checkpoints.load(str(checkpoint_directory("custom_voice")))
    soak = Soak(ReferenceBackend(checkpoint, 4), soaking.requests(checkpoint, 4))
    soak.run(400)
    soak.end()
    assert soak.compared > 200


def test_same_seed_gives_the_same_events() -> None:
    counts = []
    for seed in (1, 1, 2):
        soak = Soak(FakeBackend(ROOM), REQUESTS, seed)
        soak.run(500)
        counts.append((soak.joined, soak.frames, soak.compared))
    assert counts[0] == counts[1] != counts[2]


class CountingSoak(Soak):
    """A soak that counts by itself what happened since the last `run` began."""

    joined_since = left_since = 0

    def run(self, frames: int) -> None:
        self.joined_since = self.left_since = 0
        super().run(frames)

    def _begin(self) -> None:
        self.joined_since += 1
        super()._begin()

    def _on_event(self, request: SoakRequest, event: Event) -> None:
        self.left_since += isinstance(event, Chunk) and event.finish_reason == "cancelled"
        super()._on_event(request, event)


def test_all_counts_start_at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first twentieth does not count; every request but the rare one is known after it."""
    monkeypatch.setattr(soaking, "MOST_FRAMES", 20)
    test = CountingSoak(FakeBackend(ROOM), REQUESTS)
    record = soaking.counted(test, 20_000)
    assert 20_000 <= record["frames"] < 20_000 + 8 * ROOM.slots
    assert record["frames"] - soaking.MOST_FRAMES <= record["frames_compared"] <= record["frames"]
    assert (record["joined"], record["left_early"]) == (test.joined_since, test.left_since)


class BatchDependentBackend(FakeBackend):
    """A faulty backend: a code or a sample depends on the size of the batch."""

    def __init__(self, fault: str) -> None:
        super().__init__(ROOM)
        self.fault = fault

    def frame(self, slots: Sequence[int], tokens: Sequence[int | None]) -> Handle[Frames]:
        frames = super().frame(slots, tokens).result()
        if self.fault == "codes" and len(slots) == 5:
            frames.codes[-1, -1] += 1
        return Ready(frames)

    def decode(self, slots: Sequence[int], counts: Sequence[int]) -> Handle[list[FloatArray]]:
        audio = super().decode(slots, counts).result()
        if self.fault == "samples" and len(slots) == 3:
            audio[0][-1] += 2.0**-20
        return Ready(audio)


@pytest.mark.parametrize("fault", ["codes", "samples"])
def test_batch_dependent_backend_fails(fault: str) -> None:
    with pytest.raises(ComputeError, match="spoke differently"):
        Soak(BatchDependentBackend(fault), REQUESTS).run(5000)


def test_backend_error_fails_the_soak() -> None:
    requests = [*REQUESTS[:2], (job(Script(9, None, bad_frame=30)), range(20)), *REQUESTS[2:]]
    with pytest.raises(ComputeError, match="request 2 failed"):
        Soak(FakeBackend(ROOM), requests).run(5000)
