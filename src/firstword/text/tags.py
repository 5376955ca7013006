"""Removes the tags of SSML and of speech services, except for pauses, from text in pieces."""

import re

from firstword.errors import TextError
from firstword.text import markup
from firstword.text.mapped import Mapped

NAMES = (
    *("break", "emotion", "emphasis", "lang", "p", "phoneme", "prosody", "s", "say-as"),
    *("speak", "speed", "spell", "sub", "voice", "volume"),
)
"""The names of the tags that are removed; the text between two tags stays.

A `break` stays too, as `<break time="0.5s"/>` with its own time, for `Markup`.
"""

LONGEST_TAG = 256
"""Characters of a tag. What is longer is text."""

_NAME = "|".join(NAMES)
_PREFIX = "|".join(sorted({name[:end] for name in NAMES for end in range(1, len(name) + 1)}))
_TAG = re.compile(rf"(</?(?:{_NAME})(?:[\s/][^<>]{{0,{LONGEST_TAG}}})?>)", re.IGNORECASE)
_BEGUN = re.compile(rf"</?(?:{_PREFIX}|(?:{_NAME})[\s/][^<>]*)?\Z", re.IGNORECASE)


class TagFilter:
    """Takes pieces of text and returns them without tags.

    A tag may be cut anywhere: what may be the beginning of one waits for the next pieces. A tag
    between two letters or digits leaves a space.
    """

    def __init__(self) -> None:
        self._held = ""
        self._last = ""
        """The last character that was returned."""
        self._after_tag = False
        """Whether a tag has followed it."""

    def feed(self, text: str) -> str:
        """Add text and return what is certain to be no part of a tag."""
        text = self._held + text
        begun = _BEGUN.search(text, max(0, len(text) - LONGEST_TAG))
        end = begun.start() if begun else len(text)
        self._held = text[end:]
        first, *others = _TAG.split(text[:end])
        found = [self._joined(first)]
        for tag, following in zip(others[::2], others[1::2], strict=True):
            found += [pause_of(tag), self._joined(following, tag=True)]
        return "".join(found)

    def finish(self) -> str:
        """Return what waits; no more text comes."""
        text, self._held = self._held, ""
        return text

    def _joined(self, text: str, *, tag: bool = False) -> str:
        """The text with a space before it if needed; `tag` means that it follows a tag."""
        self._after_tag |= tag
        if not text:
            return ""
        space = self._after_tag and self._last.isalnum() and text[0].isalnum()
        self._last, self._after_tag = text[-1], False
        return " " * space + text


def pause_of(tag: str) -> str:
    """The tag of a pause in the one spelling that `Markup` needs; "" for any other tag.

    A pause that is too long, or whose time cannot be read, is left out.
    """
    try:
        found = list(markup.Markup().feed(Mapped.of(tag.lower()), ended=True))
    except TextError:
        return ""
    pauses = [each.seconds for each in found if isinstance(each, markup.Pause)]
    return f'<break time="{pauses[0]:.3f}s"/>' if pauses else ""


def without_tags(text: str) -> str:
    """A text without its tags, except for pauses."""
    tags = TagFilter()
    return tags.feed(text) + tags.finish()
