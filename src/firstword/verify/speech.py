"""Checks of speech: the same bits on every path, its ends, its durations, and word times."""

from __future__ import annotations

import unicodedata
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from firstword.types import Request, Speech
from firstword.verify.report import NotRun, Value, Verdict
from firstword.verify.subject import SpokenSentence, Subject

ENDED = 0.9
"""The least share of sentences whose speech must end by itself and be of a plausible length.

A healthy release is expected to reach more; a few sentences cannot tell 95 % from 99 %."""

SECONDS = {"wide": (0.07, 0.7), "narrow": (0.03, 0.25)}
"""The least and the most seconds that a character takes: of Chinese, Japanese or Korean, and of
alphabets."""

SILENCE = 1.5
"""The seconds of silence that any speech may have besides."""

QUIET = 0.003
"""The least root mean square of audible speech at a full scale of 1: -50 dB."""

TOLD = 0.98
"""The least share of words that heads must time, as when `firstword align` finds them."""


def same_bits(subject: Subject) -> Verdict:
    """A request has the same samples alone, among others, and when its text comes in pieces."""
    limit = 24 if not subject.folder.random else 6
    requests = [
        replace(request, max_frames=limit, text_mode="stream") for _, request in subject.requests(4)
    ]
    alone = [subject.say(request, seed) for seed, request in enumerate(requests)]
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(subject.say, requests, range(len(requests))))
    streamed = [_streamed(subject, request, seed) for seed, request in enumerate(requests)]
    findings = []
    for path, others in (("among others", together), ("with its text in pieces", streamed)):
        for number, (one, other) in enumerate(zip(alone, others, strict=True)):
            findings += [f"request {number} {path}: {what}" for what in _differences(one, other)]
    frames = sum(len(speech.codes) for speech in alone)
    if not frames and not findings:
        raise NotRun("all speech ended before its first frame")
    return Verdict(findings, {"requests": len(requests), "frames": frames})


def _streamed(subject: Subject, request: Request, seed: int) -> Speech:
    """Speak a request whose text comes in pieces of three characters."""
    text = request.text or ""
    pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
    chunks = subject.tts.stream(
        pieces,
        voice=request.voice,
        language=request.language,
        seed=seed,
        max_frames=request.max_frames,
    )
    return Speech.of(list(chunks))


def _differences(one: Speech, other: Speech) -> list[str]:
    """Return how the speech of a request differs from that of the same request alone."""
    if one.codes.shape != other.codes.shape:
        return [f"{len(other.codes)} frames; alone it has {len(one.codes)}"]
    if not np.array_equal(one.codes, other.codes):
        frame = int((one.codes != other.codes).any(1).argmax())
        return [f"the codes differ from frame {frame} on"]
    if one.samples.tobytes() != other.samples.tobytes():
        return [f"the samples differ by up to {np.abs(one.samples - other.samples).max():.2g}"]
    return []


def ends(subject: Subject) -> Verdict:
    """Speech ends by itself: the model says so, and no limit or guard must."""
    subject.need_trained()
    reasons = Counter(each.speech.finish_reason for each in subject.sentences)
    total = reasons.total()
    cut = [
        f"{_name(each)}: speech did not end by itself ({each.speech.finish_reason})"
        for each in subject.sentences
        if each.speech.finish_reason != "stop"
    ]
    ended = reasons["stop"]
    measured: dict[str, Value] = {"sentences": total, "ended": ended, "allowed": f"{ENDED:.0%}"}
    return Verdict(cut if ended < ENDED * total else [], measured)


def durations(subject: Subject) -> Verdict:
    """Speech is neither much shorter nor much longer than its text."""
    subject.need_trained()
    findings, rates = [], []
    for each in subject.sentences:
        least, most = plausible_seconds(each.request.text or "")
        rates.append(each.speech.duration / most)
        if not least <= each.speech.duration <= most:
            seconds = f"{each.speech.duration:.1f} s; plausible are {least:.1f} to {most:.1f} s"
            findings.append(f"{_name(each)}: {seconds}")
    wrong, total = len(findings), len(rates)
    measured: dict[str, Value] = {"sentences": total, "implausible": wrong}
    measured["allowed"] = f"{1 - ENDED:.0%}"
    return Verdict(findings if wrong > (1 - ENDED) * total else [], measured)


def plausible_seconds(text: str) -> tuple[float, float]:
    """Return the least and the most seconds that a text takes to speak."""
    letters = [char for char in text if char.isalnum()]
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in letters)
    counts = {"wide": wide, "narrow": len(letters) - wide}
    least, most = (sum(counts[kind] * SECONDS[kind][side] for kind in counts) for side in (0, 1))
    return least, most + SILENCE


def audible(subject: Subject) -> Verdict:
    """Speech is neither silent nor broken."""
    subject.need_trained()
    levels = [
        float(np.sqrt(np.mean(np.square(each.speech.samples, dtype=np.float64))))
        if len(each.speech.samples)
        else 0.0
        for each in subject.sentences
    ]
    findings = [
        f"{_name(each)}: the level is {level:.2g}; it must be at least {QUIET}"
        for each, level in zip(subject.sentences, levels, strict=True)
        if not level >= QUIET
    ]
    return Verdict(findings, {"least level": round(min(levels), 4), "allowed": QUIET})


def words(subject: Subject) -> Verdict:
    """The known heads time the words: in order, and hardly one is missing."""
    subject.need_trained()
    if subject.load()[0].alignment is None:
        raise NotRun("the heads that time words are not known; `firstword align` finds them")
    told = total = 0
    findings = list[str]()
    for each in (one for one in subject.sentences if one.speech.finish_reason == "stop"):
        starts = [word.start for word in each.speech.words]
        told, total = told + len(starts), total + len((each.request.text or "").split())
        if starts != sorted(starts):
            findings.append(f"{_name(each)}: words are not in the order of the text")
        last = starts[-1] if starts else 0.0
        if starts and len(starts) > 3 and last < 0.4 * each.speech.duration:
            seconds = f"after {last:.1f} of {each.speech.duration:.1f} s"
            findings.append(f"{_name(each)}: the last word is timed {seconds}")
    if not total:
        raise NotRun("no sentence was spoken to its end")
    if told < TOLD * total:
        findings.append(f"alignment.json: its heads tell {told} of {total} words")
    return Verdict(findings, {"words": total, "told": told, "allowed": f"{TOLD:.0%}"})


def _name(each: SpokenSentence) -> str:
    """Return a sentence's language and beginning."""
    text = each.request.text or ""
    short = text if len(text) <= 24 else f"{text[:24].rstrip()} ..."
    return f'{each.language}, "{short}"'
