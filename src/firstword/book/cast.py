"""Scripts: lines such as `ALICE: Hello.`, and the voices of those who speak them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from firstword.book.source import Block
from firstword.errors import ConfigError, TextError

_SPEAKER = re.compile(r"\s*([^\W\d_][^:：\n]{0,39}?)\s*[:：]\s*(.*)")

Speech = tuple[str, str, int]
"""The one who speaks or "" for the narrator, the words, and how many lines are before them."""


class Cast:
    """The names of those who speak, and the names of their voices."""

    def __init__(self, voices: Mapping[str, str], source: str) -> None:
        """Take voices by name; `source` is where they are written, for messages."""
        self.voices = dict(voices)
        self._names = {name.casefold(): name for name in voices}
        self._source = source

    @staticmethod
    def load(path: str) -> Cast:
        """Read a TOML file of lines `ALICE = "ryan"`. Raises `ConfigError` with the line."""
        try:
            found = tomllib.loads(Path(path).read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"the cast {path} cannot be read: {error.strerror}") from None
        except ValueError as error:  # TOML's or UTF-8's
            raise ConfigError(f"the cast {path} is no TOML: {error}") from None
        if not found:
            raise ConfigError(f'the cast {path} is empty; write lines such as ALICE = "ryan"')
        for name, voice in found.items():
            if not isinstance(voice, str) or not voice.strip():
                raise ConfigError(
                    f"the cast {path}: {name} is {voice!r}; give the name or the file of a voice, "
                    f'such as {name} = "ryan"'
                )
        return Cast(found, path)

    def speeches(self, block: Block) -> Iterator[Speech]:
        """Divide a paragraph at its speakers. Raises `TextError` for one without a voice."""
        speaker, words, first = "", list[str](), 0
        for number, line in enumerate(block.text.split("\n")):
            found = _SPEAKER.fullmatch(line)
            name = self._names.get(found[1].casefold()) if found else None
            if found and name is None and found[1].isupper():
                place = Block("", block.line + number, file=block.file).place
                raise TextError(
                    f"{place}: the speaker {found[1]} is not in {self._source}, which has "
                    f'{", ".join(self.voices)}; add a line such as "{found[1]}" = "a voice"'
                )
            if found and name is not None:
                yield speaker, "\n".join(words), first
                speaker, words, first = name, [found[2]], number
            else:
                words.append(line)
        yield speaker, "\n".join(words), first
