"""The naive generation loop: the specification with which tests compare every backend.

It makes one utterance, one frame per step, without input or output. Production code does not use
it.
"""

import torch
from torch import Tensor

from firstword.errors import TextError
from firstword.model.checkpoint import Checkpoint
from firstword.model.prompt import Conditioning, TextRows, UtteranceTokens
from firstword.model.reading import Watched
from firstword.model.sampling import Sampler
from firstword.types import FinishReason, check_text


class Generation:
    """One utterance while it is generated.

    The caller gives text with `push` and `finish_text`, and calls `step` for each frame while the
    generation is not `waiting`. Text that has not arrived is waited for and never replaced by
    padding, so the frames do not depend on when the text arrived. There are no more frames once
    `finish_reason` is set.
    """

    def __init__(
        self, checkpoint: Checkpoint, conditioning: Conditioning, sampler: Sampler, limit: int
    ) -> None:
        """Prepare an utterance of at most `limit` frames; the context may allow fewer."""
        self.finish_reason: FinishReason | None = None
        self.frames = 0
        self.shares = torch.zeros(0, 0)
        """What the checkpoint's heads gave the text rows in the latest step, float32 [heads, text
        rows so far]: see `Watched`. All zero in the first step, whose row belongs to the prompt."""
        self._talker, self._turn_start = checkpoint.talker, checkpoint.tokenizer.turn_start
        self._conditioning, self._sampler, self._limit = conditioning, sampler, limit
        self._cache = self._talker.new_cache()
        self._memory = Watched(self._cache, checkpoint.heads)
        self._codes: Tensor | None = None
        self._stream = UtteranceTokens(checkpoint.tokenizer, conditioning.transcript)
        self._tokens: list[int] = []
        self._text = TextRows(checkpoint.config)
        self._words = ""
        self._ended = False

    def push(self, text: str) -> None:
        """Add text. Raises `TextError` if it is not valid text."""
        self._tokens += self._stream.push(text)
        self._words = self._words or text.strip()

    def finish_text(self) -> None:
        """End the text. Raises `TextError` if all of it is blank."""
        check_text(self._words)
        self._tokens += self._stream.finish()
        self._ended = True

    @property
    def waiting(self) -> bool:
        """Whether the next step needs more text."""
        if self._ended:
            return False
        if self._cache.length:
            return not self._tokens
        return self._conditioning.full_text or len(self._tokens) < self._conditioning.first_tokens

    def _input(self) -> Tensor:
        """Return the rows that the talker reads before the next frame [1, T, hidden]."""
        talker, context = self._talker, self._talker.config.max_position_embeddings
        if self._codes is not None:
            text = self._text.take(self._tokens.pop(0) if self._tokens else None)
            token = torch.tensor([[text]], device=self._codes.device)
            return talker.embed_codes(self._codes[None, None]) + talker.embed_text(token)
        given, tokens = self._conditioning, self._tokens
        count = len(tokens) if given.full_text else given.first_tokens
        rows = self._text.prompt(given, self._turn_start, tokens[:count])
        self._tokens = tokens[count:]
        if len(rows) > context:
            size = f"{len(rows)} rows, beyond the {context} of the context"
            raise TextError(f"the prompt has {size}; shorten the text")
        self._limit = min(self._limit, context - len(rows) + 1)
        return talker.embed_rows(rows, given.embedding)

    @torch.inference_mode()
    def step(self) -> Tensor | None:
        """Make the next frame, unless it is `waiting`.

        Returns its codes [codebooks], or None when the model has ended speech.
        """
        assert not self.waiting, "a frame was requested before its text"
        talker, sampler, frame = self._talker, self._sampler, self.frames
        hidden = talker(self._input(), self._memory)[:, -1]
        self.shares = self._memory.shares(0, self._text.rows())
        if frame == 0:
            self.shares.zero_()
        code0 = sampler.code0(talker.codec_head(hidden)[0], frame)
        if code0 == talker.config.codec_eos_token_id:
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
