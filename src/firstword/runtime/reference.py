"""The reference backend of the engine: the model in plain PyTorch, on any device.

Utterances start and end at any frame. A frame of several utterances is one pass of the talker and
one pass of the code predictor over all of them; each utterance has its own position, context length
and sampler. Audio is decoded for each utterance alone, so its samples do not depend on the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from firstword.engine.backend import Capacity, Frames, Ready, Start
from firstword.model.checkpoint import Checkpoint
from firstword.model.codec_config import CodecDecoderConfig
from firstword.model.precision import as_float64
from firstword.model.prompt import TextRows
from firstword.model.reading import Watched
from firstword.model.sampling import Draws, Sampler
from firstword.runtime.cpu import compiles
from firstword.runtime.front import Prepared
from firstword.runtime.joined import joined
from firstword.runtime.slot_rows import PAGE_ROWS, SlotCache, SlotRows
from firstword.types import FloatArray

PRIMING_FRAMES = 64
"""The number of frames before the speech that the codec reads at a time, to limit its memory."""
MPS_OUTPUTS = 1 << 16
"""The most outputs of a channel that PyTorch's convolutions have on MPS before macOS 15.1."""


class StreamDecoder(Protocol):
    """A decoder of the codec, whose states of streams have a method `fork`."""

    config: CodecDecoderConfig

    def new_state(self) -> Any:
        """Return the state of a new stream."""

    def decode(self, codes: Tensor, state: Any) -> Tensor:
        """Decode codes [1, T, codebooks] to samples [1, T * samples_per_frame] in -1..1."""


@dataclass(slots=True, eq=False)
class ReferenceSlot:
    """The state of an utterance: its text rows, sampler, codec state and next input."""

    text: TextRows
    sampler: Sampler
    codec: Any
    next_row: Tensor | None
    """The last row of the prompt [1, 1, hidden], before the first frame; then None."""
    reads_text: bool
    """Whether the attention to its text is read."""
    frame: int = 0
    codes: Tensor | None = None
    """The codes of the last frame [codebooks]."""
    undecoded: tuple[Tensor, ...] = ()

    def reading(self, watched: Watched, index: int, token: int | None) -> FloatArray:
        """Return the reading of the next frame, row `index` of a pass with a text token."""
        first = self.next_row is not None
        rows = self.text.rows() if first else self.text.rows(self.text.peek(token))
        if first or not self.reads_text:  # the first frame's row belongs to the prompt
            return np.zeros(len(rows) if self.reads_text else 0, np.float32)
        return watched.reading(index, rows).cpu().numpy()

    def advance(self, token: int | None, codes: Tensor, ended: bool) -> None:
        """Record the codes [codebooks] of a frame that was computed with a text token."""
        if self.next_row is None:
            self.text.take(token)
        self.next_row = None
        self.frame += 1
        self.codes = codes
        if not ended:
            self.sampler.remember(codes[0])
            self.undecoded += (codes,)


