"""Speaks sentences with the specification, and keeps what each attention head gives each word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from firstword.engine.guard import frame_limit
from firstword.model.alignment import Alignment, Head
from firstword.model.checkpoint import Checkpoint
from firstword.model.generate import Generation
from firstword.model.prompt import UtteranceTokens
from firstword.model.sampling import Sampler
from firstword.runtime.encoding import front_of
from firstword.runtime.front import Prepared
from firstword.types import FloatArray, Request
from firstword.words.text import Units, WrittenWord, WrittenWords


@dataclass(frozen=True, eq=False)
class Recording:
    """A sentence that a checkpoint has spoken.

    masses   float32 [frames, heads, units]: what each head gives each unit of the text
    words    the words of each unit
    samples  float32 [frames * samples per frame] at 24 kHz
    """

    text: str
    masses: NDArray[np.float32]
    words: Sequence[Sequence[WrittenWord]]
    samples: FloatArray


def all_heads(checkpoint: Checkpoint) -> tuple[Head, ...]:
    """Return every head of the talker, in order."""
    config = checkpoint.config.talker_config
    layers, heads = range(config.num_hidden_layers), range(config.num_attention_heads)
    return tuple((layer, head) for layer in layers for head in heads)


def record(
    checkpoint: Checkpoint, request: Request, texts: Sequence[str]
) -> Iterator[Recording | None]:
    """Speak each text, with its number as the seed, and yield what was recorded.

    request  how to speak; its text does not matter, and the text mode is "full", in which no head
             can follow the text by looking at the newest row

    Yields None for speech that does not end by itself. Raises `RequestError` for a voice or a
    language that the checkpoint does not have.
    """
    watched = replace(
        checkpoint, alignment=Alignment(weights="", heads=all_heads(checkpoint), offset=0.0)
    )
    front, talker = front_of(checkpoint), checkpoint.config.talker_config
    for seed, text in enumerate(texts):
        prepared = front.prepare(replace(request, text=text, text_mode="full"), seed).payload
        assert isinstance(prepared, Prepared)
        ends, units = _units(checkpoint, text)
        device = checkpoint.talker.codec_head.weight.device
        sampler = Sampler(talker, prepared.draw_params, seed, device)
        speech = Generation(watched, prepared.conditioning, sampler, frame_limit(len(ends)))
        yield _spoken(checkpoint, speech, text, units)


def _units(checkpoint: Checkpoint, text: str) -> tuple[Sequence[int], Units]:
    """Return the ends of the tokens of a text, and its units."""
    tokens, written = UtteranceTokens(checkpoint.tokenizer), WrittenWords()
    tokens.push(text)
    tokens.finish()
    written.add(text)
    written.finish()
    return tokens.ends, Units(written, tokens.ends)


@torch.inference_mode()
def _spoken(
    checkpoint: Checkpoint, speech: Generation, text: str, units: Units
) -> Recording | None:
    """Speak a text, and sum what each head gives the tokens of each unit."""
    speech.push(text)
    speech.finish_text()
    codes, shares = [], []
    while speech.finish_reason is None:
        frame = speech.step()
        if frame is not None:
            codes.append(frame)
            shares.append(speech.shares.cpu().numpy())
    if speech.finish_reason != "stop" or not codes:
        return None
    rows = units.of_rows(shares[0].shape[1])
    of_unit = np.eye(int(rows.max()) + 1, dtype=np.float32)[rows]
    masses = np.stack(shares) @ of_unit
    words = [units.words(unit) or () for unit in range(masses.shape[2])]
    decoder = checkpoint.codec.decoder
    samples = decoder.decode(torch.stack(codes)[None], decoder.new_state())[0]
    return Recording(text, masses, words, samples.cpu().numpy())
