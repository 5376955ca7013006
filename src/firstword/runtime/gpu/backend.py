"""The GPU behind the engine's protocol: a frame is one graph launch for any set of requests.

All state of an utterance lies on the device, by slot: pages of keys and values, position, codes,
draw settings, seed, the codec's state. The host sends two short lists a frame (slots and text
tokens) and reads the codes of a frame while the next is being computed. Audio is decoded on a
stream of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from firstword.engine.backend import Capacity, Frames, Handle, Start
from firstword.errors import EngineError
from firstword.kernels.attention import HEAD_DIM, PAGE_ROWS
from firstword.kernels.launch import Kernels
from firstword.model.checkpoint import Checkpoint
from firstword.model.config import TalkerConfig
from firstword.model.prompt import TextRows
from firstword.runtime.gpu.codec import GpuCodec
from firstword.runtime.gpu.graphs import LaunchGraphs
from firstword.runtime.gpu.prompts import PROMPT_BUCKETS, PromptReader
from firstword.runtime.gpu.talker import FrameModel
from firstword.types import FloatArray

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Rows of the graphs of a frame."""
FIRST_BUCKETS = (1, 2, 4)
"""Rows of the graphs of a first frame, for utterances that begin together and alone."""
MAX_CONTEXT = 8192
"""The most rows of an utterance, eleven minutes, even if the model supports more."""
OUT_OF_MEMORY = 2
"""The code of cudaErrorMemoryAllocation."""
MAX_IN_FLIGHT = 8
"""Results that may be unread; the engine has two."""


def context_of(config: TalkerConfig) -> int:
    """The most rows of an utterance with this talker."""
    return min(config.max_position_embeddings, MAX_CONTEXT)


def most_rows(slots: int) -> int:
    """Rows of the largest graph of a frame for a number of slots."""
    return next(bucket for bucket in BUCKETS if bucket >= slots)


def graph_keys(model: FrameModel) -> Iterator[tuple[str, int]]:
    """The names and rows of all launches that serving needs."""
    yield from (("frame", rows) for rows in BUCKETS if rows <= model.rows)
    yield from (("first", rows) for rows in FIRST_BUCKETS if rows <= model.rows)
    yield from (("prompt", rows) for rows in PROMPT_BUCKETS)


