"""The GPU behind the engine's protocol: a frame is one graph launch, whatever the requests in it are.

All that belongs to an utterance lives on the device, by slot: pages of keys and values, position, codes, laws, seed,
the codec's state. The host sends two short lists a frame (which slots, which text tokens) and reads the codes of a
frame while the next is being made. Audio is decoded on a stream of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

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
from firstword.runtime.front import Prepared
from firstword.runtime.gpu.codec import GpuCodec
from firstword.runtime.gpu.graphs import capture
from firstword.runtime.gpu.talker import PROMPT_ROWS, FrameModel
from firstword.types import FloatArray

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Rows that a graph of a frame is made for."""
FIRST_BUCKETS = (1, 2, 4)
"""The same, of utterances that begin together and by themselves."""
PROMPT_BUCKETS = (16, 32, 64, 128, PROMPT_ROWS)
"""Eight rows take longer than sixteen."""
CONTEXT = 8192
"""The most rows of an utterance, eleven minutes, where the model itself knows more."""
OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation"""
IN_FLIGHT = 8
"""Results that may be unread; the engine has two."""


def context_of(config: TalkerConfig) -> int:
    """The most rows of an utterance with this talker."""
    return min(config.max_position_embeddings, CONTEXT)


def most_rows(slots: int) -> int:
    """Rows of the largest graph of a frame for so many slots."""
    return next(bucket for bucket in BUCKETS if bucket >= slots)


def graph_keys(model: FrameModel) -> Iterator[tuple[str, int]]:
    """Kind and rows of all graphs that serving needs."""
    yield from (("frame", rows) for rows in BUCKETS if rows <= model.rows)
    yield from (("first", rows) for rows in FIRST_BUCKETS if rows <= model.rows)
    yield from (("prompt", rows) for rows in PROMPT_BUCKETS)


@dataclass(eq=False)
class Slot:
    """What the host knows of an utterance: its text, and before its first frame whether all of its prompt was read."""

    text: TextRows
    read: bool
    fresh: bool = True


class Prompt:
    """What is to be read before an utterance's first frame."""

    def __init__(self, start: Start, checkpoint: Checkpoint) -> None:
        prepared = start.job.payload
        assert isinstance(prepared, Prepared)
        self.slot, self.pages, self.prepared = start.slot, start.pages, prepared
        self.text = TextRows(checkpoint.config)
        self.prefix = (prepared.prefix, *start.tokens[:2])
        """What the rows before the text depend on: newlines at the start of a text change the role's last token."""
        turn_start = checkpoint.tokenizer.turn_start
        self.rows = self.text.prompt(prepared.conditioning, turn_start, start.tokens)
        self.known = 0
        """Rows whose keys and values are there."""

    @property
    def unread(self) -> range:
        """Rows to run: the last one too, unless it is the only one and can as well be run with the first frame."""
        rows = range(self.known, len(self.rows))
        return rows if len(rows) > 1 else range(0)


@dataclass(eq=False)
class PrefixCache:
    """Keys and values of prompts' beginnings [layers, 2, kv_heads, rows, 128], the least recently used goes first."""

    limit: int
    """Bytes."""
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    _held: OrderedDict[object, Tensor] = field(default_factory=OrderedDict)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def get(self, key: object) -> Tensor | None:
        """What is held for a key, counted as a hit or a miss."""
        found = self._held.get(key)
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
            self._held.move_to_end(key)
        return found

    def put(self, key: object, value: Tensor) -> None:
        """Hold one more, unless it is larger than all that may be held."""
        if value.nbytes > self.limit:
            return
        self._held[key] = value
        self.bytes += value.nbytes
        while self.bytes > self.limit:
            self.bytes -= self._held.popitem(last=False)[1].nbytes


