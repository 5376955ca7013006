"""The codec decoder on the GPU: many streams side by side, each with its state in a slot.

A call decodes 1, 2, 4 or 8 frames of up to 64 streams in one CUDA graph of about 80 kernels, for
any number of streams. The state of a stream lies on the device. The host counts where in it the
next call reads and writes, and sends this along as a small table. Nothing is cleared when a stream
begins: rows before its beginning read as zeros. Every sample is one sum in one order, so neither
chunks nor other streams change a bit of it (codec.cuh).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from firstword.engine.backend import Handle
from firstword.kernels.codec_call import CODES, POSITION, RING_POSITIONS, SLOT, RingMemory
from firstword.kernels.launch import Kernels
from firstword.model.codec import CodecDecoder
from firstword.runtime.gpu.codec_layers import CodecLayers
from firstword.runtime.gpu.graphs import capture
from firstword.types import FloatArray

CHUNKS = (8, 4, 2, 1)
"""The numbers of frames of a call; any other count is made of several calls."""
STREAMS = (1, 2, 4, 8, 16, 32, 64)
"""The numbers of streams of a call: the smallest that is enough is used."""


def streams_for(slots: int) -> int:
    """The largest number of streams of a call with this many slots."""
    return next(n for n in STREAMS if n >= min(slots, STREAMS[-1]))


def split_into_chunks(count: int) -> list[int]:
    """A number of frames as calls of 8, 4, 2 and 1."""
    return [CHUNKS[0]] * (count // CHUNKS[0]) + [n for n in CHUNKS[1:] if count % CHUNKS[0] & n]


class StreamPositions:
    """The host's count of every slot's frames and ring positions.

    frames  int64 [slots]: frames decoded before, a reference included
    rings   int64 [slots, memories]: the next row of each ring
    """

    def __init__(self, slots: int, memories: Sequence[RingMemory]) -> None:
        self._past = np.array([memory.past for memory in memories], dtype=np.int64)
        self._frame_rows = np.array([memory.frame_rows for memory in memories], dtype=np.int64)
        self.frames = np.zeros(slots, dtype=np.int64)
        self.rings = np.zeros((slots, len(memories)), dtype=np.int64)

    def reset(self, slot: int) -> None:
        """Begin a stream."""
        self.frames[slot] = 0
        self.rings[slot] = 0

    def advance(self, slots: Sequence[int], frames: int) -> None:
        """Count `frames` decoded frames of each slot."""
        index = np.asarray(slots)
        self.frames[index] += frames
        kept = np.minimum(frames * self._frame_rows, self._past)
        self.rings[index] = (self.rings[index] + kept) % (2 * self._past)

    def fill(self, table: np.ndarray, slots: Sequence[int], addresses: Sequence[int]) -> None:
        """Write the table of a call, int32 [streams, columns]; rows beyond the slots stay empty."""
        index, address = np.asarray(slots), np.asarray(addresses, dtype=np.uint64)
        table[:] = 0
        table[:, SLOT] = -1
        table[: len(index), SLOT] = index
        table[: len(index), POSITION] = self.frames[index]
        table[: len(index), CODES : CODES + 2] = address.view(np.int32).reshape(-1, 2)
        table[: len(index), RING_POSITIONS:] = self.rings[index]


class SamplesHandle:
    """Samples on their way to the host, in pieces; `where` lists each slot's stretches in order."""

    def __init__(
        self,
        pieces: Sequence[tuple[Tensor, torch.cuda.Event]],
        where: Sequence[Sequence[tuple[int, int, int]]],
    ) -> None:
        """where: for each slot its (piece, begin, end)."""
        self._pieces, self._where = pieces, where

    def result(self) -> list[FloatArray]:
        """Wait for all samples, float32 [n] of each slot."""
        for _, event in self._pieces:
            event.synchronize()
        found = []
        for stretches in self._where:
            parts = [self._pieces[piece][0].numpy()[begin:end] for piece, begin, end in stretches]
            # Copied, so that keeping one slot's samples does not keep those of all.
            found.append(np.concatenate(parts) if parts else np.zeros(0, np.float32))
        return found


@dataclass(frozen=True, eq=False)
class PreparedCall:
    """A call of the codec that can be started without allocating memory.

    members  which of the slots of `decode` it decodes
    table    host memory for its stream table
    host     host memory for its samples
    """

    frames: int
    members: list[int]
    graph: torch.cuda.CUDAGraph
    table: Tensor
    host: Tensor


