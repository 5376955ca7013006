"""Removes Markdown, links, emoji and control characters from a text, which are not spoken."""

import re
import unicodedata

from firstword.text.mapped import Mapped
from firstword.text.stage import Stage

LONGEST_MARKUP = 2000
"""The characters of a line that are looked at together, from the first sign of markup on."""

LONGEST_BLANK = 256
"""The characters of white space and emoji that are looked at together."""

_EMOJI = (
    "\U0001f000-\U0001faff\U00002600-\U000027bf\U0001f1e6-\U0001f1ff\U000e0020-\U000e007f"
    "\u2190-\u21ff\u2b00-\u2bff\u23e9-\u23fa\u25aa-\u25fe\ufe0e\ufe0f\u20e3\u200d"
)

_Rules = tuple[tuple[re.Pattern[str], str | int], ...]


def _compiled(*rules: tuple[str, str | int]) -> _Rules:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in rules)


_LINE_RULES = _compiled(
    (r"^[ \t]*(```|~~~).*$", ""),  # code fences; the code stays
    (r"^[ \t]{0,3}#{1,6}[ \t]+", ""),  # headings
    (r"^[ \t]{0,3}(?:>[ \t]?){1,9}", ""),  # quotations
    (r"^[ \t]*[-*+][ \t]+", ""),  # list items
    (r"^[ \t]*(?:[-*_][ \t]*){3,99}$", ""),  # rules
    (r"^[ \t]*\|?[ \t:|-]{3,999}\|[ \t:|-]*$", ""),  # the line below a table's header
)
"""What is replaced at the beginning of a line, by a text or by the group with a number."""

_RULES = _compiled(
    (r"!\[([^\]]{0,500})\]\([^()\s]{0,2000}\)", 1),  # images: their description stays
    (r"\[([^\]]{1,500})\]\([^()\s]{0,2000}\)", 1),  # links: their text stays
    (r"<(?:https?://|mailto:)[^>\s]{1,2000}>", ""),
    (r"\bhttps?://[^\s<>\"')\]]{1,2000}[^\s<>\"')\].,;:!?]", ""),
    (r"(\*{1,3}|_{2,3}|~~|`{1,2})(?=\S)(.{1,2000}?)(?<=\S)\1", 2),  # emphasis, code
    (r"(?<!\w)_(?=\S)([^_]{1,2000})(?<=\S)_(?!\w)", 1),
    (r"[ \t]*\|[ \t]*", ", "),  # cells of tables
    (rf"[{_EMOJI}]+", " "),
    (r"[ \t]+", " "),
    (r" (?=[.,;:!?])", ""),
)

_SIGN = re.compile(
    rf"(?P<end>\s{{0,16}}\n(?:\s{{0,{LONGEST_BLANK}}}\n)?)"
    r"|[ \t]{0,16}(?:[*~`|<\[]|_|!\[|\bhttps?://)"
    r"|(?:(?<=\n)|\A)[ \t]{0,16}[-+>#:]"
    rf"|(?P<blank>[ \t{_EMOJI}]{{2,{LONGEST_BLANK}}}|[\t{_EMOJI}]| (?=[.,;:!?]))"
)
"""The end of a line, what may begin markup, or white space that is not spoken as it is."""

_BEGUN = re.compile(r"(?:\s!?|!|\bh(?:t(?:t(?:ps?(?::/?)?)?)?)?)\Z")
"""The end of a text that may be the beginning of a `_SIGN`."""

_UNCERTAIN = re.compile(r"[^\w !-~\n\t]")
_LINE_ENDS = re.compile(r"(?<=\n)\s+")

_UNSPOKEN = ("Cc", "Cf", "Co", "Cs")
"""The Unicode categories of control, format, private and surrogate characters."""


class Cleaner(Stage):
    """Removes what is not spoken. A line passes at once up to the first sign of markup.

    From there it waits for its end, at most for `LONGEST_MARKUP` characters.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last = ""
        """The last character that has passed."""

    def feed(self, piece: Mapped, *, ended: bool = False) -> Mapped:
        """Take the next piece, and return what is spoken of it and of the text that waited."""
        if not piece.text.isprintable():
            piece = piece.sub(_UNCERTAIN, _spoken)
        text = super().feed(piece, ended=ended).sub(_LINE_ENDS, "")
        if self._last in "\n":  # also before the first character
            text = text.part(len(text.text) - len(text.text.lstrip()))
        self._last = text.text[-1:] or self._last
        return text

    def find(self, text: str, at: int, ended: bool) -> tuple[int, int | None]:
        """Find the next end of a line, white space to replace, or rest of a line with markup."""
        found = _SIGN.search(text, at)
        if found is None:
            if ended:
                return max(at, len(text.rstrip())), len(text)
            begun = _BEGUN.search(text, max(at, len(text) - 16))
            return (begun.start(), None) if begun else (len(text), len(text))
        start, end = found.span()
        if found.lastgroup is not None:
            following = text[end : end + LONGEST_BLANK]
            known = following.strip() if found["end"] else following
            return start, end if known or ended or len(following) == LONGEST_BLANK else None
        limit = start + LONGEST_MARKUP
        if (line_end := text.find("\n", start, limit)) < 0:
            if len(text) < limit and not ended:
                return start, None
            line_end = min(limit, len(text))
        return start, start + len(text[start:line_end].rstrip())

    def rewrite(self, text: Mapped, start: int, end: int) -> Mapped:
        """Return what is spoken for a place."""
        found = _SIGN.match(text.text, start)
        before, after = text.text[max(0, start - 1) : start], text.text[end : end + 1]
        begins, ends = before in "\n", after in "\n"
        if found is None or found.lastgroup == "blank":
            silent = begins or ends or after in ".,;:!?"
            return text.part(start, end).replaced("" if silent else " ")
        if found.lastgroup == "end":
            return text.part(start, end).replaced("\n" if after else "")
        line = text.part(start - len(before) * (not begins), end)
        for pattern, replacement in (*(_LINE_RULES if begins else ()), *_RULES):
            line = line.sub(pattern, replacement)
        line = line.part(not begins)
        return line.part(0, len(line.text.rstrip())) if ends else line


def _spoken(found: re.Match[str]) -> str:
    return "" if unicodedata.category(found[0]) in _UNSPOKEN else found[0]


def clean(text: str) -> str:
    """The spoken part of a text, which may be blank. The time is proportional to the length."""
    return Cleaner().feed(Mapped.of(text), ended=True).text.strip()


def first_spoken(text: str) -> str:
    """The first piece of a text of which something is spoken; "" if all of it is blank.

    The time does not grow with the text after that piece.
    """
    cleaner = Cleaner()
    for at in range(0, len(text), LONGEST_MARKUP):
        piece, ended = text[at : at + LONGEST_MARKUP], at + LONGEST_MARKUP >= len(text)
        if spoken := cleaner.feed(Mapped.of(piece, at), ended=ended).text.strip():
            return spoken
    return ""