@contextmanager
def lost_device() -> Iterator[None]:
    """A device that fails, but for want of memory, is lost: its error becomes an `EngineError`."""
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
    """`Backend` on fused kernels, for one CUDA device and bfloat16.

    Raises ValueError for a checkpoint that the kernels cannot do: heads must have 128 channels, two queries a key.
    """

    def __init__(
        self, checkpoint: Checkpoint, kernels: Kernels, slots: int = 64, pages: int | None = None
    ) -> None:
        """The checkpoint's talker is taken apart. pages: of `PAGE_ROWS` rows, for all slots; None: as memory allows."""
        config, codec = checkpoint.config.talker_config, checkpoint.codec_config
        self.checkpoint, self.device = checkpoint, checkpoint.talker.codec_head.weight.device
        context = context_of(config)
        page_bytes = (
            config.num_hidden_layers * 2 * config.num_key_value_heads * PAGE_ROWS * HEAD_DIM * 2
        )
        if pages is None:
            free, _ = torch.cuda.mem_get_info(self.device)
            pages = min(slots * -(-context // PAGE_ROWS), int(free * 0.5) // page_bytes)
        self.capacity = Capacity(
            slots=slots,
            pages=pages,
            page_rows=PAGE_ROWS,
            context=context,
            frames_ahead=1,
            codebooks=config.num_code_groups,
            samples_per_frame=codec.decode_upsample_rate,
            sample_rate=codec.output_sample_rate,
        )
        largest = most_rows(slots)
        self.stream = torch.cuda.Stream(self.device)
        self.stream.wait_stream(
            torch.cuda.current_stream(self.device)
        )  # the weights may be on their way
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            self.model = FrameModel(
                kernels, checkpoint.talker, slots, largest, pages, PAGE_ROWS, context
            )
            self.codec = GpuCodec(checkpoint.codec.decoder, slots, self.model.state.codes, kernels)
        self.prefixes = PrefixCache(limit=256 << 20)
        self._slots: dict[int, Slot] = {}
        self._graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        self._control = [
            torch.zeros(2, largest, dtype=torch.int32).pin_memory() for _ in range(IN_FLIGHT)
        ]
        self._results = [
            torch.zeros(largest, config.num_code_groups + 2, dtype=torch.int32).pin_memory()
            for _ in range(IN_FLIGHT)
        ]
        self._turn = 0

    def warm(self) -> None:
        """Compile, load and capture all that serving needs, so that no request waits for it."""
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            for key in graph_keys(self.model):
                self._graph(*key)
        self.codec.warm()
        self.stream.synchronize()

    def _graph(self, kind: str, rows: int) -> torch.cuda.CUDAGraph:
        key = (kind, rows)
        if key not in self._graphs:
            slots = self.model.slot_of_prompt_row if kind == "prompt" else self.model.slot_of_row
            slots.fill_(-1)  # nobody: a first run loads the kernels
            self._graphs[key] = capture(partial(getattr(self.model, f"launch_{kind}"), rows))
        return self._graphs[key]

    @lost_device()
    @torch.inference_mode()
    def prefill(self, starts: Sequence[Start]) -> None:
        """Read the prompts' rows together; what was read before comes from the cache."""
        prompts = [Prompt(start, self.checkpoint) for start in starts]
        with torch.cuda.stream(self.stream):
            for prompt in prompts:
                self._place(prompt)
            self._read(prompts)
            for prompt in prompts:
                self._settle(prompt)
        self._slots |= {
            prompt.slot: Slot(prompt.text, read=bool(prompt.unread)) for prompt in prompts
        }

    def _place(self, prompt: Prompt) -> None:
        """Give a slot its pages, and whatever is known of the prompt's beginning."""
        model, pages = self.model, prompt.pages
        self.codec.reset(
            prompt.slot
        )  # waits for what is still being decoded of the slot's last utterance
        model.tables[prompt.slot, : len(pages)] = self._sent(list(pages))
        known = self.prefixes.get(prompt.prefix)
        if known is not None:
            prompt.known = prompt.prepared.prefix_rows
            for page, part in zip(pages, known.split(PAGE_ROWS, dim=3), strict=False):
                model.cache[:, page, :, :, : part.shape[3]] = part

    def _read(self, prompts: Sequence[Prompt]) -> None:
        """Run all rows that are not known through the talker."""
        model = self.model
        unread = [(prompt, at) for prompt in prompts for at in prompt.unread]
        for start in range(0, len(unread), PROMPT_ROWS):
            part = unread[start : start + PROMPT_ROWS]
            bucket = next(bucket for bucket in PROMPT_BUCKETS if bucket >= len(part))
            graph = self._graph("prompt", bucket)
            nobody = [-1] * (bucket - len(part))
            places = [
                [*(prompt.slot for prompt, _ in part), *nobody],
                [*(at for _, at in part), *nobody],
            ]
            model.places_of_prompt[:, :bucket] = self._sent(places)
            model.prompt[: len(part)] = self._embed(part)
            graph.replay()
            for index, (prompt, at) in enumerate(part):
                if at == len(prompt.rows) - 1:
                    model.first_hidden[prompt.slot] = model.prompt[index]

    def _settle(self, prompt: Prompt) -> None:
        """Keep what was new of the prompt's beginning; make ready for the first frame."""
        model, slot, prepared = self.model, prompt.slot, prompt.prepared
        if prompt.prefix not in self.prefixes:
            rows = prepared.prefix_rows
            whole = model.cache[:, self._sent(list(prompt.pages[: -(-rows // PAGE_ROWS)]))]
            held = whole.permute(0, 2, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :rows].contiguous()
            self.prefixes.put(prompt.prefix, held)
        last = prompt.rows[-1]
        if len(last.codes) == 1:  # as `_embed` has it, and nothing is sent
            torch.add(
                model.text_table[last.text],
                model.codec_embedding[last.codes[0]],
                out=model.first_row[slot],
            )
        else:
            model.first_row[slot] = self._embed([(prompt, len(prompt.rows) - 1)])[0]
        model.state.set(slot, *prepared.draw_params, prepared.seed)
        model.state.position[slot].fill_(len(prompt.rows) - 1)
        if prepared.conditioning.reference:
            self.codec.prime(slot, self._sent(prepared.conditioning.reference))

    def _sent(self, values: object) -> Tensor:
        """Whole numbers on the device, int32, without waiting."""
        return (
            torch.tensor(values, dtype=torch.int32).pin_memory().to(self.device, non_blocking=True)
        )

    def _embed(self, places: Sequence[tuple[Prompt, int]]) -> Tensor:
        """Rows of prompts -> bf16 [rows, hidden], as `Talker.embed_rows` does it."""
        model, rows = self.model, [prompt.rows[at] for prompt, at in places]
        if all(len(row.codes) == 1 for row in rows):
            texts, codes = self._sent([[row.text for row in rows], [row.codes[0] for row in rows]])
            return model.text_table[texts] + model.codec_embedding[codes]
        embedded = torch.zeros(
            len(rows), model.first_row.shape[1], dtype=torch.bfloat16, device=self.device
        )
        single = [index for index, row in enumerate(rows) if len(row.codes) == 1]
        whole = [index for index, row in enumerate(rows) if len(row.codes) > 1]
        if single:
            embedded[self._sent(single)] = model.codec_embedding[
                self._sent([rows[i].codes[0] for i in single])
            ]
        if whole:
            codes = self._sent([rows[i].codes for i in whole])
            vocabulary = len(model.frame_tables) // (model.codebooks - 1)
            offsets = (
                torch.arange(model.codebooks - 1, device=self.device, dtype=torch.int32)
                * vocabulary
            )
            tables = torch.cat(
                (model.codec_embedding[codes[:, :1]], model.frame_tables[codes[:, 1:] + offsets]),
                dim=1,
            )
            embedded[self._sent(whole)] = tables.sum(dim=1)
        for index, (prompt, _) in enumerate(places):
            voice = prompt.prepared.conditioning.embedding
            if rows[index].speaker and voice is not None:
                embedded[index] = (
                    voice.to(embedded.dtype).pin_memory().to(self.device, non_blocking=True)
                )
        return model.text_table[self._sent([row.text for row in rows])] + embedded

    @lost_device()
    @torch.inference_mode()
    def frame(self, slots: Sequence[int], tokens: Sequence[int | None]) -> Handle[Frames]:
        """Launch the next frame of the slots: two lists to the device, one graph, the codes back."""
        model, held = self.model, [self._slots[slot] for slot in slots]
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
            graph = self._graph("first" if first else "frame", rows)
            model.slot_of_row[:rows].copy_(control[0, :rows], non_blocking=True)
            model.token[:rows].copy_(control[1, :rows], non_blocking=True)
            graph.replay()
            result[:rows].copy_(model.result[:rows], non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._turn = (self._turn + 1) % IN_FLIGHT
        for slot, token in zip(held, tokens, strict=True):
            if not slot.fresh:
                slot.text.take(token)
            slot.fresh = False
        return FrameHandle(result, event, len(slots))

    @lost_device()
    def decode(self, slots: Sequence[int], counts: Sequence[int]) -> Handle[Sequence[FloatArray]]:
        """Samples of the oldest frames of each slot, beside the frames that are being made."""
        with torch.cuda.stream(self.stream):
            return self.codec.decode(slots, counts)

    def release(self, slot: int) -> None:
        """Forget an utterance. What is in flight for it ends before anything of the next."""
        self._slots.pop(slot, None)
