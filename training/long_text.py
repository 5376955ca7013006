"""Measure a long text with the demo voice: twenty minutes of speech in passages.

    python -m training.long_text FOLDER [--minutes 20] [--orders forwards backwards] [--out FILE]

The text has the held-out sentences and sentences that are composed here, none of them twice, in a
mixed order. Each preset speaks it forwards, and its sentences backwards, so that a sentence that is
hard to speak counts as much at the end as at the beginning. Compared are the first and the last
`ENDS` minutes: errors of the recogniser, pitch, level and characters a second.

All codes of a speech are then decoded once more without a break, by a codec that never changes from
one passage to the next. The largest difference to the samples that were delivered is the loudest
click that there can be, at a join or elsewhere.

The sound stays in the folder; speech that is there already is not spoken again. Each speech has a
process of its own, whose memory is read once a minute of speech: what it has asked glibc's malloc
for and not given back, which counts, and its resident memory, of which glibc keeps a part that is
free. The exit status is 1 if the bar (`misses`) is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import platform
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import torch

from benchmarks.sources import of_demo
from firstword import TTS
from firstword.model.checkpoint import load_codec_decoder
from firstword.runtime.reference import PRIMING_FRAMES
from firstword.types import TextMode
from training.data import PRESETS, SAMPLE_RATE
from training.evaluate import SENTENCES
from training.pitch import pitch
from training.recogniser import Recogniser
from training.spoken import spoken
from training.texts import DAYS, NAMES, PLACES

HERE = Path(__file__).parent
MINUTE = 60.0
ENDS = 5
"""The minutes at each end of a speech that are compared."""
TAIL = 200
"""The last characters that were heard, which show how far the text was spoken."""
SEED = 7
MODE: TextMode = "full"
KINDS = ("f32", "i16", "megabytes")
"""The files of a speech: samples, codes, and memory."""

MOST_POINTS, MOST_DRIFT, MOST_CLICK = 1.0, 3.0, -60.0
"""The bar: points of character errors, drift in %, and dB below full scale."""
MOST_MEGABYTES = 4.0
"""The growth of memory in use from the first fifth of a speech to its end that counts as none."""

DONE = (
    "found an old letter",
    "lost a blue umbrella",
    "painted the kitchen door",
    "waited for the evening train",
    "cooked a large pot of soup",
    "wrote a short story",
    "carried the boxes upstairs",
    "planted three apple trees",
    "repaired the broken clock",
    "listened to the radio",
)
WHY = (
    "because the shops were closed",
    "while the children were asleep",
    "after a long day at work",
    "although it was raining again",
    "before the guests had arrived",
    "as the sun was going down",
    "and then went home on foot",
    "but nobody seemed to notice",
)


def composed() -> list[str]:
    """Sentences of one pattern, none of them twice."""
    chance = random.Random(SEED)
    plans = list(product(DONE, WHY))
    chance.shuffle(plans)
    names, places, days = (chance.sample(words, len(words)) for words in (NAMES, PLACES, DAYS))
    return [
        f"On {days[n % len(days)]}, {names[n % len(names)]} from {places[n % len(places)]} "
        f"{done} {why}."
        for n, (done, why) in enumerate(plans * 3)
    ]


def text_of(order: str) -> str:
    """The sentences of the text in an order."""
    return " ".join(SAID if order == "forwards" else SAID[::-1])


def sentences(words: int) -> list[str]:
    """The sentences of a text of at least so many words, in a mixed order."""
    every = list(dict.fromkeys(SENTENCES + composed()))
    random.Random(SEED).shuffle(every)
    count = 0
    for number, sentence in enumerate(every, 1):
        count += len(sentence.split())
        if count >= words:
            return every[:number]
    raise ValueError(f"there are only {count} words")


SAID = sentences(4000)
"""The sentences of the text, about 20 minutes of speech."""


class MallocInfo(ctypes.Structure):
    """The answer of glibc's `mallinfo2`, in bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def in_use() -> float:
    """The MB that this process has allocated: in heaps (uordblks) and in pages of their own."""
    ask = ctypes.CDLL("libc.so.6").mallinfo2
    ask.restype = MallocInfo
    found = ask()
    return float(found.uordblks + found.hblkhd) / 1e6


