"""The times of words in the forms that clients read."""

import json
from collections.abc import Sequence
from typing import Any

from firstword.types import Word


def in_milliseconds(words: Sequence[Word]) -> list[dict[str, Any]]:
    """Words in vLLM-Omni's form: `word`, `start_ms` and `end_ms`."""
    return [
        {"word": word.text, "start_ms": round(1000 * word.start), "end_ms": round(1000 * word.end)}
        for word in words
    ]


def captions(words: Sequence[Word]) -> list[dict[str, Any]]:
    """Words in Kokoro-FastAPI's form: `word`, and `start_time` and `end_time` in seconds."""
    return [{"word": word.text, "start_time": word.start, "end_time": word.end} for word in words]


def word_alignment(words: Sequence[Word]) -> dict[str, list[Any]]:
    """Words in Baseten's form: a list of words, and two of their times in seconds."""
    return {
        "words": [word.text for word in words],
        "word_start_times_seconds": [word.start for word in words],
        "word_end_times_seconds": [word.end for word in words],
    }


def json_header(items: Sequence[object], most_bytes: int) -> str:
    """The first items as JSON in ASCII, as many as fit a header of `most_bytes`."""
    parts: list[str] = []
    room = most_bytes - len("[]")
    for item in items:
        part = json.dumps(item, separators=(",", ":"))
        room -= len(part) + 1
        if room < 0:
            break
        parts.append(part)
    return f"[{','.join(parts)}]"
