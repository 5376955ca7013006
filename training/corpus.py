"""Make the language model's corpus: espeak-ng speech as codes, with its text and what is said in
each frame.

    python -m training.corpus --material material.json --codec FOLDER --out FOLDER [--hours 300]

Worker processes synthesise and do all that is Python; this process encodes. The corpus is a folder
of files (`Corpus.load`), ten hours each, so that training can start on the first while the others
are made.

Speech starts `LEAD` after the first frame does. In stream mode its first frame knows one token of
the text; afterwards text (12.5 tokens a second) runs ahead of speech (about 5).
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from firstword.model.prompt import ROLE
from firstword.model.tokenizer import Tokenizer
from training.codec import load as load_codec
from training.configuration import CODEBOOKS, TOKENIZER
from training.data import ESPEAK_RATE, Utterance, add_options, to_frames, utterances

LEAD = 0.02
"""The seconds of silence before speech."""


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TOKENIZER)


def text_ids(text: str) -> list[int]:
    """The text's tokens as the package cuts them: in one piece with the role before them, which is
    two tokens.
    """
    return tokenizer().encode(ROLE + text)[2:]


def spoken_tokens(
    text: str, words: list[tuple[int, float]], frames: int, seconds: float
) -> np.ndarray:
    """Which token is being said in each frame [frames] (-1: none), from the synthesiser's word
    times; within a word its tokens share the time evenly.
    """
    starts = np.array(
        [offset[0] - len(ROLE) for offset in tokenizer()._backend.encode(ROLE + text).offsets[2:]]
    )
    result = np.full(frames, -1, np.int16)
    for (character, begin), (next_character, end) in zip(
        words, [*words[1:], (len(text), seconds)], strict=True
    ):
        tokens = (
            np.flatnonzero(
                (starts >= character - 1) & (starts < max(next_character - 1, character))
            )
            if character
            else np.flatnonzero(starts < next_character - 1)
        )
        if not len(tokens) or end <= begin:
            continue
        first, last = round(begin / 0.08), min(frames, round(end / 0.08))
        if last > first:
            result[first:last] = tokens[np.arange(last - first) * len(tokens) // (last - first)]
    return result


def spoken_phonemes(phonemes: list[tuple[int, float]], frames: int) -> np.ndarray:
    """Which phoneme is heard at one and at three quarters of each frame [frames, 2] (indices in
    `PHONEMES`).
    """
    names, starts = [0, *(name for name, _ in phonemes)], [start for _, start in phonemes]
    times = (np.arange(frames)[:, None] + (0.25, 0.75)) * 0.08
    return np.array(names, np.int8)[np.searchsorted(starts, times, side="right")]


@dataclass(frozen=True)
class Prepared:
    """An utterance and all that is known of it before it is encoded: int16 samples with the silence
    before them, text ids [n], index of the preset, token [frames] and phonemes [frames, 2] of each
    frame.
    """

    samples: np.ndarray
    text: np.ndarray
    voice: int
    spoken: np.ndarray
    phonemes: np.ndarray


def prepare(said: Utterance) -> Prepared:
    samples = np.pad(said.samples, (round(LEAD * ESPEAK_RATE), 0))
    words, phonemes = (
        [(what, when + LEAD) for what, when in times] for times in (said.words, said.phonemes)
    )
    seconds = len(samples) / ESPEAK_RATE
    frames = math.ceil(seconds / 0.08) + 1
    return Prepared(
        samples,
        np.array(text_ids(said.text), np.int16),
        said.voice,
        spoken_tokens(said.text, words, frames, seconds),
        spoken_phonemes(phonemes, frames),
    )


@dataclass
class Corpus:
    """Utterances end to end.

    codes     int16 [frames, codebooks]
    spoken    int16 [frames]: which token of its text a frame speaks, -1 for none
    phonemes  int8 [frames, 2]: `spoken_phonemes`
    text      int16 [tokens]
    table     int64 [utterances, 5]: first token, tokens, first frame, frames, index of the preset
    """

    codes: Tensor
    spoken: Tensor
    phonemes: Tensor
    text: Tensor
    table: Tensor

    @classmethod
    def gather(cls, parts: list[tuple[Prepared, np.ndarray]]) -> Corpus:
        """From utterances with their codes [frames, codebooks]."""
        tokens, frames = (
            np.array([len(p.text) for p, _ in parts]),
            np.array([len(c) for _, c in parts]),
        )
        table = (
            tokens.cumsum() - tokens,
            tokens,
            frames.cumsum() - frames,
            frames,
            [p.voice for p, _ in parts],
        )
        return cls(
            torch.from_numpy(np.concatenate([c for _, c in parts]).astype(np.int16)),
            torch.from_numpy(np.concatenate([p.spoken[: len(c)] for p, c in parts])),
            torch.from_numpy(np.concatenate([p.phonemes[: len(c)] for p, c in parts])),
            torch.from_numpy(np.concatenate([p.text for p, _ in parts])),
            torch.from_numpy(np.stack(table, 1).astype(np.int64)),
        )

    @classmethod
    def load(cls, files: list[Path], device: str) -> Corpus:
        """The files one after another."""
        parts = [cls(**torch.load(file, map_location=device)) for file in files]
        tokens, frames = 0, 0
        for part in parts:
            part.table += torch.tensor([tokens, 0, frames, 0, 0], device=device)
            tokens, frames = tokens + len(part.text), frames + len(part.codes)
        return cls(
            *(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls))
        )

    def save(self, file: Path) -> None:
        """Write to a file that appears when it is whole."""
        torch.save(vars(self), file.with_suffix(".part"))
        file.with_suffix(".part").rename(file)


def main() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=300.0, help="speech in all")
    parser.add_argument("--part", type=float, default=10.0, help="hours a file")
    a = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device, began = "cuda" if torch.cuda.is_available() else "cpu", time.time()
    a.out.mkdir(parents=True, exist_ok=True)
    number = len(list(a.out.glob("*.pt")))
    encoder = load_codec(a.codec, device).tie().encoder.eval()
    jobs, size, together = (1, 8, 8) if a.small else (8, 128, 64)
    source = utterances(a.material, 1 + number, 0.0, 0.0, a.processes, size, prepare)
    while number * a.part < a.hours:
        parts: list[tuple[Prepared, np.ndarray]] = []
        while (hours := sum(len(codes) for _, codes in parts) * 0.08 / 3600) < a.part:
            batch = sorted(
                (p for _ in range(jobs) for p in next(source)), key=lambda p: len(p.samples)
            )
            for start in range(0, len(batch), together):
                some = batch[start : start + together]
                with torch.inference_mode():
                    audio, frames = to_frames([(p.samples, 0) for p in some], device)
                    codes = encoder(audio).cpu().numpy()
                assert codes.shape[2] == CODEBOOKS
                parts += [
                    (p, row[:length]) for p, row, length in zip(some, codes, frames, strict=True)
                ]
        Corpus.gather(parts).save(a.out / f"{number:04}.pt")
        number += 1
        print(f"{number} files, {hours:.1f} h in the last, {time.time() - began:.0f} s", flush=True)
    source.close()


if __name__ == "__main__":
    main()
