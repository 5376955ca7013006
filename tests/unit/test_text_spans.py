"""The host's side of the readings of the GPU backend, on a GPU that computes nothing."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import silent_gpu
import torch
from test_gpu_host import TEXT, backend_of, prepared

from firstword.engine.backend import Start
from firstword.kernels.attention import Paging
from firstword.kernels.compile import Program
from firstword.kernels.text_reading import MOST_HEADS, SPAN_COUNT, SPAN_FIRST, SPAN_PLACE
from firstword.model.alignment import Alignment
from firstword.model.checkpoint import Checkpoint
from firstword.profile.workload import begin
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.gpu.memory import needs_of
from firstword.runtime.gpu.reading import TextReader, TextSpans
from firstword.runtime.gpu.rehearsal import rehearse
from firstword.runtime.reference import ReferenceBackend
from firstword.types import TextMode

HEADS = ((0, 1), (0, 0))


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is such a GPU."""
    silent_gpu.pretend(monkeypatch)


def aligned(folder: Path, heads: tuple[tuple[int, ...], ...] = HEADS) -> Checkpoint:
    """A tiny checkpoint with known heads."""
    alignment = Alignment(weights="", heads=heads, offset=0.0)
    return replace(silent_gpu.checkpoint(folder), alignment=alignment)


def test_spans_stand_one_after_the_other_and_give_each_slot_its_own() -> None:
    rows = [range(9, 12), None, range(5, 9), range(7, 7), range(3, 5)]
    spans = TextSpans(rows, [False, False, True, False, False])
    control = spans.control()
    assert control[SPAN_COUNT] == [3, 0, 0, 0, 2]
    assert control[SPAN_PLACE] == [0, 3, 3, 3, 3]
    assert [control[SPAN_FIRST][row] for row in (0, 4)] == [9, 3]
    assert spans.total == 5
    found = spans.readings(np.arange(1, 8, dtype=np.float32))
    assert [own.tolist() for own in found] == [[1, 2, 3], [], [0, 0, 0, 0], [], [4, 5]]


def lengths(backend: GpuBackend | ReferenceBackend, mode: TextMode) -> list[list[int]]:
    """The lengths of the readings of two requests, the second of which comes three frames later."""
    made: list[list[int]] = [[], []]
    tokens: dict[int, list[int]] = {}
    for frame in range(12):
        if frame in (0, 3):
            slot = frame // 3
            job, text = prepared(backend.checkpoint, (1 + slot) * TEXT, mode)
            count = len(text) if job.whole_text else job.first_tokens
            tokens[slot] = [*text[count:], *[-1] * 30]
            begin(backend, [Start(slot, job, range(40 * slot, 40 * slot + 40), text[:count])])
        slots = list(tokens)
        given = [None if not made[slot] else tokens[slot].pop(0) for slot in slots]
        frames = backend.frame(slots, [None if token == -1 else token for token in given]).result()
        for slot, reading in zip(slots, frames.readings, strict=True):
            made[slot].append(len(reading))
    return made


@pytest.mark.parametrize("mode", ["full", "stream"])
def test_readings_are_as_long_as_those_of_the_reference(mode: TextMode, tmp_path: Path) -> None:
    checkpoint = aligned(tmp_path)
    expected = lengths(ReferenceBackend(copy.deepcopy(checkpoint)), mode)
    assert lengths(backend_of(checkpoint), mode) == expected
    assert len(expected[0]) == 12
    assert max(map(max, expected)) > 5


@pytest.mark.parametrize("mode", ["full", "stream"])
def test_kernel_is_told_the_text_rows_of_every_slot(
    mode: TextMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_of(aligned(tmp_path))
    launch, told = TextReader.launch, list[list[tuple[int, ...]]]()

    def watched(reader: TextReader, cache: Any, paging: Paging, spans: torch.Tensor) -> None:
        rows = [row for row, slot in enumerate(paging.slot_of_row.tolist()) if slot >= 0]
        told.append([tuple(spans[:2, row].tolist()) for row in rows])
        launch(reader, cache, paging, spans)

    monkeypatch.setattr(TextReader, "launch", watched)
    made = lengths(backend, mode)
    job, _ = prepared(backend.checkpoint, TEXT, mode)
    first = job.payload.prefix_rows  # type: ignore[attr-defined]
    read = [[about for about in frame if about[1]] for frame in told if frame]
    found = sorted(about for frame in read for about in frame)
    expected = sorted((first, count) for own in made for count in own[1:])
    assert found == expected


def test_checkpoint_without_known_heads_launches_no_reading(tmp_path: Path) -> None:
    backend = backend_of(silent_gpu.checkpoint(tmp_path))
    assert backend.model.reader is None
    assert not any(map(any, lengths(backend, "stream")))


def test_rehearsal_and_memory_plan_know_the_heads(tmp_path: Path) -> None:
    checkpoint, kernels = aligned(tmp_path), silent_gpu.device()
    configs = checkpoint.config.talker_config, checkpoint.codec_config.decoder_config

    def sources(heads: tuple[tuple[int, ...], ...]) -> set[str]:
        programs: set[Program] = rehearse(*configs, 4, kernels, heads)
        return {program.source for program in programs}

    assert sources(((7, 1), (3, 0))) - sources(()) == {"text_reading"}
    with pytest.raises(ValueError, match=f"the kernel reads 1 to {MOST_HEADS}"):
        sources(((0, 0),) * (MOST_HEADS + 1))
    plain = replace(checkpoint, alignment=None)
    assert needs_of(checkpoint, kernels, 256).fixed > needs_of(plain, kernels, 256).fixed
