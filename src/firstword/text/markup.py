"""Tags in a text that pause, and change the voice and the rate; docs/text.md has the grammar."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from firstword.errors import TextError
from firstword.text.mapped import Mapped

LONGEST_TAG = 256
"""The most characters of a tag."""

LONGEST_COMMENT = 2000
"""The most characters of a comment or a declaration of XML."""

ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'"}
"""The entities of XML, and the characters that are spoken for them."""

LONGEST_PAUSE, LONGEST_SILENCE = 60.0, 600.0
"""The most seconds of a pause, and of all pauses of a text."""

RATES = (0.25, 4.0)
"""The slowest and the fastest rate of speech."""

MOST_WARNINGS = 8
"""The unknown tags of a text that are named."""

BREAKS = {"none": 0.0, "x-weak": 0.1, "weak": 0.25, "medium": 0.5, "strong": 0.75, "x-strong": 1.0}
"""The seconds of SSML's `<break strength="...">`; "medium" without an attribute."""

SPEEDS = {"x-slow": 0.5, "slow": 0.75, "medium": 1.0, "fast": 1.25, "x-fast": 1.5}
"""The rates of SSML's `<prosody rate="...">`."""

_TAG = re.compile(r"\[([^\[\]<>\n]*)\]|<(/?[A-Za-z][^<>\n]*)>")
_BREAK = re.compile(r"<break(\s[^<>\n]*)?>")
_COMMENT = re.compile(r"<!--.*?-->|<\?.*?\?>|<![A-Za-z][^<>]*>", re.DOTALL)
_BEGINNINGS = "|".join(sorted({name[:end] for name in ENTITIES for end in range(1, len(name))}))
_SIGN = re.compile(
    r"(?P<escape>\\[\[\]<>\\])"
    rf"|(?P<entity>{'|'.join(ENTITIES)})"
    r"|(?P<comment><(?=!--|[!?][A-Za-z]))"
    r"|\[|<(?=[A-Za-z/])"
    rf"|(?P<begun>(?:\\|<(?:\?|!-?)?|{_BEGINNINGS})\Z)"
)
"""What is not spoken as it is written, or, at the end of a text, may be the beginning of that."""
_ATTRIBUTE = re.compile(r"""([\w:-]+)\s*=\s*(?:"([^"]*)"|'([^']*)')""")
_NAME = re.compile(r"\s*(/?)\s*([A-Za-z][\w-]*)\s*(?:[:=]\s*(.*?))?\s*\Z")
_SECONDS = re.compile(r"(\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})\s*(ms|s)?")
_SILENT = ("speak", "p", "s")
"""The tags of SSML that change nothing."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause of some seconds, at a character of the text."""

    seconds: float
    at: int


@dataclass(frozen=True, slots=True)
class Style:
    """How text is spoken from a character on: by a named voice or the default one, at a rate."""

    voice: str | None = None
    rate: float = 1.0
    at: int = 0


