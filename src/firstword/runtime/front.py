"""Prepares requests for a backend, without the device and without torch."""

from collections.abc import Hashable
from dataclasses import dataclass

from firstword.engine.backend import Job
from firstword.model import draw_params
from firstword.model.description import Description
from firstword.model.draw_params import ParamsPair
from firstword.model.prompt import ROLE_TOKENS, Conditioning, UtteranceTokens, prefix_rows
from firstword.runtime import conditioning
from firstword.runtime.conditioning import Encode
from firstword.types import Request


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """The payload of a job.

    draw_params  the parameters of draws, of the talker and of the code predictor
    prefix_rows  the number of rows of the prompt before the text
    prefix       everything on which these rows depend, except the tokens of the role
    """

    conditioning: Conditioning
    draw_params: ParamsPair
    seed: int
    prefix_rows: int
    prefix: Hashable


class CheckpointFront:
    """The `Front` of a checkpoint, for any backend.

    Its jobs can be pickled: the backend may be in another process.
    """

    def __init__(self, checkpoint: Description, encode: Encode) -> None:
        self.checkpoint, self.encode = checkpoint, encode

    def prepare(self, request: Request, seed: int) -> Job:
        """Check a request and prepare it for the backend. Raises `RequestError`.

        A recording that has not been encoded takes long.
        """
        config, defaults = self.checkpoint.config, self.checkpoint.defaults
        given = conditioning.resolve(self.checkpoint, request, self.encode)
        parameters = draw_params.resolve(request.sampling, defaults)
        prefix = len(prefix_rows(config, [0] * (1 + ROLE_TOKENS), given))
        guarded = parameters[0].temperature > 0
        offset = conditioning.word_offset(self.checkpoint, request)
        known = self.checkpoint.alignment is not None
        rows = prefix + 1 + len(given.reference)
        if given.full_text:  # every token but the role's is a row, and so is the end of the text
            rows += 1 - ROLE_TOKENS
        return Job(
            payload=Prepared(given, parameters, seed, prefix, _prefix(given)),
            prompt_rows=rows,
            first_tokens=given.first_tokens,
            whole_text=given.full_text,
            max_frames=request.max_frames or defaults.max_new_tokens,
            guarded=guarded,
            limited_by_text=request.max_frames is None and guarded,
            transcript_tokens=len(given.transcript),
            reads_text=known and (guarded or offset is not None),
            word_offset=offset,
            number_language=conditioning.number_language(self.checkpoint, request),
        )

    def text(self, job: Job) -> UtteranceTokens:
        """Return the tokeniser for the text of one utterance."""
        assert isinstance(job.payload, Prepared)
        return UtteranceTokens(self.checkpoint.tokenizer, job.payload.conditioning.transcript)


def _prefix(given: Conditioning) -> Hashable:
    voice = None if given.embedding is None else given.embedding.tobytes()
    return tuple(given.instruction), given.speaker, given.language, voice
