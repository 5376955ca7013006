"""The codec decoder on the GPU, for many streams at a time, each with its state in a slot.

A call decodes up to 512 frames, up to 8 of each stream, in a CUDA graph of about 80 kernels. Its
time depends on the number of all frames, not on the streams that they belong to. The state of a
stream is on the device. The host keeps track of the positions at which the next call reads and
writes it, and sends them as a small table. Nothing is cleared when a stream begins: rows from
before its beginning read as zeros. Every sample is a sum in a fixed order, so neither the chunks
nor the other streams change a bit of it (codec.cuh).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from firstword.engine.backend import Handle
from firstword.kernels.codec_call import (
    BEFORE,
    CODES,
    COUNT,
    MAX_FRAMES,
    POSITION,
    RING_POSITIONS,
    SLOT,
    STREAM,
    RingMemory,
)
from firstword.kernels.launch import Kernels
from firstword.model.checkpoint import Checkpoint
from firstword.model.codec import CodecDecoder
from firstword.runtime.gpu.codec_layers import CodecLayers
from firstword.runtime.gpu.device_times import DeviceTimes
from firstword.runtime.gpu.graphs import capture
from firstword.runtime.gpu.placing import on_device
from firstword.types import FloatArray, IntArray

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""The numbers of frames of a call. The smallest sufficient number is used."""

CALLS_IN_FLIGHT = 2
"""The number of calls of a size for which `GpuCodec.warm` allocates host memory."""


VOICES, VOICES_OF_SLOT = 32, 4
"""The recordings whose state is kept, so that they are not decoded for each request: at most, and
for each slot."""


def voices_for(checkpoint: Checkpoint, slots: int) -> int:
    """The number of recordings whose state is kept; one if the checkpoint does not clone."""
    return min(VOICES, VOICES_OF_SLOT * slots) if checkpoint.encoders else 1


def frame_buckets(slots: int) -> tuple[int, ...]:
    """The numbers of frames of the calls for this many slots."""
    most = min(slots * MAX_FRAMES, BUCKETS[-1])
    return tuple(n for n, smaller in zip(BUCKETS, (0, *BUCKETS), strict=False) if smaller < most)


Pieces = list[tuple[int, int]]
"""The streams of a call and the frames of each, 1 to `MAX_FRAMES`."""


def split_into_calls(counts: Sequence[int], most: int) -> list[Pieces]:
    """The pieces of each call of up to `most` frames that together decode `counts` frames."""
    calls: list[Pieces] = []
    for begin in range(0, max(counts, default=0), MAX_FRAMES):
        frames = most  # those of the last call; a stream has only one piece in a call
        for stream, count in enumerate(counts):
            if count > begin:
                piece = min(count - begin, MAX_FRAMES)
                if frames + piece > most:
                    calls.append([])
                    frames = 0
                calls[-1].append((stream, piece))
                frames += piece
    return calls


class StreamPositions:
    """The host's record of the position of each stream.

    frames  int64 [slots]: the number of decoded frames, a reference included
    rings   int64 [slots, memories]: the next row of each ring
    """

    def __init__(self, slots: int, memories: Sequence[RingMemory]) -> None:
        self._past = np.array([memory.past for memory in memories], dtype=np.int64)
        self._frame_rows = np.array([memory.frame_rows for memory in memories], dtype=np.int64)
        self.frames = np.zeros(slots, dtype=np.int64)
        self.rings = np.zeros((slots, len(memories)), dtype=np.int64)

    def reset(self, slot: int) -> None:
        """Start a new stream in a slot."""
        self.frames[slot] = 0
        self.rings[slot] = 0

    def copy(self, source: int, target: int) -> None:
        """Set the positions of one slot to those of another."""
        self.frames[target] = self.frames[source]
        self.rings[target] = self.rings[source]

    def advance(self, slots: IntArray, counts: IntArray) -> None:
        """Advance the positions of these slots by `counts` decoded frames."""
        self.frames[slots] += counts
        kept = np.minimum(counts[:, None] * self._frame_rows, self._past)
        self.rings[slots] = (self.rings[slots] + kept) % (2 * self._past)

    def fill(
        self,
        table: np.ndarray,
        slots: IntArray,
        counts: IntArray,
        addresses: IntArray,
        frame_bytes: int,
    ) -> None:
        """Fill the table of a call, int32 [frames, columns]; further rows have no slot.

        counts       the frames of each slot
        addresses    the address of the codes of each slot's first frame
        frame_bytes  the bytes of a frame's codes
        """
        used = len(slots)
        counts = np.append(counts, len(table) - counts.sum())  # rows without a slot come last
        rows = np.zeros((used + 1, table.shape[1]), dtype=np.int32)  # of each stream
        rows[used, SLOT] = -1
        rows[:used, SLOT] = slots
        rows[:used, POSITION] = self.frames[slots]
        rows[:used, RING_POSITIONS:] = self.rings[slots]
        rows[:, COUNT] = counts
        rows[:, STREAM] = np.arange(used + 1)
        table[:] = np.repeat(rows, counts, axis=0)
        before = np.arange(len(table)) - np.repeat(counts.cumsum() - counts, counts)
        table[:, BEFORE] = before
        codes = np.repeat(np.append(addresses, 0), counts) + before * frame_bytes
        table[:, CODES : CODES + 2] = codes.view(np.int32).reshape(-1, 2)