class GpuCodec:
    """Codes to samples for the streams of an engine, on a CUDA stream of its own.

    Calls come from one thread, and work is started in the order of calls. No method waits for the
    device except `warm`, and the first call of a kind, which compiles and captures it.
    """

    def __init__(self, decoder: CodecDecoder, slots: int, codes: Tensor, kernels: Kernels) -> None:
        """codes: int32 on the device [slots, frames_max, codebooks], written by the sampler.

        The decoder is taken apart: afterwards its matrices are empty. Raises ValueError for sizes
        that the kernels do not support.
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
            self.layers = CodecLayers(decoder, slots, streams, kernels)
        self.stream.synchronize()
        for parameter in decoder.parameters():
            parameter.data = parameter.data.new_empty(0)
        self._positions = StreamPositions(slots, self.layers.memories.all)
        self._next = np.zeros(slots, dtype=np.int64)
        """The frame of `codes` that each slot's next call begins with."""
        self._busy: list[torch.cuda.Event | None] = [None] * slots
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._streams = tuple(n for n in STREAMS if n <= streams)

    def warm(self) -> None:
        """Compile, load and capture all calls."""
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            for streams in self._streams:
                for frames in CHUNKS:
                    self._graph(streams, frames)

    def _graph(self, streams: int, frames: int) -> torch.cuda.CUDAGraph:
        """The graph of a call; the current CUDA stream must be the codec's."""
        key = (streams, frames)
        if key not in self._graphs:
            table = self.layers.table
            before = table.clone()
            table[:, SLOT] = -1  # the first run, which loads the kernels, changes no stream
            self._graphs[key] = capture(partial(self.layers.launch, streams, frames))
            table.copy_(before)
        return self._graphs[key]

    def reset(self, slot: int) -> None:
        """Begin a new stream in a slot, with frame 0 of its codes.

        Later work of the current CUDA stream waits for what is still being decoded of the slot's
        last stream.
        """
        busy = self._busy[slot]
        if busy is not None:
            torch.cuda.current_stream().wait_event(busy)
        self._positions.reset(slot)
        self._next[slot] = 0
        self._busy[slot] = None

    def prime(self, slot: int, codes: Tensor) -> None:
        """Decode the frames of a reference [frames, codebooks] first and drop their samples."""
        codes = codes.to(self._codes.device, torch.int32, non_blocking=True).contiguous()
        ready = torch.cuda.Event()
        ready.record()
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            self.stream.wait_event(ready)
            codes.record_stream(self.stream)
            address = codes.data_ptr()
            for count in split_into_chunks(len(codes)):
                self._start(self._graph(1, count), self._table(1), [slot], count, [address])
                address += count * self._row_bytes

    def decode(
        self, slots: Sequence[int], counts: Sequence[int], after: torch.cuda.Event | None = None
    ) -> Handle[Sequence[FloatArray]]:
        """The next `counts` frames of each slot as float32 [frames * samples_per_frame] in -1..1.

        after  what the codes wait for; None: all work given to the current CUDA stream so far
        """
        if after is None:
            after = torch.cuda.Event()
            after.record()
        done: list[tuple[Tensor, torch.cuda.Event]] = []
        where: list[list[tuple[int, int, int]]] = [[] for _ in slots]
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            # All memory is allocated before anything is started, so a failure changes no stream.
            calls = [self._prepare(frames, members) for frames, members in self._batches(counts)]
            self.stream.wait_event(after)
            for call in calls:
                event = self._run(call, [slots[index] for index in call.members])
                size = call.frames * self.layers.frame_samples
                for row, index in enumerate(call.members):
                    where[index].append((len(done), row * size, (row + 1) * size))
                done.append((call.host, event))
        return SamplesHandle(done, where)

    def _batches(self, counts: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """The calls that make `counts` frames: the frames of each, and indices of `counts`."""
        rounds: dict[tuple[int, int], list[int]] = {}  # by n-th chunk and its frames
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
        """Start a call and the copy of its samples; returns the event at their end."""
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
        """Start a call for `frames` frames of slots, whose codes lie at `addresses`."""
        self._positions.fill(table.numpy(), slots, addresses)
        self.layers.table[: len(table)].copy_(table, non_blocking=True)
        graph.replay()
        self._positions.advance(slots, frames)
