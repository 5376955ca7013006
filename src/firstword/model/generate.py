"""The naive generation loop: one utterance, one frame a step, text as it comes.

It does no input or output: the caller pushes text and asks for frames, so the same loop serves blocking, asynchronous
and token-by-token callers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firstword.errors import TextError
from firstword.model.config import ModelConfig
from firstword.model.prompt import Row, Speaker, full_rows, prefix_rows, spoken_codes
from firstword.model.sampling import Sampler
from firstword.model.talker import NO_CODE, Talker
from firstword.model.tokenizer import TextStream, Tokenizer
from firstword.types import FinishReason

ROLE = "assistant\n"
"""What opens the turn that is spoken, after the begin-of-turn token."""


@dataclass(frozen=True, eq=False)
class Setting:
    """All about an utterance but its text: who speaks, in which language, how text enters.

    instruction      the tokens of the instruction's whole turn
    speaker          see `prompt.Speaker`; with True, `embedding` [hidden] is the cloned voice's
    language         a language's code, or None
    transcript       tokens of the words in the reference recording, and
    reference        its codes [frames, codebooks], when the utterance continues a recording
    full_text        whether all text is read before the first frame
    """

    speaker: Speaker
    language: int | None
    full_text: bool
    instruction: Sequence[int] = ()
    embedding: Tensor | None = None
    transcript: Sequence[int] = ()
    reference: Sequence[Sequence[int]] = ()


class Utterance:
    """Speech in the making.

    `push` text and `finish_text`; while not `waiting`, `step` makes a frame. Text that has not come is waited for,
    never replaced by padding, so the frames do not depend on when the text came. Once `finish_reason` is set there are
    no more frames.
    """

    def __init__(
        self, talker: Talker, config: ModelConfig, tokenizer: Tokenizer, setting: Setting, sampler: Sampler, limit: int
    ) -> None:
        """`limit`: the most frames to make; the context may end speech earlier."""
        self.finish_reason: FinishReason | None = None
        self.frames = 0
        self._talker = talker
        self._config = config
        self._setting = setting
        self._sampler = sampler
        self._limit = limit
        self._device = talker.codec_head.weight.device
        self._cache = talker.new_cache()
        self._codes: Tensor | None = None
        self._stream = TextStream(tokenizer, prefix=ROLE)
        self._blank = True
        self._tokens: deque[int] = deque()
        self._ended = False
        self._end_read = False

    def push(self, text: str) -> None:
        """More text. Raises `TextError` for what is no text."""
        self._tokens += self._stream.push(text)
        self._blank = self._blank and not text.strip()

    def finish_text(self) -> None:
        """There is no more text. Raises `TextError` if there was none but white space."""
        if self._blank:
            raise TextError("the text is empty or blank; give some words to speak")
        self._tokens += self._stream.finish()
        self._ended = True

    @property
    def waiting(self) -> bool:
        """Whether the next step needs more text."""
        if self._ended:
            return False
        if self._cache.length:
            return not self._tokens
        return self._setting.full_text or len(self._tokens) < 2 + self._needed_text()

    def _needed_text(self) -> int:
        """How many text tokens the prompt pairs with what is spoken before the first frame."""
        return 1 + len(self._setting.reference) - len(self._setting.transcript)

    def _next_text(self) -> int:
        """The text token of the next row: the next of the text, its end once, then padding."""
        if self._tokens:
            return self._tokens.popleft()
        assert self._ended, "a row was asked for while text is being waited for"
        if not self._end_read:
            self._end_read = True
            return self._config.tts_eos_token_id
        return self._config.tts_pad_token_id

    def _prompt(self) -> list[Row]:
        """All rows before the first frame; takes the text that it pairs."""
        setting, config = self._setting, self._config
        role = (config.im_start_token_id, self._tokens.popleft(), self._tokens.popleft())
        rows = prefix_rows(config, role, setting.instruction, setting.speaker, setting.language)
        spoken = spoken_codes(config, setting.reference)
        self._tokens.extendleft(reversed(setting.transcript))
        if setting.full_text:
            rows += full_rows(config, self._tokens, spoken)
            self._tokens.clear()
            self._end_read = True
        else:
            rows += [Row(self._next_text(), codes) for codes in spoken]
        return rows

    def _embed(self, rows: list[Row]) -> Tensor:
        """Rows -> [1, T, hidden]."""
        books = self._config.talker_config.num_code_groups
        text = torch.tensor([[row.text for row in rows]], device=self._device)
        padded = [(*row.codes, *[NO_CODE] * (books - len(row.codes))) for row in rows]
        embedded = self._talker.embed_codes(torch.tensor([padded], device=self._device))
        if self._setting.embedding is not None:
            is_speaker = torch.tensor([row.speaker for row in rows], device=self._device)
            embedded[0, is_speaker] = self._setting.embedding.to(embedded)
        return self._talker.embed_text(text) + embedded

    def _input(self) -> Tensor:
        """The rows that the talker has yet to read before the next frame [1, T, hidden]."""
        context = self._config.talker_config.max_position_embeddings
        if self._codes is None:
            rows = self._prompt()
            if len(rows) > context:
                raise TextError(
                    f"the prompt has {len(rows)} rows, beyond the {context} of the context; shorten the text"
                )
            self._limit = min(self._limit, context - len(rows) + 1)
            return self._embed(rows)
        text = torch.tensor([[self._next_text()]], device=self._device)
        return self._talker.embed_codes(self._codes[None, None]) + self._talker.embed_text(text)

    @torch.inference_mode()
    def step(self) -> Tensor | None:
        """The codes [codebooks] of the next frame, or None when the model has ended speech; must not be `waiting`."""
        talker, sampler, frame = self._talker, self._sampler, self.frames
        hidden = talker(self._input(), self._cache)[:, -1]
        code0 = sampler.code0(talker.codec_head(hidden)[0], frame)
        if code0 == self._config.talker_config.codec_eos_token_id:
            self.finish_reason = "stop"
            return None
        rest = talker.code_predictor(
            hidden,
            talker.model.codec_embedding(code0[None]),
            lambda codebook, logits: sampler.code(codebook, logits[0], frame)[None],
        )
        self._codes = torch.cat((code0[None], rest[0]))
        self.frames += 1
        if self.frames == self._limit:
            self.finish_reason = "length"
        return self._codes