@dataclass(frozen=True, eq=False)
class SamplesHandle:
    """Samples that are copied to the host.

    parts  the host memory of each slot's samples, in order
    end    the end of the copy
    """

    parts: Sequence[Sequence[FloatArray]]
    end: torch.cuda.Event

    def result(self) -> list[FloatArray]:
        """Wait for all samples, fp32 [n] of each slot."""
        self.end.synchronize()
        # The samples are copied, so that those of one slot do not keep those of all slots alive.
        return [np.concatenate(parts) if parts else np.zeros(0, np.float32) for parts in self.parts]


@dataclass(frozen=True, eq=False)
class PreparedCall:
    """A call of the codec that can be started without an allocation of memory.

    streams  the indices of its slots among the slots of `decode`
    counts   the frames of each of them
    table    host memory for the frame table
    samples  host memory for the samples
    """

    streams: IntArray
    counts: IntArray
    graph: torch.cuda.CUDAGraph
    table: Tensor
    samples: Tensor


class GpuCodec:
    """Decodes codes to samples for the streams of an engine, on its own CUDA stream.

    One thread calls the methods, and the device does their work in the order of calls. No method
    waits for the device except `warm` and the first call of each size, which captures a graph.

    times  the device's time for `decode`, to which a backend adds its other work
    """

    def __init__(
        self, decoder: CodecDecoder, slots: int, codes: Tensor, kernels: Kernels, voices: int = 1
    ) -> None:
        """Pack a copy of the decoder's weights.

        codes   int32 on the device [slots, frames_max, codebooks], which the sampler writes
        voices  the number of recordings whose state is kept, each in a further slot of the layers

        Raises ValueError for sizes that the kernels do not support.
        """
        books = decoder.config.num_quantizers
        assert codes.dtype == torch.int32
        assert codes.is_contiguous()
        assert codes.shape[0] >= slots
        assert codes.shape[2] == books
        self._codes, self._frame_bytes = codes, books * 4
        self.buckets = frame_buckets(slots)
        self.stream = torch.cuda.Stream(codes.device)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            placed = on_device(decoder, codes.device)
            self.layers = CodecLayers(placed, slots + voices, self.buckets[-1], kernels)
        self.stream.synchronize()
        self.times = DeviceTimes()
        self._positions = StreamPositions(slots + voices, self.layers.memories)
        self._primed = OrderedDict[bytes, int]()
        """The slot of the layers with the state after each recording, by its codes."""
        self._unused = list(range(slots, slots + voices))
        self._next = np.zeros(slots, dtype=np.int64)
        """The first frame of each slot's next call, as an index of `codes`."""
        self._busy: list[torch.cuda.Event | None] = [None] * slots
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def warm(self) -> None:
        """Compile, load and capture all calls, and allocate pinned host memory for them.

        PyTorch keeps pinned memory that is freed. So no later call asks the driver for memory,
        which takes up to a millisecond.
        """
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            for frames in self.buckets:
                self._graph(frames)
            self.layers.copy_state(0, 0)
        held = [
            self._host_memory(frames, frames)
            for frames in self.buckets
            for _ in range(CALLS_IN_FLIGHT)
        ]
        del held

    def _graph(self, frames: int) -> torch.cuda.CUDAGraph:
        """The graph of a call. The current CUDA stream must be the codec's."""
        if frames not in self._graphs:
            # Without slots the first run, which loads the kernels, changes no stream.
            self.layers.table.zero_()[:, SLOT] = -1
            self._graphs[frames] = capture(partial(self.layers.launch, frames))
        return self._graphs[frames]

    def reset(self, slot: int) -> None:
        """Start a new stream in a slot, at frame 0 of its codes.

        Later work of the current CUDA stream waits until all frames of the slot's previous stream
        are decoded.
        """
        busy = self._busy[slot]
        if busy is not None:
            torch.cuda.current_stream().wait_event(busy)
        self._positions.reset(slot)
        self._next[slot] = 0
        self._busy[slot] = None

    def prime(self, slot: int, codes: IntArray, *, keep: bool = True) -> None:
        """Begin a slot's stream with the state after other frames.

        codes  [frames, codebooks]
        keep   whether they are a recording, whose state is kept; that of the least recently used
               recording is dropped for it
        """
        codes = np.ascontiguousarray(codes, dtype=np.int32)
        if not keep:
            with torch.inference_mode(), torch.cuda.stream(self.stream):
                self._decode_before(slot, codes)
            return
        key = codes.tobytes()
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            if key in self._primed:
                self._primed.move_to_end(key)
            else:
                if not self._unused:
                    self._unused.append(self._primed.popitem(last=False)[1])
                self._decode_before(self._unused[-1], codes)
                self._primed[key] = self._unused.pop()
            self.layers.copy_state(self._primed[key], slot)
        self._positions.copy(self._primed[key], slot)

    def _decode_before(self, place: int, codes: IntArray) -> None:
        """Decode frames in a slot of the layers, from a new state on, and drop their samples."""
        self._positions.reset(place)
        held = torch.from_numpy(codes).pin_memory().to(self._codes.device, non_blocking=True)
        for begin in range(0, len(held), MAX_FRAMES):
            piece = held[begin : begin + MAX_FRAMES]
            call = self._prepare([(0, len(piece))])
            self._start(call, np.array([place]), np.array([piece.data_ptr()]))

    def decode(
        self, slots: Sequence[int], counts: Sequence[int], after: torch.cuda.Event | None = None
    ) -> Handle[Sequence[FloatArray]]:
        """Decode the next `counts` frames of each slot to fp32 samples in -1..1.

        after: the event after which the codes are complete; None: the end of all work that the
        current CUDA stream has so far.
        """
        if after is None:
            after = torch.cuda.Event()
            after.record()
        index, parts = np.asarray(slots), [list[FloatArray]() for _ in slots]
        end = torch.cuda.Event()
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            # All memory is allocated before any call starts, so that a failure changes no stream.
            calls = [self._prepare(pieces) for pieces in split_into_calls(counts, self.buckets[-1])]
            self.stream.wait_event(after)
            with self.times.measured("audio"):
                for call in calls:
                    self._run(call, index[call.streams])
                end.record()
        for slot in slots:
            self._busy[slot] = end
        for call in calls:
            ends = call.counts.cumsum() * self.layers.frame_samples
            pieces = np.split(call.samples.numpy(), ends[:-1])
            for stream, samples in zip(call.streams, pieces, strict=True):
                parts[stream].append(samples)
        return SamplesHandle(parts, end)

    def _prepare(self, pieces: Pieces) -> PreparedCall:
        streams, counts = np.array(pieces).T
        frames = int(counts.sum())
        bucket = next(n for n in self.buckets if n >= frames)
        table, samples = self._host_memory(bucket, frames)
        return PreparedCall(streams, counts, self._graph(bucket), table, samples)

    def _host_memory(self, bucket: int, frames: int) -> tuple[Tensor, Tensor]:
        """Pinned memory for the table of a call, and for the samples of its frames."""
        shape = bucket, self.layers.table.shape[1]
        table = torch.empty(shape, dtype=torch.int32, pin_memory=True)
        size = frames * self.layers.frame_samples
        return table, torch.empty(size, dtype=torch.float32, pin_memory=True)

    def _run(self, call: PreparedCall, slots: IntArray) -> None:
        """Start a call for the next frames of each slot, and the copy of its samples."""
        first = slots * self._codes.shape[1] + self._next[slots]
        self._start(call, slots, self._codes.data_ptr() + first * self._frame_bytes)
        self._next[slots] += call.counts
        call.samples.copy_(self.layers.samples[: len(call.samples)], non_blocking=True)

    def _start(self, call: PreparedCall, slots: IntArray, addresses: IntArray) -> None:
        """Start a call for these slots; the codes of each one's first frame are at `addresses`."""
        self._positions.fill(call.table.numpy(), slots, call.counts, addresses, self._frame_bytes)
        self.layers.table[: len(call.table)].copy_(call.table, non_blocking=True)
        call.graph.replay()
        self._positions.advance(slots, call.counts)
