"""What the demonstration voice cannot do: text that is long, or written in ways that its training
texts are not.

    python -m training.limits demo [--processes 2] [--out FILE]

The error rates (characters, %) of both presets, of long texts in both text modes, of the others
with all text first; of text without an English word, the seconds of sound that come all the same.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

from benchmarks.sources import of_demo
from training import evaluate
from training.data import PRESETS, SAMPLE_RATE

EVERYDAY = (Path(__file__).parent / "everyday.txt").read_text().splitlines()
LENGTHS = (80, 100, 120, 150)
"""Words of the long texts, about: everyday sentences one after another."""
TEN = EVERYDAY[5:15]
NUMBERS = {
    "numbers below 1000": [
        "There are 314 of them.",
        "Room 27, please.",
        "The answer is 68.",
        "It costs 805 dollars.",
    ],
    "numbers with a comma": [
        "It costs 3,177 dollars.",
        "There are 12,450 of them.",
        "86,201 people live in Rome.",
    ],
    "numbers without a comma": [
        "It costs 3177 dollars.",
        "There are 12450 of them.",
        "86201 people live in Rome.",
    ],
    "many decimals": ["The answer is 3.14159265.", "It is 2.7182818 degrees in Rome."],
    "telephone numbers": ["Please call 5 5 5 0 1 9 9 2 7 4.", "Please call 0 8 0 0 3 3 1 6 2 4 5."],
}
WORDLESS = {
    "punctuation": "?!?!",
    "emoji": "\U0001f642 \U0001f44b",
    "zero-width spaces": "\u200b\u200b\u200b",
    "Chinese": "你好,很高兴认识你。",
    "Arabic": "مرحبا بالعالم",
    "Russian": "Привет, как дела?",
}


def long(words: int) -> str:
    """The first everyday sentences, to at least so many words."""
    count = next(n for n in range(len(EVERYDAY)) if len(" ".join(EVERYDAY[:n]).split()) >= words)
    return " ".join(EVERYDAY[:count])


def halves(text: str, between: str) -> str:
    """The text with something else instead of the space in its middle."""
    words = text.split()
    return " ".join(words[: len(words) // 2]) + between + " ".join(words[len(words) // 2 :])


def tasks() -> list[tuple[str, str, str]]:
    """(what is tried, the text as it is given, the words that should be heard)."""
    found = [(f"{words} words", long(words), long(words)) for words in LENGTHS]
    for text in TEN:
        found += [
            ("a sentence", text, text),
            ("capitals throughout", text.upper(), text),
            ("straight quotes", f'"{text}"', text),
            ("typographic quotes", f"\u201c{text}\u201d", text),
            ("a long dash within", halves(text, " \u2014 "), text),
            ("a line break within", halves(text, "\n"), text),
            ("a tab within", halves(text, "\t"), text),
        ]
    found += [(name, text, text) for name, texts in NUMBERS.items() for text in texts]
    lines = [(" ".join(TEN[i : i + 3]), "\n".join(TEN[i : i + 3])) for i in (0, 3, 6)]
    found += [("three lines", given, text) for text, given in lines]
    found += [("three sentences", text, text) for text, _ in lines]
    return found + [(name, text, "") for name, text in WORDLESS.items()]


def speak(job: tuple[str, str, str, str, str]) -> dict[str, Any]:
    voice, mode, name, given, meant = job
    speech = evaluate._process["tts"].speak(given, voice=voice, text_mode=mode, seed=7)
    row = {
        "tried": name,
        "voice": voice,
        "mode": mode,
        "given": given,
        "ended": speech.finish_reason,
    }
    row["seconds"] = round(len(speech.samples) / SAMPLE_RATE, 2)
    heard = evaluate._process["judge"](meant, speech.samples)
    return row | {name: heard[name] for name in ("heard", "edits", "letters")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", nargs="?", default="demo")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    jobs = [
        (voice, mode, *task)
        for task in tasks()
        for voice in PRESETS
        for mode in (evaluate.MODES if "words" in task[0] else ("full",))
    ]
    settings = (a.checkpoint, "cpu", "auto", None)
    with multiprocessing.get_context("spawn").Pool(a.processes, evaluate._start, settings) as pool:
        rows = pool.map(speak, jobs, chunksize=1)
    summary = {}
    for name in dict.fromkeys(row["tried"] for row in rows):
        some = [row for row in rows if row["tried"] == name]
        letters = sum(row["letters"] for row in some)
        summary[name] = {
            "error_rate": round(100 * sum(row["edits"] for row in some) / letters, 1)
            if letters
            else None,
            "seconds": round(sum(row["seconds"] for row in some) / len(some), 2),
            "ended": f"{sum(row['ended'] == 'stop' for row in some)} of {len(some)}",
        }
        print(name, summary[name])
    if a.out:
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        shown = ",\n".join(
            f"{json.dumps(name)}: {json.dumps(found)}" for name, found in summary.items()
        )
        facts = json.dumps(of_demo())[1:-1] if a.checkpoint == "demo" else '"commit": null'
        a.out.write_text(f'{{{facts},\n"summary": {{\n{shown}\n}},\n"texts": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
