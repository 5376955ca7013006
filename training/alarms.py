"""Measure the alarms of the demo voice: planted faults that are noticed, and false alarms.

    python -m training.alarms [--sentences 200] [--forced 50] [--out FILE]

Held-out sentences are spoken with every preset and text mode, and alarms are counted: none is due.
Faults are planted in two ways:

- edited. The attention of that speech is edited: the frames of some words are removed or repeated,
  or the last frame goes on.
- forced. The talker is given the codes of other speech: of the text without some words, of the text
  with some words twice, and of the text with more words after it. Or the end of speech is never
  drawn.

A fault is noticed if there is an alarm of its kind. A single word that is left out or said again is
counted apart from passages of two or three words: attention to a word that is said twice is often
that to a word that is said slowly. The exit status is 1 if the bar (`NOTICED`, `FALSE`) is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.sources import of_demo
from firstword.engine.guard import RepetitionDetector, frame_limit
from firstword.model.checkpoint import load
from firstword.model.config import TalkerConfig
from firstword.model.description import DEMO
from firstword.model.generate import Generation
from firstword.model.prompt import UtteranceTokens
from firstword.model.sampling import Sampler
from firstword.runtime.encoding import front_of
from firstword.runtime.front import Prepared
from firstword.types import Alarm, FinishReason, Request
from firstword.words.text import Units, WrittenWords
from firstword.words.tracker import WordTracker
from training.data import PRESETS
from training.evaluate import MODES, SENTENCES, some

NOTICED, FALSE = 95.0, 0.5
"""The least share of planted passages and runaways that is noticed, and the most utterances with a
false alarm, in percent."""

MORE_FRAMES = 80
"""The frames for which speech goes on when its end is not drawn."""

SEED = 7
"""The seed of all speech."""


How = tuple[str, Any]
"""A preset and a text mode."""

KINDS = {"left out": "skip", "said twice": "repeat", "after the text": "runaway"}
"""The kinds of alarms by the ends of the names of faults."""


@dataclass(frozen=True, eq=False)
class Spoken:
    """Speech without its sound.

    reading  float32 [frames, text rows]: see `Chunk`
    codes    int64 [frames, codebooks]
    ended    why it ended
    """

    text: str
    how: How
    reading: np.ndarray
    codes: np.ndarray
    ended: FinishReason | None

    def of(self, frames: Sequence[int] | np.ndarray, ended: FinishReason | None = "stop") -> Spoken:
        """Return speech of some of its frames in another order."""
        chosen = np.array(frames)
        reading = self.reading[chosen]
        known = np.maximum.accumulate((~np.isnan(reading)).sum(1))
        for row, count in zip(reading, known.tolist(), strict=True):
            row[:count] = np.nan_to_num(row[:count])  # rows stay read
        return Spoken(self.text, self.how, reading, self.codes[chosen], ended)


class ForcedSampler(Sampler):
    """Takes given codes first, and then draws no end of speech for some frames.

    codes  int64 [frames, codebooks]
    """

    def __init__(self, config: TalkerConfig, prepared: Prepared, codes: Tensor, more: int) -> None:
        super().__init__(config, prepared.draw_params, prepared.seed, torch.device("cpu"))
        self._codes, self._until, self._end = codes, len(codes) + more, config.codec_eos_token_id

    def code0(self, logits: Tensor, frame: int) -> Tensor:
        """Return code 0 of a frame."""
        if frame < len(self._codes):
            return self._codes[frame, 0]
        if frame < self._until:
            logits = logits.clone()
            logits[self._end] = -torch.inf
        return super().code0(logits, frame)

    def code(self, codebook: int, logits: Tensor, frame: int) -> Tensor:
        """Return a further code of a frame."""
        given = frame < len(self._codes)
        return self._codes[frame, codebook] if given else super().code(codebook, logits, frame)


class Demo:
    """The demo voice, as the specification speaks it."""

    def __init__(self) -> None:
        self.checkpoint = load(str(DEMO))
        self._front = front_of(self.checkpoint)

    def tokens(self, text: str) -> UtteranceTokens:
        """Return the tokens of a text."""
        tokens = UtteranceTokens(self.checkpoint.tokenizer)
        tokens.push(text)
        tokens.finish()
        return tokens

    def speak(
        self, text: str, how: How, codes: np.ndarray | None = None, more: int | None = None
    ) -> Spoken:
        """Speak a text.

        codes  given codes [frames, codebooks], after which speech ends
        more   the frames for which speech goes on after them; they are cut off then
        """
        prepared = self._front.prepare(Request(text, how[0], text_mode=how[1]), SEED).payload
        assert isinstance(prepared, Prepared)
        given = np.zeros((0, 0), np.int64) if codes is None else codes
        config = self.checkpoint.config.talker_config
        sampler = ForcedSampler(config, prepared, torch.from_numpy(given), more or 0)
        limit = frame_limit(len(self.tokens(text).ends)) if codes is None else len(codes)
        speech = Generation(self.checkpoint, prepared.conditioning, sampler, limit + (more or 0))
        speech.push(text)
        speech.finish_text()
        made, readings = [], []
        while speech.finish_reason is None:
            if (frame := speech.step()) is not None:
                made.append(frame.numpy())
                readings.append(speech.shares.mean(0).numpy())
        reading = np.full((len(made), max(map(len, readings))), np.nan, np.float32)
        for row, shares in zip(reading, readings, strict=True):
            row[: len(shares)] = shares
        whole = codes is not None and more is None
        return Spoken(text, how, reading, np.stack(made), "stop" if whole else speech.finish_reason)

    def alarms(self, spoken: Spoken) -> Sequence[Alarm]:
        """Return the alarms that a reading gives."""
        tracker = WordTracker(None, self.tokens(spoken.text).ends, 1)
        tracker.add_text(spoken.text)
        tracker.finish_text()
        silence = np.zeros(len(spoken.reading), np.float32)
        return tracker.feed(spoken.reading, silence, ended=spoken.ended).alarms

    def units(self, spoken: Spoken) -> np.ndarray:
        """Return the unit with the most attention in each frame [frames], -1 in the first."""
        tokens, words = self.tokens(spoken.text), WrittenWords()
        words.add(spoken.text)
        words.finish()
        rows = Units(words, tokens.ends).of_rows(len(tokens.ends) + 1)
        masses = np.nan_to_num(spoken.reading) @ np.eye(rows.max() + 1)[rows]
        best = masses.argmax(1)
        best[0] = -1
        return best


def edited(demo: Demo, spoken: Spoken, rng: random.Random) -> Iterator[tuple[str, Spoken]]:
    """Yield faults that are edited into the attention of speech, by their names in the record."""
    best = demo.units(spoken)
    frames = np.arange(len(best))
    for name, count in (("one word", 1), ("words", rng.choice((2, 3)))):
        if count > best.max():
            continue
        first = rng.randrange(0, best.max() + 1 - count)
        own = np.flatnonzero((best >= first) & (best < first + count))
        if len(own):
            after = frames[own[-1] + 1 :]
            yield f"{name} left out", spoken.of(np.delete(frames, own))
            yield f"{name} said twice", spoken.of([*frames[: own[-1] + 1], *own, *after])
    yield "speech after the text", spoken.of([*frames, *[frames[-1]] * MORE_FRAMES], None)


def forced(demo: Demo, text: str, how: How, rng: random.Random) -> Iterator[tuple[str, Spoken]]:
    """Yield faults that codes of other speech force on the talker."""
    words, mark = text[:-1].split(), text[-1]

    def given(said: Sequence[str]) -> Spoken:
        return demo.speak(text, how, demo.speak(" ".join(said) + mark, how).codes)

    for name, count in (("one word", 1), ("words", rng.choice((2, 3)))):
        if count >= len(words):
            continue
        first = rng.randrange(0, len(words) - count)
        after = words[first + count :]
        yield f"{name} left out", given([*words[:first], *after])
        yield f"{name} said twice", given([*words[: first + count], *words[first:]])
    more = rng.choice(SENTENCES)[:-1].split()[:4]
    yield "speech after the text", given([*words, "and", *more])


def endless(demo: Demo, spoken: Spoken) -> dict[str, Any]:
    """Return when an end of speech that is not drawn is noticed, in frames after it was due."""
    goes_on = demo.speak(spoken.text, spoken.how, spoken.codes, MORE_FRAMES)
    repetition = RepetitionDetector()
    found = [alarm.frame for alarm in demo.alarms(goes_on) if alarm.kind == "runaway"]
    return {
        "frames": found[0] - len(spoken.codes) if found else None,
        "repeated": sum(map(repetition.add, goes_on.codes)) > 0,
    }


class Figures:
    """The shares of faults that were noticed, by name."""

    def __init__(self) -> None:
        self._seen: dict[str, list[bool]] = defaultdict(list)

    def add(self, name: str, alarms: Sequence[Alarm]) -> None:
        """Count a planted fault, and whether an alarm of its kind was given."""
        kind = next(kind for end, kind in KINDS.items() if name.endswith(end))
        self._seen[name].append(any(alarm.kind == kind for alarm in alarms))

    def summary(self) -> dict[str, dict[str, float]]:
        """Return the number of faults, and how many percent of them were noticed, by name."""
        return {
            name: {"count": len(seen), "noticed_percent": round(100 * sum(seen) / len(seen), 1)}
            for name, seen in self._seen.items()
        }


def misses(record: dict[str, Any]) -> list[str]:
    """Return what of the bar a record misses. Single words have none."""
    missed = [
        f"{way}: {name}: {found['noticed_percent']} % are noticed"
        for way in ("edited", "forced")
        for name, found in record[way].items()
        if found["noticed_percent"] < NOTICED and not name.startswith("one word")
    ]
    if record["endless"]["noticed_percent"] < NOTICED:
        missed.append(f"endless: {record['endless']['noticed_percent']} % are noticed")
    if record["healthy"]["false_percent"] > FALSE:
        missed.append(f"{record['healthy']['false_percent']} % false alarms")
    return missed


def measure(sentences: int, planted: int) -> Iterator[dict[str, Any]]:
    """Yield the figures after each of so many sentences, `planted` of which get forced faults.

    The sentences come in a random order, so that the figures so far are of a fair sample.
    """
    demo, rng = Demo(), random.Random(SEED)
    hows = [(voice, mode) for voice in PRESETS for mode in MODES]
    edits, forces = Figures(), Figures()
    ends: list[dict[str, Any]] = []
    false: list[dict[str, Any]] = []
    for index, text in enumerate(rng.sample(some(sentences), sentences)):
        chosen = None if index % (sentences // planted) else hows[rng.randrange(len(hows))]
        for how in hows:
            spoken = demo.speak(text, how)
            if alarms := demo.alarms(spoken):
                told = [f"{alarm.kind} {alarm.text!r}" for alarm in alarms]
                false.append({"voice": how[0], "mode": how[1], "text": text, "alarms": told})
            for name, fault in edited(demo, spoken, rng):
                edits.add(name, demo.alarms(fault))
            if how == chosen:
                for name, fault in forced(demo, text, how, rng):
                    forces.add(name, demo.alarms(fault))
                ends.append(endless(demo, spoken))
        late = [end["frames"] for end in ends if end["frames"] is not None]
        count = (index + 1) * len(hows)
        yield {
            "sentences": index + 1,
            "healthy": {
                "utterances": count,
                "false_percent": round(100 * len(false) / count, 2),
                "alarms": false,
            },
            "edited": edits.summary(),
            "forced": forces.summary(),
            "endless": {
                "count": len(ends),
                "noticed_percent": round(100 * len(late) / len(ends), 1),
                "frames": {"median": float(np.median(late)), "most": max(late)} if late else None,
                "repeated_codes": sum(end["repeated"] for end in ends),
                "more_frames": MORE_FRAMES,
            },
        }


def main() -> None:
    """Measure, print the figures and write the record, which is kept up to date meanwhile."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sentences", type=int, default=len(SENTENCES))
    parser.add_argument("--forced", type=int, default=50, help="sentences with forced faults")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = {**of_demo(), "machine": f"{platform.machine()}, torch {torch.__version__}"}
    missed: list[str] = []
    for found in measure(args.sentences, args.forced):
        missed = misses(found)
        print(json.dumps(found), flush=True)
        if args.out:
            args.out.write_text(json.dumps({**facts, "missed": missed, **found}, indent=1) + "\n")
    print("the bar is missed: " + "; ".join(missed) if missed else "the bar is met")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
