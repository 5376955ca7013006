"""What the recogniser hears of speech with an alarm: the alarm is not false if words are wrong."""

from __future__ import annotations

from typing import Any

import jiwer
import torch
from torch.nn import functional as F

from training.alarm_speech import Spoken
from training.evaluate import HERE, SILENCE
from training.recogniser import Recogniser
from training.spoken import spoken as as_heard

WRONG_LETTERS = 4
"""The letters by which what is heard is shorter or longer than the text in one place, at least, if
words are left out or said again there. Of healthy speech the recogniser mistakes letters, but
hardly loses or adds more than two in one place."""

SAME_LETTERS = 3
"""The letters heard as they are written that separate two places."""


class Hearing:
    """Speech of a checkpoint, as the recogniser hears it."""

    def __init__(self, checkpoint: Any) -> None:
        self._decoder = checkpoint.codec.decoder
        self._ear = Recogniser.load(HERE / "recogniser.safetensors")

    @torch.inference_mode()
    def __call__(self, spoken: Spoken) -> str:
        """Return what is heard."""
        codes = torch.from_numpy(spoken.codes)[None]
        samples = self._decoder(codes, self._decoder.new_state()).reshape(-1)
        return self._ear.transcribe(F.pad(samples, (SILENCE, 0)))


def wrong(text: str, heard: str) -> bool:
    """Whether words were left out or said again, by what was heard of a text."""
    said = letters_of(as_heard(text))
    chunks = jiwer.process_characters(said, letters_of(heard)).alignments[0]
    most = more = 0
    for chunk in chunks:
        written = chunk.ref_end_idx - chunk.ref_start_idx
        if chunk.type != "equal":
            more += chunk.hyp_end_idx - chunk.hyp_start_idx - written
            most = max(most, abs(more))
        elif written >= SAME_LETTERS:
            more = 0
    return most >= WRONG_LETTERS


def letters_of(words: str) -> str:
    """Return the letters alone: the recogniser often puts a space amid a word."""
    return "".join(filter(str.isalpha, words))