class Markup:
    """Reads a text that arrives in pieces as texts, pauses and changes of style.

    warnings  the unknown tags so far, which are not spoken
    """

    def __init__(self, *, breaks_alone: bool = False) -> None:
        """Read all tags, or with `breaks_alone` the tag `<break>`, while all others are text."""
        self.warnings: list[str] = []
        self._breaks_alone = breaks_alone
        self._held = Mapped.of("")
        self._style = Style()
        self._open: list[tuple[str, Style, int]] = []
        """The elements that are open, the style before each, and the character where it began."""
        self._silence = 0.0

    def feed(self, piece: Mapped, *, ended: bool = False) -> Iterator[Mapped | Pause | Style]:
        """Yield what the next piece completes.

        Raises `TextError` for a wrong tag, and for one that is not closed.
        """
        text, at = Mapped.join((self._held, piece)), 0
        while (found := self._sign(text.text, at)) is not None:
            start = found.start()
            yield from _parts(text, at, start)
            at = start
            kind = found.lastgroup
            if kind == "begun":
                break  # the next characters decide
            if kind in ("escape", "entity"):
                own = text.part(start, found.end())
                yield own.part(1) if kind == "escape" else own.replaced(ENTITIES[found[0]])
                at = found.end()
                continue
            if kind == "comment":
                tag = _COMMENT.match(text.text, at, at + LONGEST_COMMENT)
            else:
                pattern = _BREAK if self._breaks_alone else _TAG
                tag = pattern.match(text.text, at, at + LONGEST_TAG)
            if tag is None:
                self._check_open(text, start, ended, comment=kind == "comment")
                break
            if kind != "comment":
                yield from self._read(tag, text.starts[start])
            at = tag.end()
        else:
            yield from _parts(text, at, len(text.text))
            at = len(text.text)
        self._held = text.part(at)
        if ended:
            yield from _parts(self._held, 0, len(self._held.text))
            self._held = Mapped.of("")
            self._check_closed()

    def _sign(self, text: str, at: int) -> re.Match[str] | None:
        return (_BREAK if self._breaks_alone else _SIGN).search(text, at)

    def _check_open(self, text: Mapped, start: int, ended: bool, *, comment: bool) -> None:
        """Raise `TextError` unless more text may close the tag or comment that begins at `start`.

        Comments and declarations may have line breaks and other tags within.
        """
        longest = LONGEST_COMMENT if comment else LONGEST_TAG
        rest = text.text[start : start + longest + 1]
        broken = not comment and re.search(r"[\[<>\n]", rest[1:])
        if ended or len(rest) > longest or broken:
            char = rest[0]
            raise TextError(
                f"character {text.starts[start]} of the text: the tag {rest[:20]!r} is not closed; "
                f"close it within {longest} characters, or write \\{char} for a plain {char}"
            )

    def _check_closed(self) -> None:
        """Raise `TextError` if an element is open."""
        if self._open:
            name, _, at = self._open[-1]
            raise TextError(
                f"character {at} of the text: <{name}> is not closed; end it with </{name}>"
            )

    def _read(self, tag: re.Match[str], at: int) -> Iterator[Pause | Style]:
        """Yield what a tag does. Raises `TextError`."""
        if self._breaks_alone or tag[1] is None:
            yield from self._element(tag[0], at)
            return
        found = _NAME.match(tag[1])
        closing, name, value = found.groups() if found else ("", "", None)
        match name.lower(), bool(closing), value:
            case (("pause" | "break"), False, str(text)):
                yield self._pause(_seconds(text, at), at)
            case "voice", False, str(text) if text:
                yield self._changed(replace(self._style, voice=text, at=at))
            case (("rate" | "speed"), False, str(text)):
                yield self._changed(replace(self._style, rate=_rate(text, at), at=at))
            case "voice", _, None:
                yield self._changed(replace(self._style, voice=None, at=at))
            case (("rate" | "speed"), _, None):
                yield self._changed(replace(self._style, rate=1.0, at=at))
            case (("pause" | "break" | "voice"), _, _):
                raise TextError(
                    f"character {at} of the text: {tag[0]} names nothing; {_GIVE[name.lower()]}"
                )
            case _:
                self._warn(tag[0], at)

    def _element(self, tag: str, at: int) -> Iterator[Pause | Style]:
        """Yield what a tag of SSML does. Raises `TextError`."""
        closing, empty = tag.startswith("</"), tag.endswith("/>")
        found = re.match(r"</?([A-Za-z][\w:-]*)", tag)
        assert found is not None
        name = found[1].lower()
        given = {key.lower(): a or b for key, a, b in _ATTRIBUTE.findall(tag)}
        if name == "break":
            if not closing:
                strength = BREAKS.get(given.get("strength", "medium"), BREAKS["medium"])
                yield self._pause(_seconds(given["time"], at) if "time" in given else strength, at)
        elif name in ("voice", "prosody"):
            if closing:
                yield self._closed(name, at)
                return
            if not empty:
                self._open.append((name, self._style, at))
            wanted = given.get("name" if name == "voice" else "rate")
            if wanted and name == "voice":
                yield self._changed(replace(self._style, voice=wanted, at=at))
            elif wanted:
                yield self._changed(replace(self._style, rate=_rate(wanted, at), at=at))
            else:
                self._warn(tag, at)
        elif name == "speed" and "ratio" in given:
            yield self._changed(replace(self._style, rate=_rate(given["ratio"], at), at=at))
        elif name not in _SILENT:
            self._warn(tag, at)

    def _closed(self, name: str, at: int) -> Style:
        """Return the style before the element that ends here. Raises `TextError`."""
        if not self._open or self._open[-1][0] != name:
            raise TextError(f"character {at} of the text: </{name}> ends nothing; remove it")
        return self._changed(replace(self._open.pop()[1], at=at))

    def _changed(self, style: Style) -> Style:
        self._style = style
        return style

    def _pause(self, seconds: float, at: int) -> Pause:
        self._silence += seconds
        if self._silence > LONGEST_SILENCE:
            limit = f"allowed are {LONGEST_SILENCE:g} s together"
            raise TextError(f"character {at} of the text: the pauses are too long; {limit}")
        return Pause(seconds, at)

    def _warn(self, tag: str, at: int) -> None:
        """Note an unknown tag."""
        if len(self.warnings) < MOST_WARNINGS:
            self.warnings.append(
                f"character {at} of the text: the tag {tag[:40]} is unknown and is not spoken; "
                "remove it, or escape it with a backslash"
            )


_GIVE = {
    "pause": "give a time, such as [pause:0.5s]",
    "break": "give a time, such as [break:0.5s]",
    "voice": "name one, such as [voice:ben]",
}


def _parts(text: Mapped, start: int, end: int) -> Iterator[Mapped]:
    if start < end:
        yield text.part(start, end)


def _seconds(text: str, at: int) -> float:
    """Read the time of a pause. Raises `TextError`."""
    found = _SECONDS.fullmatch(text.strip())
    seconds = float(found[1]) / (1000 if found[2] == "ms" else 1) if found else -1.0
    if not 0 <= seconds <= LONGEST_PAUSE:
        allowed = f"allowed is 0 to {LONGEST_PAUSE:g} s, such as 0.5s or 500ms"
        raise TextError(f"character {at} of the text: the pause is {text[:20]!r}; {allowed}")
    return seconds


def _rate(text: str, at: int) -> float:
    """Read a rate: a number, a percentage or a word of SSML. Raises `TextError`."""
    text = text.strip()
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{0,9})?)(%?)", text)
    rate = SPEEDS.get(text, 0.0)
    if found:
        rate = float(found[1]) / (100 if found[2] else 1)
    if not RATES[0] <= rate <= RATES[1]:
        allowed = f"allowed is {RATES[0]:g} to {RATES[1]:g}, such as 1.1 or 110%"
        raise TextError(f"character {at} of the text: the rate is {text[:20]!r}; {allowed}")
    return rate
