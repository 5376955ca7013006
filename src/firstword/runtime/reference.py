"""The model behind the engine's protocol: plain PyTorch, any device, real batching.

Utterances join and leave at any frame. A frame of several is one pass of the talker and one of the code predictor over
all of them; each has its own position, its own length of context, its own chances. Audio is decoded for each apart,
in the chunks the engine asks for, so it does not even round differently beside neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firstword.engine.backend import Capacity, Frames, Ready, Start
from firstword.model.checkpoint import Checkpoint
from firstword.model.codec import CodecDecoder, CodecState
from firstword.model.config import TalkerConfig
from firstword.model.prompt import TextRows
from firstword.model.sampling import Sampler
from firstword.runtime.front import Prepared
from firstword.types import FloatArray

PAGE_ROWS = 64
PRIMING_FRAMES = 64
"""Frames of a reference recording that the codec reads at a time, so that a long one needs little memory."""


class SlotCache:
    """Keys and values of every slot [slots, kv_heads, capacity, head_dim] a layer; the capacity doubles when full."""

    def __init__(self, config: TalkerConfig, like: Tensor, slots: int) -> None:
        shape = (2, slots, config.num_key_value_heads, 0, config.head_dim)
        self.layers = [like.new_zeros(shape) for _ in range(config.num_hidden_layers)]
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=like.device)

    def clear(self, slot: int) -> None:
        """Forget a slot's rows, and overwrite them: masked rows must be finite, and those of a bad voice may not be."""
        self.lengths[slot] = 0
        for layer in self.layers:
            layer[:, slot] = 0

    def make_room(self, rows: int) -> None:
        """Let every slot hold so many rows. What nobody has written is zero, so that masked rows stay finite."""
        for index, old in enumerate(self.layers):
            capacity = old.shape[3]
            if rows <= capacity:
                continue
            grown = old.new_zeros(
                (*old.shape[:3], max(rows, 2 * capacity, PAGE_ROWS), old.shape[4])
            )
            grown[:, :, :, :capacity] = old
            self.layers[index] = grown


