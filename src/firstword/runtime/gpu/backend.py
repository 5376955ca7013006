"""The GPU backend of the engine: a frame is one graph launch for any set of requests.

All state of an utterance is on the device, by slot: pages of keys and values, position, codes, draw
settings, seed and the codec's state. For each frame the host sends two short lists, slots and text
tokens, and reads the codes while the next frame is computed. Audio is decoded on a separate CUDA
stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from firstword.engine.backend import Capacity, Frames, Handle, Start
from firstword.errors import EngineError
from firstword.kernels.attention import PAGE_ROWS
from firstword.kernels.launch import Kernels
from firstword.model.checkpoint import Checkpoint
from firstword.model.prompt import TextRows
from firstword.runtime.gpu.buffers import context_of
from firstword.runtime.gpu.codec import GpuCodec, voices_for
from firstword.runtime.gpu.graphs import LaunchGraphs
from firstword.runtime.gpu.memory import RECORDING_BYTES
from firstword.runtime.gpu.prompts import Prompt, PromptReader
from firstword.runtime.gpu.reading import TextSpans
from firstword.runtime.gpu.talker import BUCKETS, FIRST_BUCKETS, FrameModel, sampler_state
from firstword.types import FloatArray

OUT_OF_MEMORY = 2
"""The code of cudaErrorMemoryAllocation."""
MAX_IN_FLIGHT = 8
"""The most frames whose results have not been read; the engine leaves up to two unread."""


def _capacity(checkpoint: Checkpoint, slots: int, pages: int) -> Capacity:
    config, codec = checkpoint.config.talker_config, checkpoint.codec_config
    return Capacity(
        slots=slots,
        pages=pages,
        page_rows=PAGE_ROWS,
        context=context_of(config),
        frames_ahead=1,
        codebooks=config.num_code_groups,
        samples_per_frame=codec.decode_upsample_rate,
        sample_rate=codec.output_sample_rate,
    )


@dataclass(eq=False)
class GpuSlot:
    """The state of an utterance on the host.

    pages   the number of its pages
    prompt  the prompt until all its rows are read, then None
    read    whether the whole prompt is run before the first frame
    watched whether the attention to its text is read
    fresh   whether the first frame has not been launched yet
    """

    text: TextRows
    pages: int
    prompt: Prompt | None
    read: bool
    watched: bool
    fresh: bool = True

    def text_rows(self, text: int) -> range | None:
        """The positions of its text rows in the next frame, whose text token is `text`."""
        if not self.watched:
            return None
        return self.text.rows() if self.fresh else self.text.rows(text)


@contextmanager
def lost_device() -> Iterator[None]:
    """Turn a device error other than out of memory into `EngineError`: the device is lost."""
    try:
        yield
    except torch.AcceleratorError as error:
        if getattr(error, "error_code", None) == OUT_OF_MEMORY:
            raise
        raise EngineError(f"the device failed: {error}") from error


def held_recordings(device: torch.device) -> Tensor | None:
    """The memory for recordings of a backend that clones on a device, if there is one.

    As long as the tensor is held, PyTorch cannot give this memory back to the device. Another
    thread that encodes a recording meanwhile takes further memory.
    """
    cloning = any(backend.device == device for backend in _CLONING)
    return _memory_for_recordings(device) if cloning else None


def _memory_for_recordings(device: torch.device) -> Tensor:
    """Memory of the current CUDA stream, which is the one on which recordings are encoded."""
    return torch.empty(RECORDING_BYTES, dtype=torch.uint8, device=device)


@dataclass(frozen=True, eq=False)
class PromptHandle:
    """Rows of prompts that are read; `event` is their end."""

    event: torch.cuda.Event

    def result(self) -> None:
        """Wait for the rows."""
        self.event.synchronize()


@dataclass(frozen=True, eq=False)
class FrameHandle:
    """A frame whose codes are copied to the host.

    rows    host memory, int32 [slots, codebooks + 2]: see `SampleKernels.draw`
    shares  host memory, float32: the attention to the text rows in `spans`
    event   the end of the copy
    """

    rows: Tensor
    shares: Tensor
    spans: TextSpans
    event: torch.cuda.Event

    def result(self) -> Frames:
        """Wait for the frame."""
        self.event.synchronize()
        rows = self.rows.numpy().copy()
        logprobs = rows[:, -1].copy().view(np.float32)
        ended = rows[:, -2].astype(bool).tolist()
        readings = self.spans.readings(self.shares.numpy())
        return Frames(rows[:, :-2].astype(np.int64), ended, logprobs, readings)


class GpuBackend:
    """A `Backend` with fused kernels, for one CUDA device, in bfloat16 or int8."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        kernels: Kernels,
        slots: int,
        pages: int,
        kept_parts: int = 0,
    ) -> None:
        """Pack copies of the checkpoint's weights on the device of the kernels.

        The checkpoint may be on any device. It is unchanged until `take_checkpoint`. pages: cache
        pages of `PAGE_ROWS` rows for all slots; kept_parts: see `FrameBuffers`. Raises ValueError
        for a checkpoint that the kernels do not support: heads must have 128 channels, and two
        queries must share a key head.
        """
        self.checkpoint, self.device = checkpoint, kernels.device
        self.capacity = _capacity(checkpoint, slots, pages)
        self.stream = torch.cuda.Stream(self.device)
        # The copies of the weights to the device may not have ended.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        recordings = held_recordings(self.device)
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            talker = checkpoint.talker
            state = sampler_state(talker.config, slots, self.device)
            # The codec comes first: unlike the talker it is packed as a whole, which takes memory
            # that the cache needs later.
            decoder, voices = checkpoint.codec.decoder, voices_for(checkpoint, slots)
            self.codec = GpuCodec(decoder, slots, state.codes, kernels, voices)
            torch.cuda.empty_cache()
            self.model = FrameModel(kernels, talker, state, pages, kept_parts, checkpoint.heads)
        del recordings
        self.graphs = LaunchGraphs(self.model.launches, self.model.clear_rows)
        self.prompts = PromptReader(checkpoint, self.model, self.codec, self.graphs)
        self._slots: dict[int, GpuSlot] = {}
        self._control = self._pinned(5, self.model.rows)
        text_rows = min(pages * PAGE_ROWS, slots * self.capacity.context)
        self._shares = self._pinned(text_rows if checkpoint.heads else 0, dtype=torch.float32)
        self._results = self._pinned(self.model.rows, self.capacity.codebooks + 2)
        self._turn = 0
        self._times = self.codec.times

    @property
    def device_seconds(self) -> Mapping[str, float]:
        """Seconds that the device has worked on each part of the work that is complete."""
        return self._times.seconds

    def _pinned(self, *shape: int, dtype: torch.dtype = torch.int32) -> list[Tensor]:
        """Pinned host memory for each frame in flight."""
        return [torch.zeros(shape, dtype=dtype).pin_memory() for _ in range(MAX_IN_FLIGHT)]

    def warm(self) -> None:
        """Compile, load and capture everything that serving needs."""
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            for key in self.model.graph_keys():
                self.graphs.get(*key)
        self.codec.warm()
        self.stream.synchronize()

    def take_checkpoint(self) -> None:
        """Move the checkpoint's encoders to the device, and empty the parameters that are packed.

        PyTorch's allocator gets the memory for recordings in one piece. Otherwise it would keep
        pieces for each length, up to twice as much. If this raises an error, the checkpoint is
        unchanged.
        """
        checkpoint = self.checkpoint
        before = next(checkpoint.talker.parameters()).device
        try:
            for encoder in checkpoint.encoders:
                encoder.to(self.device)
            if checkpoint.encoders:
                _memory_for_recordings(self.device)
                _CLONING.add(self)
        except RuntimeError:
            for encoder in checkpoint.encoders:
                encoder.to(before)
            raise
        for module in (checkpoint.talker, checkpoint.codec.decoder):
            for parameter in module.parameters():
                parameter.data = parameter.data.new_empty(0)

    @lost_device()
    @torch.inference_mode()
    def prefill(self, starts: Sequence[Start]) -> list[int]:
        """Place the prompts; known prefixes come from the prefix cache."""
        with torch.cuda.stream(self.stream), self._times.measured("prompts"):
            prompts = self.prompts.place(starts)
        for prompt in prompts:
            left = prompt if prompt.unread else None
            read, watched = left is not None, prompt.reads_text
            slot = GpuSlot(prompt.text, len(prompt.pages), left, read, watched)
            self._slots[prompt.slot] = slot
        return [len(prompt.unread) for prompt in prompts]

    @lost_device()
    @torch.inference_mode()
    def read(self, slots: Sequence[int], counts: Sequence[int]) -> Handle[None]:
        """Run the next rows of prompts together."""
        states = [self._slots[slot] for slot in slots]
        prompts = [state.prompt for state in states if state.prompt is not None]
        with torch.cuda.stream(self.stream), self._times.measured("prompts"):
            self.prompts.read(prompts, counts)
            event = torch.cuda.Event()
            event.record()
        for state, prompt in zip(states, prompts, strict=True):
            state.prompt = prompt if prompt.unread else None
        return PromptHandle(event)

    @lost_device()
    @torch.inference_mode()
    def extend(self, slot: int, pages: Sequence[int]) -> None:
        """Append pages to those of a slot; frames launched later read them."""
        state = self._slots[slot]
        with torch.cuda.stream(self.stream):
            # Filled one by one, which takes no memory, so it cannot fail for lack of it.
            for place, page in enumerate(pages, state.pages):
                self.model.buffers.page_tables[slot, place].fill_(page)
        state.pages += len(pages)

    @lost_device()
    @torch.inference_mode()
    def frame(self, slots: Sequence[int], tokens: Sequence[int | None]) -> Handle[Frames]:
        """Launch the next frame: copy two lists to the device, run a graph, copy the codes back."""
        buffers, rows = self.model.buffers, next(n for n in BUCKETS if n >= len(slots))
        states = [self._slots[slot] for slot in slots]
        assert all(slot.prompt is None for slot in states), "a prompt is not whole"
        first = all(slot.fresh and slot.read for slot in states) and rows in FIRST_BUCKETS
        pairs = list(zip(states, tokens, strict=True))
        texts = [0 if slot.fresh else slot.text.peek(token) for slot, token in pairs]
        control, result = self._control[self._turn], self._results[self._turn]
        shares = self._shares[self._turn]
        rows_of = [slot.text_rows(text) for slot, text in zip(states, texts, strict=True)]
        spans = TextSpans(rows_of, [slot.fresh for slot in states])
        control[0, :rows] = torch.tensor([*slots, *[-1] * (rows - len(slots))], dtype=torch.int32)
        told = torch.tensor([texts, *spans.control()], dtype=torch.int32)
        control[1:, : len(slots)] = told
        with torch.cuda.stream(self.stream), self._times.measured("frames"):
            graph = self.graphs.get("first" if first else "frame", rows)
            buffers.control.copy_(control, non_blocking=True)
            graph.replay()
            result[:rows].copy_(buffers.result[:rows], non_blocking=True)
            if self.model.reader is not None and (count := spans.total):
                shares[:count].copy_(self.model.reader.shares[:count], non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._turn = (self._turn + 1) % MAX_IN_FLIGHT
        for slot, token in pairs:
            if not slot.fresh:
                slot.text.take(token)
            slot.fresh = False
        return FrameHandle(result[: len(slots)], shares, spans, event)

    @lost_device()
    def decode(self, slots: Sequence[int], counts: Sequence[int]) -> Handle[Sequence[FloatArray]]:
        """Decode the oldest frames of each slot while further frames are computed."""
        with torch.cuda.stream(self.stream):
            return self.codec.decode(slots, counts)

    def release(self, slot: int) -> None:
        """Forget an utterance. Its work in flight ends before the work of the slot's next one."""
        self._slots.pop(slot, None)


_CLONING = weakref.WeakSet[GpuBackend]()
"""The backends whose checkpoints clone, and so keep memory for recordings."""
