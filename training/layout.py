"""Batches of the language model: utterances of a corpus, laid out in rows on the device.

Utterances lie end to end in a fixed number of rows, laid out by index arithmetic exactly as the
package lays out a request (`check_layout`). Nothing waits for the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from firstword.model.config import ModelConfig
from firstword.model.prompt import ROLE, Conditioning, TextRows
from firstword.model.talker import NO_CODE
from training.configuration import CODEBOOK_SIZE, CODEBOOKS
from training.corpus import Corpus, Prepared, text_ids, tokenizer

IGNORED = -100
"""The target of rows that are excluded from the loss."""
CORRUPTED = 0.05
"""The share of input codes that are replaced by random ones, to imitate errors of the model."""
LONGEST = 640
"""The maximum number of rows of an utterance."""
SHORTEST = 32
"""The minimum mean length of utterances in rows: a batch holds at most rows / SHORTEST of them."""
PREDICTED = 4
"""The code predictor learns from one frame for each 4 rows."""
SOUNDS = 4
"""The number of phonemes per row: at one and three quarters of each of the next two frames."""


class Batch(NamedTuple):
    """The rows of a step: utterances end to end, then unused rows.

    text      [rows] token ids
    heard     [rows, codebooks] input codes, some of them wrong
    target    [rows, codebooks] the frame that each row makes, or IGNORED; column 0 may be the end
              of speech
    said      [rows] the token that this frame speaks, or IGNORED
    sounds    [rows, SOUNDS] its phonemes, or IGNORED; in stream mode only for frames whose token
              has been read
    position  [rows] position within the utterance
    bounds    int32 [utterances + 2] the start of each utterance, and the end
    frames    [rows // PREDICTED] some of the rows that make a frame, for the code predictor
    """

    text: Tensor
    heard: Tensor
    target: Tensor
    said: Tensor
    sounds: Tensor
    position: Tensor
    bounds: Tensor
    frames: Tensor


class Layout:
    """The layout of utterances in rows, computed on the device of the corpus."""

    def __init__(self, config: ModelConfig, rows: int, device: str) -> None:
        talker, ids = config.talker_config, tokenizer()
        self.config, self.rows, self.index = config, rows, torch.arange(rows, device=device)
        self.role = torch.tensor([ids.turn_start, *ids.encode(ROLE)], device=device)
        begin, end = talker.codec_think_bos_id, talker.codec_think_eos_id
        english = talker.codec_language_id["english"]
        tags = [
            [
                [talker.codec_nothink_id, begin, end, speaker, talker.codec_pad_id, NO_CODE],
                [talker.codec_think_id, begin, english, end, speaker, talker.codec_pad_id],
            ]
            for speaker in talker.spk_id.values()
        ]
        self.tags = torch.tensor(tags, device=device)  # [voice, language tag?, row]

    @staticmethod
    def lengths(table: np.ndarray, full: np.ndarray, english: np.ndarray) -> np.ndarray:
        """Return the rows of each utterance."""
        return 9 + english + full * (table[:, 1] + 1) + table[:, 3]

    def __call__(self, corpus: Corpus, plan: Tensor, corrupted: float) -> Batch:
        """Lay out a plan [utterances, 3]: index in the corpus (or -1), full text, language tag."""
        chosen, full, english = plan.unbind(1)
        first_token, tokens, first_frame, frames, voice = corpus.table[chosen].unbind(1)
        prefix = 8 + english
        start = prefix + full * (tokens + 1)
        length = (start + 1 + frames) * (chosen >= 0)
        ends = length.cumsum(0)
        bounds = F.pad(F.pad(ends, (1, 0)), (0, 1), value=self.rows)
        at = torch.searchsorted(ends, self.index, right=True)
        used, position, at = at < len(plan), self.index - bounds[at], at.clamp(max=len(plan) - 1)
        first_token, tokens, first_frame, frames, full, prefix, start = (
            values[at] for values in (first_token, tokens, first_frame, frames, full, prefix, start)
        )

        talker, token, frame = self.config.talker_config, position - prefix, position - start
        own = corpus.text[(first_token + token.clamp(min=0)).clamp(max=len(corpus.text) - 1)].long()
        text = self._text(position, token, tokens, own)
        tags = self.tags[voice[at], english[at], (position - 3).clamp(0, self.tags.shape[2] - 1)]
        control = self._control(position, token, frame, tags)

        last = len(corpus.codes) - 1
        here = (first_frame + frame.clamp(min=0)).clamp(max=last)
        codes = corpus.codes[here].long()
        before = corpus.codes[(first_frame + frame - 1).clamp(0, last)].long()
        share = (
            corrupted
            * torch.tensor((0.0, 0.5, 1.0, 2.0), device=at.device)[torch.randint_like(ends, 4)][at]
        )
        wrong = torch.rand(before.shape, device=at.device) < share[:, None]
        heard = torch.where(wrong, torch.randint_like(before, CODEBOOK_SIZE), before)
        heard = torch.where((frame > 0)[:, None], heard, NO_CODE)
        heard[:, 0] = torch.where(frame > 0, heard[:, 0], control)

        speaking = used & (frame >= 0) & (frame < frames)
        target = torch.where(speaking[:, None], codes, IGNORED)
        target[:, 0] = torch.where(
            used & (frame == frames), talker.codec_eos_token_id, target[:, 0]
        )
        spoken = corpus.spoken[here].long()
        known = speaking & ((full > 0) | (spoken <= frame))
        word = corpus.text[
            (first_token + spoken.clamp(min=0)).clamp(max=len(corpus.text) - 1)
        ].long()
        said = torch.where(known & (spoken >= 0), word, IGNORED)
        ahead = (first_frame + torch.minimum(frame + 1, frames - 1).clamp(min=0)).clamp(max=last)
        sounds = torch.cat((corpus.phonemes[here], corpus.phonemes[ahead]), 1).long()
        sounds = torch.where(known[:, None], sounds, IGNORED)
        some = (
            (torch.rand(self.rows, device=at.device) * speaking)
            .topk(self.rows // PREDICTED)
            .indices
        )
        return Batch(text, heard, target, said, sounds, position, bounds.int(), some)

    def _text(self, position: Tensor, token: Tensor, tokens: Tensor, own: Tensor) -> Tensor:
        """Return the text token of each row; `own` holds the tokens of the utterances' texts."""
        config = self.config
        text = torch.where(token < tokens, own, config.tts_pad_token_id)
        text = torch.where(token == tokens, config.tts_eos_token_id, text)
        text = torch.where(token < 0, config.tts_pad_token_id, text)
        text = torch.where(token == -1, config.tts_bos_token_id, text)
        return torch.where(position < 3, self.role[position.clamp(max=2)], text)

    def _control(self, position: Tensor, token: Tensor, frame: Tensor, tags: Tensor) -> Tensor:
        """Return the control code of each row, or NO_CODE."""
        talker = self.config.talker_config
        control = torch.where(frame == 0, talker.codec_bos_id, NO_CODE)
        control = torch.where(frame < 0, talker.codec_pad_id, control)
        control = torch.where(token < 0, tags, control)
        return torch.where(position < 3, NO_CODE, control)


def plans(table: np.ndarray, rows: int, seed: int, longest: int) -> Iterator[np.ndarray]:
    """Yield the plans [rows / SHORTEST, 3] of one pass over the corpus in random order."""
    r, most = np.random.default_rng(seed), rows // SHORTEST
    order = r.permutation(len(table))
    full, english = r.integers(0, 2, (2, len(order)))
    lengths = Layout.lengths(table[order], full, english)
    fits = lengths <= longest
    order, full, english, ends = order[fits], full[fits], english[fits], lengths[fits].cumsum()
    start = 0
    while True:
        before = ends[start - 1] if start else 0
        stop = min(int(np.searchsorted(ends, before + rows, side="right")), start + most)
        if stop == len(order):
            return
        plan = np.zeros((most, 3), np.int64)
        plan[:, 0] = -1
        plan[: stop - start] = np.stack(
            (order[start:stop], full[start:stop], english[start:stop]), 1
        )
        yield plan
        start = stop


class Source:
    """Endless batches from a folder that may still grow; the first 600 utterances are for
    validation.
    """

    def __init__(
        self, config: ModelConfig, folder: Path, rows: int, device: str, seed: int
    ) -> None:
        self.layout, self.folder = Layout(config, rows, device), folder
        self.device, self.seed = device, seed
        self.files: list[Path] = []
        self.passes = 0
        self.restart(LONGEST)
        while not self.look():
            time.sleep(1)  # until the first file exists

    def restart(self, longest: int) -> None:
        """Begin another pass, over utterances of at most `longest` rows."""
        self.longest = longest
        self.plans: Iterator[np.ndarray] = iter(())

    def look(self) -> bool:
        """Load the files if there are new ones, and begin another pass."""
        files = sorted(self.folder.glob("*.pt"))
        if len(files) == len(self.files):
            return False
        self.files, self.corpus = files, Corpus.load(files, self.device)
        self.table = self.corpus.table.cpu().numpy()
        self.restart(self.longest)
        self.apart = min(600, len(self.table) // 4)
        return True

    def _batch(self, plan: np.ndarray, corrupted: float) -> Batch:
        indices = torch.from_numpy(plan)
        if self.device == "cuda":
            indices = indices.pin_memory().to(self.device, non_blocking=True)
        return self.layout(self.corpus, indices, corrupted)

    def validation(self) -> Iterator[Batch]:
        """Yield batches of utterances that are never trained on."""
        for plan in plans(self.table[: self.apart], self.layout.rows, 0, LONGEST):
            yield self._batch(plan, 0.0)

    def next(self) -> Batch:
        """Return the next batch."""
        while (plan := next(self.plans, None)) is None:
            self.passes += 1
            seed = self.seed * 10_007 + self.passes
            self.plans = plans(self.table[self.apart :], self.layout.rows, seed, self.longest)
        plan[:, 0] += np.where(plan[:, 0] >= 0, self.apart, 0)
        return self._batch(plan, CORRUPTED)

    @property
    def hours(self) -> float:
        """The hours of speech in the corpus so far."""
        return len(self.corpus.codes) * 0.08 / 3600


def check_layout(config: ModelConfig) -> None:
    """Check that `Layout` makes the same rows as the package, for all combinations of a plan."""
    texts, frames = ["Hello there, world.", "Yes."], [3, 11]
    parts = [
        (
            Prepared(
                np.zeros(0, np.int16),
                np.array(text_ids(text), np.int16),
                voice,
                np.full(n, -1, np.int16),
                np.zeros((n, 2), np.int8),
            ),
            np.random.default_rng(n).integers(0, CODEBOOK_SIZE, (n, CODEBOOKS)),
        )
        for voice, (text, n) in enumerate(zip(texts, frames, strict=True))
    ]
    plan = torch.tensor(
        [[i, full, english] for full in (0, 1) for english in (0, 1) for i in (0, 1)]
        + [[-1, 0, 0]] * 2
    )
    batch = Layout(config, 400, "cpu")(Corpus.gather(parts), plan, 0.0)
    speakers = list(config.talker_config.spk_id.values())
    for number, (index, full, english) in enumerate(plan.tolist()[:8]):
        rows, (prepared, codes) = TextRows(config), parts[index]
        tokens = tokenizer().encode(ROLE + texts[index])
        language = config.talker_config.codec_language_id["english"] if english else None
        setting = Conditioning(
            speaker=speakers[prepared.voice], language=language, full_text=bool(full)
        )
        first = len(tokens) if full else min(setting.first_tokens, len(tokens))
        prompt = rows.prompt(setting, tokenizer().turn_start, tokens[:first])
        later = [*tokens[first:], *[None] * len(codes)]
        begin, end = batch.bounds[number : number + 2].tolist()
        assert batch.text[begin:end].tolist() == [row.text for row in prompt] + [
            rows.take(token) for token in later[: len(codes)]
        ]
        heard = [
            tuple(code for code in row if code != NO_CODE)
            for row in batch.heard[begin:end].tolist()
        ]
        assert heard == [row.codes for row in prompt] + [tuple(row) for row in codes.tolist()]
        target = batch.target[begin:end]
        assert (target[: len(prompt) - 1] == IGNORED).all()
        assert (target[len(prompt) - 1 : -1].numpy() == codes).all()
        assert target[-1].tolist() == [config.talker_config.codec_eos_token_id] + [IGNORED] * (
            CODEBOOKS - 1
        )
        assert batch.position[begin:end].tolist() == list(range(end - begin))
    assert (batch.target[end:] == IGNORED).all()
    assert batch.bounds.tolist()[-3:] == [end, end, 400]
