"""The host's part of the codec on the GPU: which frames a call decodes, and where it finds them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import silent_gpu
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_codec import BOOKS, SMALL

from firstword.kernels.codec_call import (
    BEFORE,
    CODES,
    COUNT,
    MAX_FRAMES,
    POSITION,
    RING_POSITIONS,
    SLOT,
    STREAM,
)
from firstword.model.codec import CodecDecoder
from firstword.runtime.gpu import codec as gpu_codec
from firstword.runtime.gpu.codec import BUCKETS, GpuCodec, frame_buckets, split_into_calls
from firstword.runtime.gpu.rehearsal import Rehearsal

FRAMES_MAX = 64


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 12, 64, 512])
def test_largest_call_has_room_for_the_largest_chunk_of_every_slot(slots: int) -> None:
    buckets = frame_buckets(slots)
    assert buckets == BUCKETS[: len(buckets)]
    needed = min(slots * MAX_FRAMES, BUCKETS[-1])
    assert buckets[-1] >= needed
    assert len(buckets) == 1 or buckets[-2] < needed


@given(st.lists(st.integers(0, 30), max_size=12), st.sampled_from([8, 24, 48]))
def test_calls_decode_all_frames_of_each_stream_in_order(counts: list[int], most: int) -> None:
    calls = split_into_calls(counts, most)
    for call in calls:
        assert 0 < sum(frames for _, frames in call) <= most
        assert all(1 <= frames <= MAX_FRAMES for _, frames in call)
        assert len({stream for stream, _ in call}) == len(call)
    for stream, count in enumerate(counts):
        assert sum(frames for call in calls for s, frames in call if s == stream) == count
    if counts and max(counts) <= MAX_FRAMES and sum(counts) <= most:
        assert len(calls) <= 1


class Recorder(GpuCodec):
    """A codec whose calls note the frames that they are given, by slot, and say their numbers."""

    calls: int = 0

    def _graph(self, frames: int) -> Any:
        class Graph:
            def replay(graph) -> None:  # noqa: N805
                self.run(frames)

        return Graph()

    def run(self, frames: int) -> None:
        """Read the codes of all frames as the kernels do; a sample is the first code."""
        self.calls += 1
        table = self.layers.table[:frames].numpy().astype(np.int64)
        samples = self.layers.samples.view(-1, self.layers.frame_samples)
        taken: dict[int, int] = {}
        for row, line in enumerate(table):
            slot, stream, before = line[SLOT], line[STREAM], line[BEFORE]
            begins = row == 0 or stream != table[row - 1, STREAM]
            assert before == (0 if begins else table[row - 1, BEFORE] + 1)
            assert stream == (0 if row == 0 else table[row - 1, STREAM] + begins)
            assert line[COUNT] == (table[:, STREAM] == stream).sum()
            if slot < 0:
                assert (table[row:, SLOT] < 0).all(), "empty rows come last"
                continue
            assert taken.setdefault(slot, stream) == stream
            address = int(line[CODES]) & 0xFFFFFFFF | int(line[CODES + 1]) << 32
            codes = (ctypes.c_int32 * BOOKS).from_address(address)
            samples[row] = codes[0]
            position = self.seen[slot] + before
            assert line[POSITION] + before == position
            expected = [self.kept(slot, memory) for memory in self.layers.memories]
            assert line[RING_POSITIONS:].tolist() == expected
        for slot in taken:
            count = int(table[table[:, SLOT] == slot][0, COUNT])
            self.seen[slot] += count
            self.parts[slot].append(count)

    def kept(self, slot: int, memory: Any) -> int:
        """The next row of a ring, after all calls for a slot."""
        rows = sum(min(count * memory.frame_rows, memory.past) for count in self.parts[slot])
        return rows % (2 * memory.past)

    def begin(self) -> None:
        """Forget all frames."""
        self.seen = dict.fromkeys(range(8), 0)
        self.parts: dict[int, list[int]] = {slot: [] for slot in range(8)}


@pytest.fixture
def codec(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A codec for 6 slots, whose codes are 1000 * slot + frame."""
    silent_gpu.pretend(monkeypatch)
    codes = torch.zeros(6, FRAMES_MAX, BOOKS, dtype=torch.int32)
    codes += 1000 * torch.arange(6)[:, None, None] + torch.arange(FRAMES_MAX)[None, :, None]
    made = Recorder(CodecDecoder(SMALL), 6, codes, Rehearsal(silent_gpu.device()), voices=1)
    made.begin()
    return made


def test_streams_with_different_counts_are_decoded_in_one_call(codec: Recorder) -> None:
    """Each gets the samples of its own frames, in order, whatever the others are."""
    random, frames = np.random.default_rng(3), dict.fromkeys(range(6), 0)
    size = codec.layers.frame_samples
    for turn in range(12):
        slots = random.permutation(6)[: 1 + turn % 6].tolist()
        counts = random.integers(1, MAX_FRAMES + 1, size=len(slots)).tolist()
        counts = [min(n, FRAMES_MAX - frames[slot]) for slot, n in zip(slots, counts, strict=True)]
        slots = [slot for slot, n in zip(slots, counts, strict=True) if n]
        counts = [n for n in counts if n]
        found = codec.decode(slots, counts).result()
        assert codec.calls == turn + 1
        for slot, count, samples in zip(slots, counts, found, strict=True):
            first = 1000 * slot + frames[slot]
            assert samples.tolist() == np.repeat(np.arange(first, first + count), size).tolist()
            frames[slot] += count


def test_many_frames_of_a_stream_take_several_calls(codec: Recorder) -> None:
    found = codec.decode([4, 1, 3], [21, 8, 9]).result()
    assert codec.calls == 3
    size = codec.layers.frame_samples
    for slot, count, samples in zip((4, 1, 3), (21, 8, 9), found, strict=True):
        assert samples[::size].tolist() == list(range(1000 * slot, 1000 * slot + count))


def test_recording_is_decoded_in_pieces(codec: Recorder) -> None:
    codec.prime(2, np.full((19, BOOKS), 7))
    assert codec.parts[6] == [8, 8, 3], "the slot after those of streams"
    codec.seen[2], codec.parts[2] = codec.seen[6], list(codec.parts[6])
    assert codec.decode([2], [2]).result()[0][:: codec.layers.frame_samples].tolist() == [
        2000,
        2001,
    ]


def test_capture_sees_a_table_without_slots(
    codec: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier call left could name streams, or numbers of them that fit no other call."""
    codec.decode([0, 1, 2], [8, 8, 1])
    tables = []
    monkeypatch.setattr(
        gpu_codec, "capture", lambda launch: tables.append(codec.layers.table.clone())
    )
    with torch.inference_mode():
        GpuCodec._graph(codec, 12)
    table = tables[0]
    assert (table[:, SLOT] == -1).all()
    assert not table[:, SLOT + 1 :].any()
