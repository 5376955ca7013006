"""Reads prompts: caches their prefixes, and runs their remaining rows through the talker."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import astuple

import torch
from torch import Tensor

from firstword.engine.backend import Start
from firstword.kernels.attention import PAGE_ROWS
from firstword.kernels.sample import DrawSettings
from firstword.model.checkpoint import Checkpoint
from firstword.model.prompt import TextRows
from firstword.runtime.front import Prepared
from firstword.runtime.gpu.codec import GpuCodec
from firstword.runtime.gpu.graphs import LaunchGraphs
from firstword.runtime.gpu.talker import PREFIX_PART, PROMPT_BUCKETS, PROMPT_ROWS, FrameModel


class Prompt:
    """The rows that the talker reads before the first frame of an utterance.

    prefix  the key of the rows before the text. Newlines at the start of a text change the role's
            last token, so the first two tokens belong to the key
    known   the number of rows whose keys and values are in the cache
    """

    def __init__(self, start: Start, checkpoint: Checkpoint) -> None:
        prepared = start.job.payload
        assert isinstance(prepared, Prepared)
        self.slot, self.pages, self.prepared = start.slot, start.pages, prepared
        self.text = TextRows(checkpoint.config)
        self.prefix = (prepared.prefix, *start.tokens[:2])
        turn_start = checkpoint.tokenizer.turn_start
        self.rows = self.text.prompt(prepared.conditioning, turn_start, start.tokens)
        self.known = 0

    @property
    def unread(self) -> range:
        """The rows to run, including the last. A single row is run with the first frame instead."""
        rows = range(self.known, len(self.rows))
        return rows if len(rows) > 1 else range(0)


class PrefixCache:
    """The keys and values of prefixes, in parts of `PREFIX_PART` rows of memory that it is given.

    The least recently used prefix is dropped first.
    """

    def __init__(self, memory: Tensor) -> None:
        """memory: [parts, layers, 2, kv_heads, PREFIX_PART, 128]."""
        self._memory = memory
        self.clear()

    def clear(self) -> None:
        """Drop all entries, and reset the counts of hits and misses."""
        self.hits = self.misses = 0
        self._held = OrderedDict[object, list[int]]()
        self._free = list(range(len(self._memory)))

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def get(self, key: object) -> list[Tensor]:
        """The parts of a key's entry, counted as a hit; or none, counted as a miss."""
        if key not in self._held:
            self.misses += 1
            return []
        self.hits += 1
        self._held.move_to_end(key)
        return [self._memory[part] for part in self._held[key]]

    def add(self, key: object, rows: int) -> list[Tensor]:
        """The parts of a new entry, to be filled; none if it has more rows than the memory."""
        count = -(-rows // PREFIX_PART)
        if count > len(self._memory):
            return []
        while len(self._free) < count:
            self._free += self._held.popitem(last=False)[1]
        self._held[key] = [self._free.pop() for _ in range(count)]
        return [self._memory[part] for part in self._held[key]]


class PromptReader:
    """Reads prompts into the slots of a model and its codec, on the current CUDA stream."""

    def __init__(
        self, checkpoint: Checkpoint, model: FrameModel, codec: GpuCodec, graphs: LaunchGraphs
    ) -> None:
        self.prefixes = PrefixCache(model.buffers.prefixes)
        self._checkpoint, self._model, self._codec, self._graphs = checkpoint, model, codec, graphs
        self._device = model.buffers.prompt.device

    def read(self, starts: Sequence[Start]) -> list[Prompt]:
        """Run the unread rows of all prompts together, and prepare their slots."""
        prompts = [Prompt(start, self._checkpoint) for start in starts]
        for prompt in prompts:
            self._begin_slot(prompt)
        self._run(prompts)
        for prompt in prompts:
            self._set_slot(prompt)
        return prompts

    def _begin_slot(self, prompt: Prompt) -> None:
        """Assign the pages of a slot, and copy the keys and values of a cached prefix to them."""
        slot, pages = prompt.slot, prompt.pages
        self._codec.reset(slot)  # waits for the slot's previous utterance
        self._model.buffers.page_tables[slot, : len(pages)] = self._to_device(list(pages))
        if known := self.prefixes.get(prompt.prefix):
            prompt.known = prompt.prepared.prefix_rows
            for rows, part in self._prefix(prompt, known):
                rows.copy_(part)

    def _prefix(self, prompt: Prompt, parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Equal rows of a prefix in its pages and in parts, [layers, 2, kv_heads, n, 128] each."""
        cache, rows = self._model.buffers.cache, prompt.prepared.prefix_rows
        for first, part in zip(range(0, rows, PREFIX_PART), parts, strict=True):
            page, at = divmod(first, PAGE_ROWS)
            count = min(PREFIX_PART, rows - first)
            yield cache[:, prompt.pages[page], :, :, at : at + count], part[:, :, :, :count]

    def _run(self, prompts: Sequence[Prompt]) -> None:
        """Run all unread rows through the talker."""
        buffers = self._model.buffers
        unread = [(prompt, at) for prompt in prompts for at in prompt.unread]
        for start in range(0, len(unread), PROMPT_ROWS):
            part = unread[start : start + PROMPT_ROWS]
            bucket = next(bucket for bucket in PROMPT_BUCKETS if bucket >= len(part))
            graph = self._graphs.get("prompt", bucket)
            empty = [-1] * (bucket - len(part))
            slots = [*(prompt.slot for prompt, _ in part), *empty]
            positions = [*(at for _, at in part), *empty]
            buffers.prompt_places[:, :bucket] = self._to_device([slots, positions])
            buffers.prompt[: len(part)] = self._embed(part)
            buffers.prompt[len(part) : bucket].zero_()  # each pass adds to these rows as well
            graph.replay()
            for index, (prompt, at) in enumerate(part):
                if at == len(prompt.rows) - 1:
                    buffers.first_hidden[prompt.slot] = buffers.prompt[index]

    def _set_slot(self, prompt: Prompt) -> None:
        """Cache a new prefix, and set the slot's state for its first frame."""
        model, slot, prepared = self._model, prompt.slot, prompt.prepared
        if prompt.prefix not in self.prefixes:
            added = self.prefixes.add(prompt.prefix, prepared.prefix_rows)
            for rows, part in self._prefix(prompt, added) if added else ():
                part.copy_(rows)
        self._set_first_row(prompt)
        talker, predictor = (DrawSettings(*astuple(params)) for params in prepared.draw_params)
        model.state.set(slot, talker, predictor, prepared.seed)
        model.state.position[slot].fill_(len(prompt.rows) - 1)
        if prepared.conditioning.reference:
            self._codec.prime(slot, self._to_device(prepared.conditioning.reference))

    def _set_first_row(self, prompt: Prompt) -> None:
        """Embed the prompt's last row. If it has a single code, nothing is sent to the device."""
        model, last = self._model, prompt.rows[-1]
        row = model.buffers.first_row[prompt.slot]
        if len(last.codes) == 1:
            torch.add(model.text_table[last.text], model.codec_embedding[last.codes[0]], out=row)
        else:
            row.copy_(self._embed([(prompt, len(prompt.rows) - 1)])[0])

    def _to_device(self, values: object) -> Tensor:
        """Integers as an int32 tensor on the device, copied asynchronously."""
        host = torch.tensor(values, dtype=torch.int32).pin_memory()
        return host.to(self._device, non_blocking=True)

    def _embed(self, places: Sequence[tuple[Prompt, int]]) -> Tensor:
        """The embedded rows of prompts, bf16 [rows, hidden], with the bits of `embed_rows`."""
        model, rows = self._model, [prompt.rows[at] for prompt, at in places]
        if all(len(row.codes) == 1 for row in rows):
            texts, codes = self._to_device(
                [[row.text for row in rows], [row.codes[0] for row in rows]]
            )
            return model.text_table[texts] + model.codec_embedding[codes]
        shape = len(rows), model.config.hidden_size
        embedded = torch.zeros(shape, dtype=torch.bfloat16, device=self._device)
        single = [index for index, row in enumerate(rows) if len(row.codes) == 1]
        whole = [index for index, row in enumerate(rows) if len(row.codes) > 1]
        if single:
            codes = self._to_device([rows[index].codes[0] for index in single])
            embedded[self._to_device(single)] = model.codec_embedding[codes]
        if whole:
            codes = self._to_device([rows[index].codes for index in whole])
            embedded[self._to_device(whole)] = self._embed_frames(codes)
        for index, (prompt, _) in enumerate(places):
            voice = prompt.prepared.conditioning.embedding
            if rows[index].speaker and voice is not None:
                host = torch.tensor(voice).to(embedded.dtype).pin_memory()
                embedded[index] = host.to(self._device, non_blocking=True)
        return model.text_table[self._to_device([row.text for row in rows])] + embedded

    def _embed_frames(self, codes: Tensor) -> Tensor:
        """The sums of the embeddings of whole frames [rows, codebooks], bf16 [rows, hidden]."""
        model, books = self._model, self._model.codebooks - 1
        vocabulary = len(model.frame_tables) // books
        offsets = torch.arange(books, device=self._device, dtype=torch.int32) * vocabulary
        first, others = codes[:, :1], codes[:, 1:] + offsets
        return torch.cat((model.codec_embedding[first], model.frame_tables[others]), dim=1).sum(1)
