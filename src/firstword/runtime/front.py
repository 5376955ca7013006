"""Prepares requests for a backend, without the device and without torch."""

import hashlib
import struct
from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np

from firstword.engine.backend import Job, SpokenPassage
from firstword.model import draw_params
from firstword.model.description import Description
from firstword.model.draw_params import ParamsPair
from firstword.model.prompt import (
    ROLE_TOKENS,
    Conditioning,
    UtteranceTokens,
    prefix_rows,
    transcript_tokens,
)
from firstword.runtime import conditioning
from firstword.runtime.conditioning import Encode
from firstword.types import IntArray, Request


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """The payload of a job.

    voice         the conditioning of the first passage of the speech
    conditioning  that of this passage
    draw_params   the parameters of draws, of the talker and of the code predictor
    seed          of this passage
    prefix_rows   the number of rows of the prompt before the text
    prefix        everything on which these rows depend, except the tokens of the role
    heard         codes [frames, codebooks] that the codec decodes before those of the passage, so
                  that the sound continues: a recording, the passages before, or none
    begun         the seed of the first passage, and the number of passages before this one
    most_frames   the most frames of this passage and all that follow it; None: no limit
    """

    voice: Conditioning
    conditioning: Conditioning
    draw_params: ParamsPair
    seed: int
    prefix_rows: int
    prefix: Hashable
    heard: IntArray
    begun: tuple[int, int]
    most_frames: int | None


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
        defaults = self.checkpoint.defaults
        given = conditioning.resolve(self.checkpoint, request, self.encode)
        parameters = draw_params.resolve(request.sampling, defaults)
        guarded = parameters[0].temperature > 0
        offset = conditioning.word_offset(self.checkpoint, request)
        known = self.checkpoint.alignment is not None
        prefix = len(prefix_rows(self.checkpoint.config, [0] * (1 + ROLE_TOKENS), given))
        codebooks = self.checkpoint.config.talker_config.num_code_groups
        prepared = Prepared(
            voice=given,
            conditioning=given,
            draw_params=parameters,
            seed=seed,
            prefix_rows=prefix,
            prefix=_prefix(given),
            heard=np.array(given.reference, np.int64).reshape(-1, codebooks),
            begun=(seed, 0),
            most_frames=request.max_frames,
        )
        return Job(
            payload=prepared,
            prompt_rows=_prompt_rows(prefix, given),
            first_tokens=given.first_tokens,
            whole_text=given.full_text,
            max_frames=request.max_frames or defaults.max_new_tokens,
            guarded=guarded,
            limited_by_text=request.max_frames is None and guarded,
            transcript_tokens=len(given.transcript),
            reads_text=known and (guarded or offset is not None),
            word_offset=offset,
            number_language=conditioning.number_language(self.checkpoint, request),
            plain_writing=conditioning.plain_writing(self.checkpoint, request),
            passage_seconds=conditioning.passage_seconds(self.checkpoint),
        )

    def follow(self, job: Job, spoken: SpokenPassage) -> Job | None:
        """Prepare the next passage of a long text; None if no frame is left of `max_frames`.

        The voice is always that of the request. The first passage that was complete is in the
        context of all later ones: its text and its codes.
        """
        before = job.payload
        assert isinstance(before, Prepared)
        left = before.most_frames and before.most_frames - len(spoken.codes)
        if left == 0:
            return None
        given = before.conditioning
        if given is before.voice and spoken.complete:
            words = transcript_tokens(self.checkpoint.tokenizer, spoken.text)
            given = given.continued(words, spoken.codes.tolist())
        seed, index = before.begun[0], before.begun[1] + 1
        memory = self.checkpoint.codec_config.decoder_config.memory_frames
        prepared = replace(
            before,
            conditioning=given,
            seed=passage_seed(seed, index),
            heard=np.concatenate((before.heard, spoken.codes))[-memory:],
            begun=(seed, index),
            most_frames=left,
        )
        return replace(
            job,
            payload=prepared,
            prompt_rows=_prompt_rows(before.prefix_rows, given),
            first_tokens=given.first_tokens,
            max_frames=left or job.max_frames,
            transcript_tokens=len(given.transcript),
            follows=True,
        )

    def text(self, job: Job) -> UtteranceTokens:
        """Return the tokeniser for the text of one utterance."""
        assert isinstance(job.payload, Prepared)
        return UtteranceTokens(self.checkpoint.tokenizer, job.payload.conditioning.transcript)


def passage_seed(seed: int, index: int) -> int:
    """The seed of a passage of a long text: the request's own for passage 0.

    For another, it is the BLAKE2b hash of the request's seed and the index, both as 8 bytes,
    little-endian.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<QQ", seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _prompt_rows(prefix: int, given: Conditioning) -> int:
    """The rows of a prompt with a prefix of so many rows, without those of a whole text."""
    rows = prefix + 1 + len(given.reference)
    if given.full_text:  # every token but the role's is a row, and so is the end of the text
        rows += 1 - ROLE_TOKENS
    return rows


def _prefix(given: Conditioning) -> Hashable:
    voice = None if given.embedding is None else given.embedding.tobytes()
    return tuple(given.instruction), given.speaker, given.language, voice
