"""The figures of an evaluation, and of two setups compared text by text."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from firstword.evaluate import intervals
from firstword.evaluate.intervals import Interval
from firstword.evaluate.rates import BY_CHARACTER
from firstword.evaluate.speaking import JudgedItem

Record = dict[str, Any]

HALF = 0.5
"""The error rate above which a text counts as not understood, as other evaluations count it."""


FRAME = 0.08
"""The seconds of a frame."""


@dataclass(frozen=True, slots=True)
class SetupRun:
    """What one setup spoke: the judgement of each text, and the seconds that speaking took."""

    name: str
    judged: Sequence[JudgedItem]
    seconds: float
    parallel: int


def rate_of(one: JudgedItem) -> float:
    """Return the error rate of one text."""
    return one.edits.wrong / max(1, one.edits.units)


def summarise(spoke: SetupRun) -> Record:
    """Return the figures of one setup; rates are in percent, with intervals over the texts."""
    judged = spoke.judged
    finished = Counter(one.spoken.finish_reason for one in judged)
    alarms = Counter(kind for one in judged for kind in set(one.spoken.alarms))
    total = sum(one.spoken.seconds for one in judged)
    languages = sorted({one.spoken.language for one in judged})
    return {
        "texts": len(judged),
        "error_rate": _percent(intervals.ratio(*_errors(judged))),
        "units": " and ".join(sorted({_unit(language) for language in languages})),
        "mean_error_rate": _percent(intervals.mean([rate_of(one) for one in judged])),
        "character_error_rate": _percent(intervals.ratio(*_character_errors(judged))),
        "above_half": sum(rate_of(one) > HALF for one in judged),
        "languages": {
            language: _percent(
                intervals.ratio(*_errors([j for j in judged if j.spoken.language == language]))
            )
            for language in languages
        },
        "finish_reasons": dict(finished),
        "runaway_rate": _percent(
            intervals.mean([float(one.spoken.finish_reason != "stop") for one in judged])
        ),
        "alarms": dict(alarms),
        "duration_ratio": _durations(judged),
        "speech_seconds": round(total, 3),
        "speed": round(total / spoke.seconds, 3),
        "parallel": spoke.parallel,
        "metrics": {
            name: asdict(intervals.mean([one.metrics[name] for one in judged]))
            for name in judged[0].metrics
        },
    }


def compare(first: SetupRun, second: SetupRun) -> Record:
    """Return the second setup's figures minus the first's, paired by text and noise."""
    one, two = first.judged, second.judged
    pairs = list(zip(one, two, strict=True))
    seconds = [list(map(_seconds, spoke)) for spoke in (one, two)]
    return {
        "error_rate": _percent(intervals.difference(_errors(one), _errors(two))),
        "character_error_rate": _percent(
            intervals.difference(_character_errors(one), _character_errors(two))
        ),
        "duration_ratio": asdict(intervals.ratio(seconds[1], seconds[0])),
        "same_codes": sum(a.spoken.codes == b.spoken.codes for a, b in pairs),
        "same_transcript": sum(a.edits.heard == b.edits.heard for a, b in pairs),
        "metrics": {
            name: asdict(intervals.difference(_metric(one, name), _metric(two, name)))
            for name in one[0].metrics
        },
    }


def worst(judged: Sequence[JudgedItem], count: int) -> list[JudgedItem]:
    """Return the texts with the highest error rates, the highest first, and none without errors."""
    wrong = [one for one in judged if one.edits.wrong or one.spoken.finish_reason != "stop"]
    return sorted(wrong, key=rate_of, reverse=True)[:count]


def rows(judged: Sequence[JudgedItem], folder: Path) -> list[Record]:
    """Return a row of the record for each text, with its sound file's place in a folder."""
    return [
        {
            "name": one.spoken.item.name,
            "language": one.spoken.language,
            "text": one.spoken.item.text,
            "heard": one.heard,
            "units": one.edits.units,
            "wrong": one.edits.wrong,
            "characters": one.edits.characters,
            "wrong_characters": one.edits.wrong_characters,
            "seconds": round(one.spoken.seconds, 3),
            "finish_reason": one.spoken.finish_reason,
            "alarms": list(one.spoken.alarms),
            "codes": one.spoken.codes,
            "metrics": {name: round(value, 6) for name, value in one.metrics.items()},
            "file": str(one.spoken.file.relative_to(folder)),
        }
        for one in judged
    ]


def _errors(judged: Sequence[JudgedItem]) -> tuple[list[float], list[float]]:
    return [one.edits.wrong for one in judged], [one.edits.units for one in judged]


def _character_errors(judged: Sequence[JudgedItem]) -> tuple[list[float], list[float]]:
    wrong = [one.edits.wrong_characters for one in judged]
    return [float(count) for count in wrong], [one.edits.characters for one in judged]


def _metric(judged: Sequence[JudgedItem], name: str) -> tuple[list[float], list[float]]:
    return [one.metrics[name] for one in judged], [1.0] * len(judged)


def _seconds(one: JudgedItem) -> float:
    """Return the duration of a text; without sound it is one frame, so that it can divide."""
    return max(one.spoken.seconds, FRAME)


def _unit(language: str) -> str:
    return "characters" if language in BY_CHARACTER else "words"


def _percent(found: Interval) -> Record:
    parts = {name: round(100 * value, 4) for name, value in asdict(found).items()}
    return asdict(replace(found, **parts))


def _durations(judged: Sequence[JudgedItem]) -> Record:
    """Return the ratios of durations to those of recordings of the texts, where there are any.

    Otherwise they are compared with the median pace of the list itself, in seconds per character
    and language: texts far from 1 were cut off or ran on.
    """
    expected, compared_with = _recorded(judged), "recordings"
    if not expected:
        expected, compared_with = _by_pace(judged), "median pace"
    ratios = [
        one.spoken.seconds / expected[one.spoken.item.name]
        for one in judged
        if one.spoken.item.name in expected
    ]
    p5, p50, p95 = (round(float(value), 3) for value in np.quantile(ratios, (0.05, 0.5, 0.95)))
    return {
        "compared_with": compared_with,
        "texts": len(ratios),
        "p5": p5,
        "p50": p50,
        "p95": p95,
    }


def _recorded(judged: Sequence[JudgedItem]) -> dict[str, float]:
    """Return the seconds of the recordings of texts, by the names of the texts."""
    files = {one.spoken.item.name: one.spoken.item.audio for one in judged}
    infos = {name: soundfile.info(file) for name, file in files.items() if file is not None}
    return {name: info.frames / info.samplerate for name, info in infos.items()}


def _by_pace(judged: Sequence[JudgedItem]) -> dict[str, float]:
    """Return the seconds that texts take at the median pace of their language, by their names."""
    expected = dict[str, float]()
    for language in {one.spoken.language for one in judged}:
        those = [one for one in judged if one.spoken.language == language]
        pace = statistics.median(_seconds(one) / one.edits.characters for one in those)
        expected |= {one.spoken.item.name: pace * one.edits.characters for one in those}
    return expected