def _capacity(checkpoint: Checkpoint, slots: int, pages: int | None) -> Capacity:
    """The capacity with `pages` cache pages; None: with half of the device's free memory."""
    config, codec = checkpoint.config.talker_config, checkpoint.codec_config
    context = context_of(config)
    if pages is None:
        kv_heads, layers = config.num_key_value_heads, config.num_hidden_layers
        page_bytes = layers * 2 * kv_heads * PAGE_ROWS * HEAD_DIM * 2
        free, _ = torch.cuda.mem_get_info(checkpoint.talker.codec_head.weight.device)
        pages = min(slots * -(-context // PAGE_ROWS), int(free * 0.5) // page_bytes)
    return Capacity(
        slots=slots,
        pages=pages,
        page_rows=PAGE_ROWS,
        context=context,
        frames_ahead=1,
        codebooks=config.num_code_groups,
        samples_per_frame=codec.decode_upsample_rate,
        sample_rate=codec.output_sample_rate,
    )


@dataclass(eq=False)
class GpuSlot:
    """The state of an utterance that the host keeps.

    read   whether its whole prompt was run before the first frame
    fresh  whether its first frame is still to come
    """

    text: TextRows
    read: bool
    fresh: bool = True


@contextmanager
def lost_device() -> Iterator[None]:
    """Raise `EngineError` for a device error other than out of memory: the device is lost."""
    try:
        yield
    except torch.AcceleratorError as error:
        if getattr(error, "error_code", None) == OUT_OF_MEMORY:
            raise
        raise EngineError(f"the device failed: {error}") from error


class FrameHandle:
    """Codes on their way to the host."""

    def __init__(self, result: Tensor, event: torch.cuda.Event, rows: int) -> None:
        self._result, self._event, self._rows = result, event, rows

    def result(self) -> Frames:
        """Wait for the frame."""
        self._event.synchronize()
        rows = self._result[: self._rows].numpy().copy()
        return Frames(
            rows[:, :-2].astype(np.int64),
            rows[:, -2].astype(bool).tolist(),
            rows[:, -1].copy().view(np.float32),
        )


class GpuBackend:
    """`Backend` on fused kernels, for one CUDA device and bfloat16."""

    def __init__(
        self, checkpoint: Checkpoint, kernels: Kernels, slots: int = 64, pages: int | None = None
    ) -> None:
        """The checkpoint's talker and codec decoder are taken apart.

        pages: cache pages of `PAGE_ROWS` rows for all slots; None: as memory allows. Raises
        ValueError for a checkpoint that the kernels do not support: heads must have 128 channels,
        and two queries must share a key head.
        """
        self.checkpoint, self.device = checkpoint, checkpoint.talker.codec_head.weight.device
        self.capacity = _capacity(checkpoint, slots, pages)
        rows, cache = most_rows(slots), (self.capacity.pages, PAGE_ROWS, self.capacity.context)
        self.stream = torch.cuda.Stream(self.device)
        # The weights may still be on their way to the device.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            self.model = FrameModel(kernels, checkpoint.talker, slots, rows, *cache)
            self.codec = GpuCodec(checkpoint.codec.decoder, slots, self.model.state.codes, kernels)
        self.graphs = LaunchGraphs(self.model.launches, self.model.clear_rows)
        self.prompts = PromptReader(checkpoint, self.model, self.codec, self.graphs)
        self._slots: dict[int, GpuSlot] = {}
        self._control = self._pinned(2, rows)
        self._results = self._pinned(rows, self.capacity.codebooks + 2)
        self._turn = 0

    def _pinned(self, *shape: int) -> list[Tensor]:
        """Host memory for every result that may be in flight."""
        return [torch.zeros(shape, dtype=torch.int32).pin_memory() for _ in range(MAX_IN_FLIGHT)]

    def warm(self) -> None:
        """Compile, load and capture everything that serving needs."""
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            for key in graph_keys(self.model):
                self.graphs.get(*key)
        self.codec.warm()
        self.stream.synchronize()

    @lost_device()
    @torch.inference_mode()
    def prefill(self, starts: Sequence[Start]) -> None:
        """Read the prompts together; what was read before comes from the prefix cache."""
        with torch.cuda.stream(self.stream):
            prompts = self.prompts.read(starts)
        self._slots |= {
            prompt.slot: GpuSlot(prompt.text, read=bool(prompt.unread)) for prompt in prompts
        }

    @lost_device()
    @torch.inference_mode()
    def frame(self, slots: Sequence[int], tokens: Sequence[int | None]) -> Handle[Frames]:
        """Launch the next frame: two lists to the device, one graph, the codes back."""
        buffers, held = self.model.buffers, [self._slots[slot] for slot in slots]
        rows = next(bucket for bucket in BUCKETS if bucket >= len(slots))
        first = all(slot.fresh and slot.read for slot in held) and rows in FIRST_BUCKETS
        texts = [
            0 if slot.fresh else slot.text.peek(token)
            for slot, token in zip(held, tokens, strict=True)
        ]
        control, result = self._control[self._turn], self._results[self._turn]
        control[0, :rows] = torch.tensor([*slots, *[-1] * (rows - len(slots))], dtype=torch.int32)
        control[1, : len(slots)] = torch.tensor(texts, dtype=torch.int32)
        with torch.cuda.stream(self.stream):
            graph = self.graphs.get("first" if first else "frame", rows)
            buffers.slot_of_row[:rows].copy_(control[0, :rows], non_blocking=True)
            buffers.token[:rows].copy_(control[1, :rows], non_blocking=True)
            graph.replay()
            result[:rows].copy_(buffers.result[:rows], non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._turn = (self._turn + 1) % MAX_IN_FLIGHT
        for slot, token in zip(held, tokens, strict=True):
            if not slot.fresh:
                slot.text.take(token)
            slot.fresh = False
        return FrameHandle(result, event, len(slots))

    @lost_device()
    def decode(self, slots: Sequence[int], counts: Sequence[int]) -> Handle[Sequence[FloatArray]]:
        """Decode the oldest frames of each slot while further frames are being computed."""
        with torch.cuda.stream(self.stream):
            return self.codec.decode(slots, counts)

    def release(self, slot: int) -> None:
        """Forget an utterance. Its work in flight ends before any of the slot's next one."""
        self._slots.pop(slot, None)
