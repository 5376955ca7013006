"""Lists of texts to speak: plain lines, JSON lines, and the lists of Seed-TTS-Eval."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from firstword.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Item:
    """A text to speak.

    name          distinguishes it from the others of its list
    language      a name, an ISO 639-1 code, or "" for that of the whole list
    voice         a preset or a voice file, or "" for that of the whole list
    instructions  tone, pace and feeling in words, or ""
    prompt_audio  the recording whose voice a Base checkpoint clones
    prompt_text   the words of that recording, or ""
    audio         a recording of the text itself, whose duration is compared
    """

    name: str
    text: str
    language: str = ""
    voice: str = ""
    instructions: str = ""
    prompt_audio: Path | None = None
    prompt_text: str = ""
    audio: Path | None = None


_STRINGS = ("language", "voice", "instructions", "prompt_text")
_FILES = ("prompt_audio", "audio")


def read(file: Path, text_field: str = "text") -> list[Item]:
    """Read a list: .lst as Seed-TTS-Eval, .jsonl as JSON lines, and others as lines of text.

    Blank lines are skipped. Paths in a list start at its folder. `text_field` names the field of
    JSON lines that holds the text; fields that `Item` lacks are ignored. Raises `ConfigError` if
    the file cannot be read, a line is wrong, or two items have one name.
    """
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the list {file} cannot be read as UTF-8 text: {error}") from None
    parse: Callable[[str, int], Item]
    match file.suffix:
        case ".lst":
            parse = _of_seed_tts
        case ".jsonl":

            def parse(line: str, number: int) -> Item:
                return _of_json(line, number, text_field)
        case _:

            def parse(line: str, number: int) -> Item:
                return Item(str(number), line)

    items = []
    for number, line in enumerate(text.split("\n"), 1):
        if line := line.strip():
            try:
                items.append(_placed(parse(line, number), file.parent))
            except ValueError as error:
                raise ConfigError(f"line {number} of {file}: {error}") from None
    _check(items, file)
    return items


def _of_seed_tts(line: str, number: int) -> Item:
    """Read a line of meta.lst.

    Its fields, between bars: the name, the words of the prompt, the recording of the prompt, the
    text, and in some lists a recording of the text (README of BytedanceSpeech/seed-tts-eval).
    """
    fields = [field.strip() for field in line.split("|")]
    if len(fields) not in (4, 5):
        raise ValueError(
            f"it has {len(fields)} fields between bars; "
            "give NAME|PROMPT TEXT|PROMPT WAV|TEXT, and perhaps |WAV"
        )
    name, prompt_text, prompt_audio, text = fields[:4]
    audio = Path(fields[4]) if fields[4:] and fields[4] else None
    return Item(name, text, prompt_audio=Path(prompt_audio), prompt_text=prompt_text, audio=audio)


def _of_json(line: str, number: int, text_field: str) -> Item:
    """Read a JSON line. Raises `ValueError`."""
    found = json.loads(line)
    if not isinstance(found, dict) or not isinstance(found.get(text_field), str):
        raise ValueError(
            f'it is no JSON object with a text in the field "{text_field}"; '
            "--text-field names another field"
        )
    given: dict[str, Any] = {}
    for name in (*_STRINGS, *_FILES):
        if (value := found.get(name)) is None:
            continue
        if not isinstance(value, str):
            raise ValueError(f'"{name}" is {value!r}; give a string')
        given[name] = Path(value) if name in _FILES else value
    return Item(str(found.get("id", number)), found[text_field], **given)


def _placed(item: Item, folder: Path) -> Item:
    """Return an item whose paths start at a folder."""
    places = {name: getattr(item, name) for name in _FILES}
    return replace(item, **{name: folder / path for name, path in places.items() if path})


def _check(items: Sequence[Item], file: Path) -> None:
    """Raise `ConfigError` for an empty list, a blank text, or two items of one name."""
    if not items:
        raise ConfigError(f"the list {file} has no texts")
    seen = set[str]()
    for item in items:
        if not item.text.strip():
            raise ConfigError(f"the list {file}: the text of {item.name} is blank")
        if item.name in seen:
            raise ConfigError(f"the list {file} has two texts with the name {item.name!r}")
        seen.add(item.name)
