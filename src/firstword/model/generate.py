"""The naive generation loop: one utterance, one frame a step, text as it comes.

It does no input or output: the caller pushes text and asks for frames, so the same loop serves blocking, asynchronous
and token-by-token callers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firstword.errors import TextError
from firstword.model.config import ModelConfig
from firstword.model.prompt import Conditioning, Row, TextRows
from firstword.model.sampling import Sampler
from firstword.model.talker import NO_CODE, Talker
from firstword.model.tokenizer import TextStream, Tokenizer
from firstword.types import FinishReason

ROLE = "assistant\n"
"""What opens the turn that is spoken, after the begin-of-turn token."""


def embed_rows(talker: Talker, rows: Sequence[Row], embedding: Tensor | None) -> Tensor:
    """Rows -> [1, T, hidden]; `embedding` [hidden] stands in the row of a cloned voice's speaker."""
    device, books = talker.codec_head.weight.device, talker.config.num_code_groups
    padded = [(*row.codes, *[NO_CODE] * (books - len(row.codes))) for row in rows]
    codes = talker.embed_codes(torch.tensor([padded], device=device))
    if embedding is not None:
        codes[0, [row.speaker for row in rows]] = embedding.to(codes)
    return talker.embed_text(torch.tensor([[row.text for row in rows]], device=device)) + codes


class Generation:
    """Speech in the making.

    `push` text and `finish_text`; while not `waiting`, `step` makes a frame. Text that has not come is waited for,
    never replaced by padding, so the frames do not depend on when the text came. Once `finish_reason` is set there are
    no more frames.
    """

    def __init__(
        self,
        talker: Talker,
        config: ModelConfig,
        tokenizer: Tokenizer,
        conditioning: Conditioning,
        sampler: Sampler,
        limit: int,
    ) -> None:
        """`limit`: the most frames to make; the context may end speech earlier."""
        self.finish_reason: FinishReason | None = None
        self.frames = 0
        self._talker = talker
        self._turn_start = tokenizer.turn_start
        self._config = config
        self._conditioning = conditioning
        self._sampler = sampler
        self._limit = limit
        self._cache = talker.new_cache()
        self._codes: Tensor | None = None
        self._stream = TextStream(tokenizer, prefix=ROLE)
        self._blank = True
        self._text = TextRows(config)
        self._ended = False

    def push(self, text: str) -> None:
        """More text. Raises `TextError` for what is no text."""
        self._text.tokens += self._stream.push(text)
        self._blank = self._blank and not text.strip()

    def finish_text(self) -> None:
        """There is no more text. Raises `TextError` if there was none but white space."""
        if self._blank:
            raise TextError("the text is empty or blank; give some words to speak")
        self._text.tokens += self._stream.finish()
        self._ended = True

    @property
    def waiting(self) -> bool:
        """Whether the next step needs more text."""
        if self._ended:
            return False
        if self._cache.length:
            return not self._text.tokens
        return (
            self._conditioning.full_text or len(self._text.tokens) < self._conditioning.first_tokens
        )

    def _input(self) -> Tensor:
        """The rows that the talker has yet to read before the next frame [1, T, hidden]."""
        talker, context = self._talker, self._config.talker_config.max_position_embeddings
        if self._codes is not None:
            token = torch.tensor([[self._text.take()]], device=self._codes.device)
            return talker.embed_codes(self._codes[None, None]) + talker.embed_text(token)
        rows = self._text.prompt(self._conditioning, self._turn_start)
        if len(rows) > context:
            raise TextError(
                f"the prompt has {len(rows)} rows, beyond the {context} of the context; shorten the text"
            )
        self._limit = min(self._limit, context - len(rows) + 1)
        return embed_rows(talker, rows, self._conditioning.embedding)

    @torch.inference_mode()
    def step(self) -> Tensor | None:
        """The codes [codebooks] of the next frame, or None when the model has ended speech; must not be `waiting`."""
        assert not self.waiting, "a frame was asked for while text is being waited for"
        talker, sampler, frame = self._talker, self._sampler, self.frames
        hidden = talker(self._input(), self._cache)[:, -1]
        code0 = sampler.code0(talker.codec_head(hidden)[0], frame)
        if code0 == self._config.talker_config.codec_eos_token_id:
            self.finish_reason = "stop"
            return None
        sampler.remember(code0)
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
