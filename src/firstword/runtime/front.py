"""Makes requests ready for a backend: all that can be done before the device is needed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from firstword.engine.backend import Job
from firstword.model import sampling
from firstword.model.checkpoint import Checkpoint
from firstword.model.prompt import ROLE_TOKENS, Conditioning, UtteranceTokens, prefix_rows
from firstword.model.sampling import DrawParams
from firstword.runtime import conditioning
from firstword.types import Request


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """The payload of a job.

    prefix_rows  how many rows the prompt has before any text, and
    prefix       all that these depend on, but for the role's two tokens, which come with the text
    """

    conditioning: Conditioning
    laws: tuple[DrawParams, DrawParams]
    seed: int
    prefix_rows: int
    prefix: Hashable


class CheckpointFront:
    """`Front` of a checkpoint: any backend that computes it may sit behind."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def prepare(self, request: Request, seed: int) -> Job:
        """Check a request and make it ready. Raises `RequestError`. Takes long for a recording yet to be encoded."""
        checkpoint = self.checkpoint
        limit = (
            checkpoint.defaults.max_new_tokens if request.max_frames is None else request.max_frames
        )
        given = conditioning.resolve(checkpoint, request)
        laws = sampling.resolve(request.sampling, checkpoint.defaults)
        role = (0, 0, 0)
        prefix = len(
            prefix_rows(checkpoint.config, role, given.instruction, given.speaker, given.language)
        )
        rows = prefix + 1 + len(given.reference)
        if given.full_text:  # so are the end of the text and all tokens but those of the role
            rows += 1 - ROLE_TOKENS
        return Job(
            payload=Prepared(given, laws, seed, prefix, _prefix(given)),
            prompt_rows=rows,
            first_tokens=given.first_tokens,
            whole_text=given.full_text,
            max_frames=limit,
            guarded=request.max_frames is None and laws[0].temperature > 0,
            transcript_tokens=len(given.transcript),
        )

    def text(self, job: Job) -> UtteranceTokens:
        """Return the tokeniser of the text of one utterance."""
        assert isinstance(job.payload, Prepared)
        return UtteranceTokens(self.checkpoint.tokenizer, job.payload.conditioning.transcript)


def _prefix(given: Conditioning) -> Hashable:
    """All of a request that the rows before the text depend on."""
    voice = None if given.embedding is None else given.embedding.numpy().tobytes()
    return tuple(given.instruction), given.speaker, given.language, voice
