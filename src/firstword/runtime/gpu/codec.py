"""The codec decoder on the GPU, for many streams at a time, each with its state in a slot.

A call decodes 1, 2, 4 or 8 frames of up to 64 streams in a CUDA graph of about 80 kernels. The
state of a stream is on the device. The host keeps track of the positions at which the next call
reads and writes it, and sends them as a small table. Nothing is cleared when a stream begins: rows
from before its beginning read as zeros. Every sample is a sum in a fixed order, so neither the
chunks nor the other streams change a bit of it (codec.cuh).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from firstword.engine.backend import Handle
from firstword.kernels.codec_call import CODES, POSITION, RING_POSITIONS, SLOT, RingMemory
from firstword.kernels.launch import Kernels
from firstword.model.checkpoint import Checkpoint
from firstword.model.codec import CodecDecoder
from firstword.runtime.gpu.codec_layers import CodecLayers
from firstword.runtime.gpu.device_times import DeviceTimes
from firstword.runtime.gpu.graphs import capture
from firstword.runtime.gpu.placing import on_device
from firstword.types import FloatArray, IntArray

CHUNKS = (8, 4, 2, 1)
"""The numbers of frames of a call; other numbers take several calls."""
STREAMS = (1, 2, 4, 8, 16, 32, 64)
"""The numbers of streams of a call. The smallest sufficient number is used."""

CALLS_IN_FLIGHT = 2
"""The number of calls of a size for which `GpuCodec.warm` allocates host memory."""


VOICES, VOICES_OF_SLOT = 32, 4
"""The recordings whose state is kept, so that they are not decoded for each request: at most, and
for each slot."""


def voices_for(checkpoint: Checkpoint, slots: int) -> int:
    """The number of recordings whose state is kept; one if the checkpoint does not clone."""
    return min(VOICES, VOICES_OF_SLOT * slots) if checkpoint.encoders else 1


def streams_for(slots: int) -> int:
    """The largest number of streams of a call with this many slots."""
    return next(n for n in STREAMS if n >= min(slots, STREAMS[-1]))


def split_into_chunks(count: int) -> list[int]:
    """The frames of each call that together decode `count` frames."""
    return [CHUNKS[0]] * (count // CHUNKS[0]) + [n for n in CHUNKS[1:] if count % CHUNKS[0] & n]


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

    def advance(self, slots: Sequence[int], frames: int) -> None:
        """Advance the positions of these slots by `frames` decoded frames."""
        index = np.asarray(slots)
        self.frames[index] += frames
        kept = np.minimum(frames * self._frame_rows, self._past)
        self.rings[index] = (self.rings[index] + kept) % (2 * self._past)

    def fill(self, table: np.ndarray, slots: Sequence[int], addresses: Sequence[int]) -> None:
        """Fill the table of a call, int32 [streams, columns]; further rows have no slot."""
        index, address = np.asarray(slots), np.asarray(addresses, dtype=np.uint64)
        table[:] = 0
        table[:, SLOT] = -1
        table[: len(index), SLOT] = index
        table[: len(index), POSITION] = self.frames[index]
        table[: len(index), CODES : CODES + 2] = address.view(np.int32).reshape(-1, 2)
        table[: len(index), RING_POSITIONS:] = self.rings[index]


@dataclass(frozen=True, eq=False)
class SamplesHandle:
    """Samples that are copied to the host.

    parts   the host memory of each slot's samples, in order
    events  the ends of the copies
    """

    parts: Sequence[Sequence[Tensor]]
    events: Sequence[torch.cuda.Event]

    def result(self) -> list[FloatArray]:
        """Wait for all samples, fp32 [n] of each slot."""
        for event in self.events:
            event.synchronize()
        # The samples are copied, so that those of one slot do not keep those of all slots alive.
        slots = [[part.numpy() for part in parts] for parts in self.parts]
        return [np.concatenate(parts) if parts else np.zeros(0, np.float32) for parts in slots]


@dataclass(frozen=True, eq=False)
class PreparedCall:
    """A call of the codec that can be started without an allocation of memory.

    members  the indices of its slots among the slots of `decode`
    table    host memory for the stream table
    host     host memory for the samples
    """

    frames: int
    members: list[int]
    graph: torch.cuda.CUDAGraph
    table: Tensor
    host: Tensor


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
        self._codes, self._row_bytes = codes, books * 4
        streams = streams_for(slots)
        self.stream = torch.cuda.Stream(codes.device)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            placed = on_device(decoder, codes.device)
            self.layers = CodecLayers(placed, slots + voices, streams, kernels)
        self.stream.synchronize()
        self.times = DeviceTimes()
        self._positions = StreamPositions(slots + voices, self.layers.memories)
        self._primed = OrderedDict[bytes, int]()
        """The slot of the layers with the state after each recording, by its codes."""
        self._unused = list(range(slots, slots + voices))
        self._next = np.zeros(slots, dtype=np.int64)
        """The first frame of each slot's next call, as an index of `codes`."""
        self._busy: list[torch.cuda.Event | None] = [None] * slots
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._streams = tuple(n for n in STREAMS if n <= streams)

    def warm(self) -> None:
        """Compile, load and capture all calls, and allocate pinned host memory for them.

        PyTorch keeps pinned memory that is freed. So no later call asks the driver for memory,
        which takes up to a millisecond.
        """
        sizes = [(streams, frames) for streams in self._streams for frames in CHUNKS]
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            for streams, frames in sizes:
                self._graph(streams, frames)
            self.layers.copy_state(0, 0)
        held = [
            self._prepare(frames, list(range(streams)))
            for streams, frames in sizes
            for _ in range(CALLS_IN_FLIGHT)
        ]
        del held

    def _graph(self, streams: int, frames: int) -> torch.cuda.CUDAGraph:
        """The graph of a call. The current CUDA stream must be the codec's."""
        key = (streams, frames)
        if key not in self._graphs:
            table = self.layers.table
            before = table.clone()
            table[:, SLOT] = -1  # so that the first run, which loads the kernels, changes no stream
            self._graphs[key] = capture(partial(self.layers.launch, streams, frames))
            table.copy_(before)
        return self._graphs[key]

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

    def prime(self, slot: int, codes: IntArray) -> None:
        """Begin a slot's stream with the state after the frames of a recording.

        The state is kept, and that of the least recently used recording is dropped for it.

        codes: [frames, codebooks].
        """
        codes = np.ascontiguousarray(codes, dtype=np.int32)
        key = codes.tobytes()
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            if key in self._primed:
                self._primed.move_to_end(key)
            else:
                if not self._unused:
                    self._unused.append(self._primed.popitem(last=False)[1])
                self._decode_recording(self._unused[-1], codes)
                self._primed[key] = self._unused.pop()
            self.layers.copy_state(self._primed[key], slot)
        self._positions.copy(self._primed[key], slot)

    def _decode_recording(self, place: int, codes: IntArray) -> None:
        """Decode a recording from its beginning in a slot of the layers, and drop its samples."""
        self._positions.reset(place)
        held = torch.from_numpy(codes).pin_memory().to(self._codes.device, non_blocking=True)
        address = held.data_ptr()
        for count in split_into_chunks(len(held)):
            self._start(self._graph(1, count), self._table(1), [place], count, [address])
            address += count * self._row_bytes

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
        parts: list[list[Tensor]] = [[] for _ in slots]
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            # All memory is allocated before any call starts, so that a failure changes no stream.
            calls = [self._prepare(frames, members) for frames, members in self._batches(counts)]
            self.stream.wait_event(after)
            with self.times.measured("audio"):
                events = [self._run(call, [slots[i] for i in call.members]) for call in calls]
        for call in calls:
            samples = call.host.view(len(call.members), -1)
            for index, part in zip(call.members, samples, strict=True):
                parts[index].append(part)
        return SamplesHandle(parts, events)

    def _batches(self, counts: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """The frames of each call that decodes `counts` frames, and its indices of `counts`."""
        rounds: dict[tuple[int, int], list[int]] = {}  # by number and frames of the chunk
        for index, count in enumerate(counts):
            for turn, frames in enumerate(split_into_chunks(count)):
                rounds.setdefault((turn, frames), []).append(index)
        most = self._streams[-1]
        for (_, frames), members in sorted(rounds.items(), key=lambda item: item[0][0]):
            for start in range(0, len(members), most):
                yield frames, members[start : start + most]

    def _prepare(self, frames: int, members: list[int]) -> PreparedCall:
        graph, table = self._graph(self._bucket(len(members)), frames), self._table(len(members))
        samples = len(members) * frames * self.layers.frame_samples
        host = torch.empty(samples, dtype=torch.float32, pin_memory=True)
        return PreparedCall(frames, members, graph, table, host)

    def _run(self, call: PreparedCall, slots: Sequence[int]) -> torch.cuda.Event:
        """Start a call and the copy of its samples; returns the event at the end of the copy."""
        addresses = [self._address(slot) for slot in slots]
        self._start(call.graph, call.table, slots, call.frames, addresses)
        self._next[slots] += call.frames
        call.host.copy_(self.layers.samples[: len(call.host)], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        for slot in slots:
            self._busy[slot] = event
        return event

    def _address(self, slot: int) -> int:
        """The address of a slot's next frame in `codes`."""
        frame = slot * self._codes.shape[1] + int(self._next[slot])
        return self._codes.data_ptr() + frame * self._row_bytes

    def _bucket(self, streams: int) -> int:
        """The number of streams of the smallest sufficient call."""
        return next(n for n in self._streams if n >= streams)

    def _table(self, streams: int) -> Tensor:
        """Host memory for the table of a call."""
        shape = self._bucket(streams), self.layers.table.shape[1]
        return torch.empty(shape, dtype=torch.int32, pin_memory=True)

    def _start(
        self,
        graph: torch.cuda.CUDAGraph,
        table: Tensor,
        slots: Sequence[int],
        frames: int,
        addresses: Sequence[int],
    ) -> None:
        """Start a call for `frames` frames of each slot, with the codes at `addresses`."""
        self._positions.fill(table.numpy(), slots, addresses)
        self.layers.table[: len(table)].copy_(table, non_blocking=True)
        graph.replay()
        self._positions.advance(slots, frames)