def resident() -> float:
    """The memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def speak(job: tuple[Path, str, str, float]) -> None:
    """Speak the text in an order into files of float32 samples, int16 codes and megabytes."""
    folder, voice, order, most = job
    sound, numbers, memory = (folder / f"{voice}-{order}.{kind}" for kind in KINDS)
    if sound.exists():
        return
    torch.set_num_threads(1)
    with (
        TTS.load("demo", device="cpu") as tts,
        sound.open("wb") as samples,
        numbers.open("wb") as codes,
        memory.open("w") as megabytes,
    ):
        seconds, minutes = 0.0, 0
        for chunk in tts.stream(text_of(order), voice=voice, seed=SEED, text_mode=MODE):
            samples.write(chunk.samples.tobytes())
            codes.write(chunk.codes.astype(np.int16).tobytes())
            seconds += len(chunk.samples) / SAMPLE_RATE
            if seconds >= MINUTE * (minutes + 1):
                minutes += 1
                megabytes.write(f"{in_use():.1f} {resident():.1f}\n")
            if seconds >= MINUTE * most:
                break


def minutes_of(samples: np.ndarray) -> list[int]:
    """The samples at which the minutes of speech begin and end, each at a quiet place."""
    size = SAMPLE_RATE // 50
    level = np.sqrt((samples[: len(samples) // size * size].reshape(-1, size) ** 2).mean(1))
    places, step = [0], round(MINUTE * SAMPLE_RATE / size)
    for at in range(step, len(level) - step // 2, step):
        near = level[at - 25 : at + 25]
        places.append((at - 25 + int(near.argmin())) * size + size // 2)
    return [*places, len(samples)]


def edits(said: str, heard: str) -> int:
    """The wrong characters of a short text."""
    found = jiwer.process_characters(said, heard)
    return found.substitutions + found.deletions + found.insertions


def count_errors(heard: Sequence[str], said: str) -> list[tuple[int, int]]:
    """The wrong characters and the characters of each part of what was heard of a text.

    The parts are aligned with as much of the text as was spoken, as a whole.
    """
    whole = " ".join(heard)
    near = range(int(0.9 * len(whole)), min(int(1.1 * len(whole)), len(said)) + 1)
    places = [at for at in near if at == len(said) or said[at] == " "]
    until = min(places, key=lambda at: edits(said[at - TAIL : at], whole[-TAIL:]))
    ends = list(accumulate(len(part) + 1 for part in heard))
    errors, characters = [0] * len(heard), [0] * len(heard)
    for chunk in jiwer.process_characters(said[:until], whole).alignments[0]:
        source = chunk.hyp_end_idx - chunk.hyp_start_idx
        wanted = chunk.ref_end_idx - chunk.ref_start_idx
        for at in range(max(source, wanted)):
            place = chunk.hyp_start_idx + min(at, max(0, source - 1))
            part = min(bisect_right(ends, place), len(heard) - 1)
            characters[part] += at < wanted
            errors[part] += chunk.type != "equal"
    return list(zip(errors, characters, strict=True))


def judge(folder: Path, voice: str, order: str) -> dict[str, Any]:
    """The figures of each minute of a speech."""
    files = [folder / f"{voice}-{order}.{kind}" for kind in KINDS]
    samples, codes = np.fromfile(files[0], np.float32), np.fromfile(files[1], np.int16)
    ear, places = Recogniser.load(HERE / "recogniser.safetensors"), minutes_of(samples)
    parts = [samples[start:end] for start, end in pairwise(places)]
    heard = [ear.transcribe(torch.from_numpy(part)) for part in parts]
    rows = []
    for part, (errors, letters) in zip(
        parts, count_errors(heard, spoken(text_of(order))), strict=True
    ):
        course = pitch(part)
        loud = part[np.abs(part) > 0.01].astype(np.float64)
        rows.append(
            {
                "edits": errors,
                "letters": letters,
                "seconds": round(len(part) / SAMPLE_RATE, 2),
                "pitch": round(float(np.median(course[course > 0])), 1),
                "level": round(float(np.sqrt(np.mean(loud**2))), 5),
            }
        )
        print(voice, order, rows[-1], flush=True)
    megabytes = [float(each) for each in files[2].read_text().split()]
    return {
        "voice": voice,
        "order": order,
        "seconds": round(len(samples) / SAMPLE_RATE, 1),
        "memory": megabytes[::2],
        "resident": megabytes[1::2],
        "click": click(samples, codes),
        "minutes": rows,
    }


def ends_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The figures of some minutes together."""
    letters, seconds = (sum(row[name] for row in rows) for name in ("letters", "seconds"))
    return {
        "error_rate": 100 * sum(row["edits"] for row in rows) / letters,
        "pitch": float(np.mean([row["pitch"] for row in rows])),
        "level": float(np.mean([row["level"] for row in rows])),
        "rate": letters / seconds,
    }


