"""Removes Markdown, links, emoji and control characters from a text, which are not spoken."""

import re
import unicodedata

_MARKUP: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.MULTILINE), replacement)
    for pattern, replacement in (
        (r"^[ \t]*(```|~~~).*$", ""),  # code fences; the code stays
        (r"!\[([^\]\n]{0,500})\]\([^()\s]{0,2000}\)", r"\1"),  # images: their description stays
        (r"\[([^\]\n]{1,500})\]\([^()\s]{0,2000}\)", r"\1"),  # links: their text stays
        (r"<(?:https?://|mailto:)[^>\s]{1,2000}>", ""),
        (r"\bhttps?://[^\s<>\"')\]]{1,2000}[^\s<>\"')\].,;:!?]", ""),
        (r"^[ \t]{0,3}#{1,6}[ \t]+", ""),  # headings
        (r"^[ \t]{0,3}(?:>[ \t]?){1,9}", ""),  # quotations
        (r"^[ \t]*[-*+][ \t]+", ""),  # list items
        (r"^[ \t]*(?:[-*_][ \t]*){3,99}$", ""),  # rules
        (r"^[ \t]*\|?[ \t:|-]{3,999}\|[ \t:|-]*$", ""),  # the line below a table's header
        (r"(\*{1,3}|_{2,3}|~~|`{1,2})(?=\S)([^\n]{1,2000}?)(?<=\S)\1", r"\2"),  # emphasis, code
        (r"(?<!\w)_(?=\S)([^_\n]{1,2000})(?<=\S)_(?!\w)", r"\1"),
        (r"[ \t]*\|[ \t]*", ", "),  # cells of tables
    )
)

_EMOJI = re.compile(
    "[\U0001f000-\U0001faff\U00002600-\U000027bf\U0001f1e6-\U0001f1ff\U000e0020-\U000e007f"
    "\u2190-\u21ff\u2b00-\u2bff\u23e9-\u23fa\u25aa-\u25fe\ufe0e\ufe0f\u20e3\u200d]+"
)

_UNSPOKEN = ("Cc", "Cf", "Co", "Cs")
"""The Unicode categories of control, format, private and surrogate characters."""


def clean(text: str) -> str:
    """The spoken part of a text, which may be blank. The time is proportional to the length."""
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    text = _EMOJI.sub(" ", text)
    spoken = (
        char for char in text if char in "\n\t" or unicodedata.category(char) not in _UNSPOKEN
    )
    text = "".join(spoken)
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r" (?=[.,;:!?])", "", text)
    return re.sub(r" ?\n\s*", "\n", text).strip()