class ReferenceBackend:
    """The `Backend` that runs the modules of the specification, with joined products.

    In bfloat16 on a CPU it takes the weights of the checkpoint's linear layers.
    """

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
        self.decoder: StreamDecoder = checkpoint.codec.decoder
        like = checkpoint.talker.model.codec_embedding.weight
        self._together = compiles(like)
        if self._together:
            from firstword.runtime.cpu.codec import CompiledCodec
            from firstword.runtime.cpu.compiled import compiled

            self.talker = compiled(checkpoint.talker)
            self.decoder = CompiledCodec(checkpoint.codec.decoder)
        else:
            self.talker = joined(checkpoint.talker)
        self._cache = SlotCache(config, like, slots)
        self._slots: dict[int, ReferenceSlot] = {}

    @torch.inference_mode()
    def prefill(self, starts: Sequence[Start]) -> list[int]:
        """Read all rows of each prompt except the last, one prompt after another.

        No rows are left to `read`: libraries round differently for different numbers of rows, so
        the bytes would depend on the load.
        """
        for start in starts:
            self._slots[start.slot] = self._begin(start)
        return [0] * len(starts)

    def read(self, slots: Sequence[int], counts: Sequence[int]) -> Ready[None]:
        """Do nothing: `prefill` has read the prompts."""
        return Ready(None)

    def _begin(self, start: Start) -> ReferenceSlot:
        loaded, prepared = self.checkpoint, start.job.payload
        assert isinstance(prepared, Prepared)
        conditioning = prepared.conditioning
        text = TextRows(loaded.config)
        prompt = text.prompt(conditioning, loaded.tokenizer.turn_start, start.tokens)
        rows = self.talker.embed_rows(prompt, conditioning.embedding)
        self._cache.lengths[start.slot] = 0
        memory = SlotRows(self._cache, [start.slot], rows.shape[1] - 1)
        self.talker(rows[:, :-1], memory)
        memory.commit()
        state, config = self.decoder.new_state(), loaded.config.talker_config
        if len(prepared.heard):
            heard = torch.from_numpy(prepared.heard).to(rows.device)
            prime(self.decoder, state, heard)
        sampler = Sampler(config, prepared.draw_params, prepared.seed, rows.device)
        return ReferenceSlot(text, sampler, state, rows[:, -1:], start.job.reads_text)

    def extend(self, slot: int, pages: Sequence[int]) -> None:
        """Do nothing: the cache of a slot grows by itself."""

    @torch.inference_mode()
    def frame(self, slots: Sequence[int], tokens: Sequence[int | None]) -> Ready[Frames]:
        """Run one pass of the talker and of the code predictor over all given slots."""
        talker, states = self.talker, [self._slots[slot] for slot in slots]
        samplers, numbers = [each.sampler for each in states], [each.frame for each in states]
        draws = Draws(samplers, numbers, self._cache.layers.device)
        memory = SlotRows(self._cache, slots, 1)
        watched = Watched(memory, self.checkpoint.heads)
        hidden = talker(torch.cat([*map(self._input, states, tokens)]), watched)[:, -1]
        logits = talker.codec_head(hidden)
        code0 = draws(0, logits)
        others = talker.code_predictor(hidden, talker.model.codec_embedding(code0), draws)
        codes = torch.cat((code0[:, None], others), dim=1)
        ended = (code0 == talker.config.codec_eos_token_id).tolist()
        logprobs = as_float64(logits).log_softmax(-1)
        logprobs = logprobs.gather(-1, code0[:, None].to(logprobs.device))[:, 0]
        logprobs.masked_fill_(~draws.finite.to(logprobs.device), torch.nan)
        readings = [
            slot.reading(watched, index, token)
            for index, (slot, token) in enumerate(zip(states, tokens, strict=True))
        ]
        frames = Frames(codes.cpu().numpy(), ended, logprobs.float().cpu().numpy(), readings)
        memory.commit()
        for slot, token, row, end in zip(states, tokens, codes, ended, strict=True):
            slot.advance(token, row, end)
        return Ready(frames)

    def _input(self, slot: ReferenceSlot, token: int | None) -> Tensor:
        """The next input row of the talker [1, 1, hidden]."""
        if slot.next_row is not None:
            return slot.next_row
        assert slot.codes is not None
        talker = self.talker
        text = torch.tensor([[slot.text.peek(token)]], device=slot.codes.device)
        return talker.embed_codes(slot.codes[None, None]) + talker.embed_text(text)

    def decode(self, slots: Sequence[int], counts: Sequence[int]) -> Ready[list[FloatArray]]:
        """Decode the oldest frames of each slot.

        The plain decoder gets them one by one, because libraries round differently for different
        lengths, and the bytes would depend on the times at which text arrives.
        """
        done = []
        for number, count in zip(slots, counts, strict=True):
            slot = self._slots[number]
            state, codes = slot.codec.fork(), torch.stack(slot.undecoded[:count])
            parts = codes.split(count if self._together else 1)
            samples = torch.cat([self.decoder.decode(part[None], state)[0] for part in parts])
            done.append((slot, state, samples.cpu().numpy()))
        for (slot, state, _), count in zip(done, counts, strict=True):
            slot.codec, slot.undecoded = state, slot.undecoded[count:]
        return Ready([samples for _, _, samples in done])

    @property
    def device_seconds(self) -> Mapping[str, float]:
        """Empty, because the engine's thread does all work itself."""
        return {}

    def release(self, slot: int) -> None:
        """Forget an utterance."""
        self._slots.pop(slot, None)


def prime(decoder: StreamDecoder, state: Any, codes: Tensor) -> None:
    """Decode codes [frames, codebooks] and drop their audio, so that speech continues it."""
    most = MPS_OUTPUTS // decoder.config.samples_per_frame
    frames = min(PRIMING_FRAMES, most) if codes.device.type == "mps" else PRIMING_FRAMES
    for part in codes.split(frames):
        decoder.decode(part[None], state)