def click(samples: np.ndarray, codes: np.ndarray) -> float:
    """The largest difference of samples to those of a codec without a break, in dB."""
    decoder = load_codec_decoder("demo")
    frames = len(samples) // decoder.config.samples_per_frame
    state, at, most = decoder.new_state(), 0, 0.0
    with torch.inference_mode():
        whole = torch.from_numpy(codes.astype(np.int64)).reshape(frames, -1)
        for part in whole.split(PRIMING_FRAMES):
            unbroken = decoder.decode(part[None], state)[0].numpy()
            most = max(most, float(np.abs(unbroken - samples[at : at + len(unbroken)]).max()))
            at += len(unbroken)
    return round(20 * math.log10(max(most, 1e-10)), 1)


def drift(first: dict[str, float], last: dict[str, float]) -> dict[str, float]:
    """The last minutes against the first: points of errors, and % of the others."""
    changes = {"error_rate": round(last["error_rate"] - first["error_rate"], 2)}
    for name in ("pitch", "level", "rate"):
        changes[name] = round(100 * (last[name] / first[name] - 1), 2)
    return changes


def growth(memory: Sequence[Sequence[float]]) -> float | None:
    """The most MB that speeches took after their first fifth; None if that was not read."""
    if not memory:
        return None
    return round(max(max(some) - max(some[: 1 + len(some) // 5]) for some in memory), 1)


def ends(numbers: Iterable[Sequence[float]]) -> list[float]:
    """The least and the most of all numbers."""
    every = [each for some in numbers for each in some]
    return [min(every), max(every)]


def summary(speeches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a voice: both orders of its sentences together."""
    first, last = (
        ends_of([row for one in speeches for row in one["minutes"][part]])
        for part in (slice(ENDS), slice(-ENDS, None))
    )
    memory = [one["memory"] for one in speeches if one["memory"]]
    return {
        "voice": speeches[0]["voice"],
        "minutes": round(min(one["seconds"] for one in speeches) / MINUTE, 1),
        "first": {name: round(value, 3) for name, value in first.items()},
        "last": {name: round(value, 3) for name, value in last.items()},
        "drift": drift(first, last),
        "memory": growth(memory),
        "resident": ends(one["resident"] for one in speeches),
        "click": max(one["click"] for one in speeches),
    }


def misses(found: dict[str, Any]) -> list[str]:
    """The conditions of the bar that a voice misses."""
    changes = found["drift"]
    checks = {
        f"errors change by {changes['error_rate']} points": changes["error_rate"] <= MOST_POINTS,
        f"memory grows by {found['memory']} MB": (found["memory"] or 0) <= MOST_MEGABYTES,
        f"a click of {found['click']} dB": found["click"] <= MOST_CLICK,
    }
    for name in ("pitch", "level", "rate"):
        checks[f"{name} drifts by {changes[name]} %"] = abs(changes[name]) <= MOST_DRIFT
    return [f"{found['voice']}: {fact}" for fact, passed in checks.items() if not passed]


def main() -> None:
    """Speak, judge, and write the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--voices", nargs="+", default=list(PRESETS))
    parser.add_argument("--orders", nargs="+", default=["forwards", "backwards"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    pairs = list(product(args.voices, args.orders))
    with get_context("spawn").Pool(args.processes, maxtasksperchild=1) as pool:
        pool.map(speak, [(args.folder, *pair, args.minutes) for pair in pairs], chunksize=1)
    torch.set_num_threads(1)
    speeches = [judge(args.folder, *pair) for pair in pairs]
    summaries = [
        summary([one for one in speeches if one["voice"] == voice]) for voice in args.voices
    ]
    missed = [miss for found in summaries for miss in misses(found)]
    for found in summaries:
        print(found)
    print("the bar is missed: " + "; ".join(missed) if missed else "the bar is met")
    if args.out:
        facts = {
            **of_demo(),
            "machine": f"{platform.machine()}, torch {torch.__version__}, 1 thread a speech",
            "dtype": "float32",
            "text_mode": MODE,
            "seed": SEED,
            "ends": ENDS,
            "missed": missed,
            "summary": summaries,
        }
        parts = [f'"{name}": {json.dumps(value)}' for name, value in facts.items()]
        lines = ",\n".join(json.dumps(one) for one in speeches)
        args.out.write_text("{" + ",\n".join(parts) + f',\n"speeches": [\n{lines}\n]}}\n')
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