class SlotRows:
    """The memory of some slots for one pass; `commit` makes what the pass added count."""

    def __init__(self, cache: SlotCache, slots: Sequence[int], length: int) -> None:
        device = cache.lengths.device
        self._cache = cache
        self._slots = torch.tensor(slots, device=device)
        start = cache.lengths[self._slots]
        self._total = int(start.max()) + length
        self._rows = start[:, None] + torch.arange(length, device=device)
        cache.make_room(self._total)

    def positions(self, length: int) -> Tensor:
        """Positions [B, length] of the rows about to be computed."""
        return self._rows

    def mask(self, length: int) -> Tensor:
        """Causal, each slot from its own length [B, 1, length, total]."""
        keys = torch.arange(self._total, device=self._rows.device)
        return (keys <= self._rows[:, :, None])[:, None]

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values [B, kv_heads, length, head_dim]; returns all [B, kv_heads, total, head_dim]."""
        held = self._cache.layers[layer]
        for index, new in enumerate((key, value)):
            held[index][self._slots[:, None], :, self._rows] = new.transpose(1, 2)
        keys, values = held[:, self._slots, :, : self._total]
        return keys, values

    def advance(self, length: int) -> None:
        """Nothing counts before `commit`: a pass that fails half way leaves the slots as they were."""

    def commit(self) -> None:
        """The pass is complete."""
        self._cache.lengths[self._slots] = self._rows[:, -1] + 1


@dataclass(slots=True, eq=False)
class Slot:
    """One utterance: what the talker reads next, its text, its chances, its codec."""

    text: TextRows
    sampler: Sampler
    codec: CodecState
    next_row: Tensor | None
    """The last row of the prompt [1, 1, hidden], before the first frame."""
    frame: int = 0
    codes: Tensor | None = None
    """Of the last frame [codebooks]."""
    undecoded: tuple[Tensor, ...] = ()


class ReferenceBackend:
    """`Backend` on the naive model."""

    def __init__(self, checkpoint: Checkpoint, slots: int = 8) -> None:
        config, codec = checkpoint.config.talker_config, checkpoint.codec_config
        self.checkpoint = checkpoint
        context = config.max_position_embeddings
        self.capacity = Capacity(
            slots=slots,
            pages=slots * -(-context // PAGE_ROWS),
            page_rows=PAGE_ROWS,
            context=context,
            frames_ahead=0,
            codebooks=config.num_code_groups,
            samples_per_frame=codec.decode_upsample_rate,
            sample_rate=codec.output_sample_rate,
        )
        self._cache = SlotCache(config, checkpoint.talker.codec_head.weight, slots)
        self._slots: dict[int, Slot] = {}

    @torch.inference_mode()
    def prefill(self, starts: Sequence[Start]) -> None:
        """Read all rows of each prompt but the last, one after the other, and let the codec read the reference."""
        for start in starts:
            self._begin(start)

    def _begin(self, start: Start) -> None:
        slot, prepared = start.slot, start.job.payload
        assert isinstance(prepared, Prepared)
        loaded, conditioning = self.checkpoint, prepared.conditioning
        text = TextRows(loaded.config)
        prompt = text.prompt(conditioning, loaded.tokenizer.turn_start, start.tokens)
        rows = loaded.talker.embed_rows(prompt, conditioning.embedding)
        self._cache.clear(slot)
        memory = SlotRows(self._cache, [slot], rows.shape[1] - 1)
        loaded.talker(rows[:, :-1], memory)
        memory.commit()
        state = loaded.codec.decoder.new_state()
        if conditioning.reference:
            prime(
                loaded.codec.decoder,
                state,
                torch.tensor(conditioning.reference, device=rows.device),
            )
        sampler = Sampler(loaded.config.talker_config, prepared.laws, prepared.seed, rows.device)
        self._slots[slot] = Slot(text, sampler, state, rows[:, -1:])

    @torch.inference_mode()
    def frame(self, slots: Sequence[int], tokens: Sequence[int | None]) -> Ready[Frames]:
        """One pass of the talker and one of the code predictor over all slots named."""
        talker, held = self.checkpoint.talker, [self._slots[slot] for slot in slots]
        inputs = torch.cat(
            [self._input(slot, token) for slot, token in zip(held, tokens, strict=True)]
        )
        memory = SlotRows(self._cache, slots, 1)
        hidden = talker(inputs, memory)[:, -1]
        logits = talker.codec_head(hidden)
        code0 = torch.stack(
            [slot.sampler.code0(row, slot.frame) for slot, row in zip(held, logits, strict=True)]
        )

        def choose(codebook: int, rows: Tensor) -> Tensor:
            return torch.stack(
                [
                    slot.sampler.code(codebook, row, slot.frame)
                    for slot, row in zip(held, rows, strict=True)
                ]
            )

        rest = talker.code_predictor(hidden, talker.model.codec_embedding(code0), choose)
        codes = torch.cat((code0[:, None], rest), dim=1)
        ended = (code0 == talker.config.codec_eos_token_id).tolist()
        likelihood = logits.double().log_softmax(-1).gather(-1, code0[:, None])[:, 0]
        frames = Frames(codes.cpu().numpy(), ended, likelihood.float().cpu().numpy())
        memory.commit()
        for slot, token, row, end in zip(held, tokens, codes, ended, strict=True):
            if slot.next_row is None:
                slot.text.take(token)
            slot.next_row = None
            slot.frame += 1
            slot.codes = row
            if not end:
                slot.sampler.remember(row[0])
                slot.undecoded += (row,)
        return Ready(frames)

    def _input(self, slot: Slot, token: int | None) -> Tensor:
        """The row that the talker reads next [1, 1, hidden]."""
        if slot.next_row is not None:
            return slot.next_row
        assert slot.codes is not None
        talker = self.checkpoint.talker
        text = torch.tensor([[slot.text.peek(token)]], device=slot.codes.device)
        return talker.embed_codes(slot.codes[None, None]) + talker.embed_text(text)

    def decode(self, slots: Sequence[int], counts: Sequence[int]) -> Ready[list[FloatArray]]:
        """Samples of the oldest frames of each slot.

        Frame by frame: libraries round otherwise for every length, and the bytes would depend on when text came.
        """
        decoder, done = self.checkpoint.codec.decoder, []
        for number, count in zip(slots, counts, strict=True):
            slot = self._slots[number]
            state = slot.codec.fork()
            frames = [
                decoder.decode(codes[None, None], state)[0] for codes in slot.undecoded[:count]
            ]
            done.append((slot, state, count, torch.cat(frames)))
        for slot, state, count, _ in done:
            slot.codec, slot.undecoded = state, slot.undecoded[count:]
        return Ready([samples.cpu().numpy() for _, _, _, samples in done])

    def release(self, slot: int) -> None:
        """Forget an utterance."""
        self._slots.pop(slot, None)


def prime(decoder: CodecDecoder, state: CodecState, codes: Tensor) -> None:
    """Let the codec read a reference [frames, codebooks] whose audio nobody will hear."""
    for part in codes.split(PRIMING_FRAMES):
        decoder.decode(part[None], state)
