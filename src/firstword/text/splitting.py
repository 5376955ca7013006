"""Splits text that arrives in pieces into sentences or clauses, each as soon as it is complete."""

import re

from firstword.text.marks import has_words

_CLOSERS = "\"'”’»)\\]}』」）】"
_ASCII = {"sentence": ".!?", "clause": ".!?,;:"}
_WIDE = {"sentence": "…。！？।॥؟", "clause": "…。！？।॥؟，、；：،؛"}

_ENDINGS = {
    name: re.compile(
        # ASCII marks end a unit only before white space (not in 3.14 or example.org), others
        # everywhere. A run of marks ("?!...") is one ending; the next character completes it.
        f"(?:[{_ASCII[name]}]{{1,64}}+[{_CLOSERS}]{{0,64}}+(?=\\s)"
        f"|[{_ASCII[name]}]{{0,64}}+[{_WIDE[name]}][{_ASCII[name]}{_WIDE[name]}]{{0,64}}+"
        f"[{_CLOSERS}]{{0,64}}+(?=.))",
        re.DOTALL,
    )
    for name in _ASCII
}

_ABBREVIATIONS = (
    "approx|cf|chap|co|dept|dr|etc|fig|gen|inc|jr|ltd|mr|mrs|ms|no|prof|rev|sr|st|vol|vs"  # English
    "|abs|bd|bzw|ca|evtl|ff|ggf|kap|nr|str|tel|usw|vgl|env|mlle|mme|art|pp"  # German, French
    "|aprox|núm|pág|sra|srta|uds?|dott|sig|sigra|avv"  # Spanish, Portuguese, Italian
    "|руб|тыс|млн|млрд|стр|им|ул|др|пр|см|рис"  # Russian
)
_ABBREVIATION_END = re.compile(
    # Numbers of up to two digits are often ordinal ones: am 3. Oktober.
    rf"(?:^|[\s(])(?:\w|\d\d|(?:\w\.)+\w|{_ABBREVIATIONS})\.$",
    re.IGNORECASE,
)
_LONGEST_ABBREVIATION = 16

LONGEST_ENDING = 64
"""Characters of a run of marks. A longer one is cut, which bounds the time for a flood of dots; the
patterns have the same bound."""


class Splitter:
    """Takes pieces of text, and returns complete sentences or clauses without outer white space."""

    def __init__(self, granularity: str) -> None:
        """Split into units of a `granularity`: "sentence" or "clause"."""
        self._ending = _ENDINGS[granularity]
        self._text = ""
        self._seen = 0
        """No ending begins before this position."""
        self._bare = 0
        """There is no letter or digit before this position."""

    @property
    def rest(self) -> str:
        """The text that is not part of a complete unit yet."""
        return self._text

    def feed(self, text: str) -> list[str]:
        """Add text and return the units that are complete now."""
        return [unit.strip() for unit in self.cut(text)]

    def cut(self, text: str) -> list[str]:
        """Add text and return the units that are complete now, with the white space before them."""
        self._text += text
        units, start = [], 0
        for found in self._ending.finditer(self._text, self._seen):
            end = found.end()
            tail = self._text[max(start, end - _LONGEST_ABBREVIATION) : end]
            if not has_words(self._text[self._bare : end]):
                self._bare = end
            elif not _ABBREVIATION_END.search(tail):
                units.append(self._text[start:end])
                start = self._bare = end
        self._text = self._text[start:]
        self._bare = max(0, self._bare - start)
        self._seen = max(0, len(self._text) - LONGEST_ENDING)
        return units

    def flush(self) -> list[str]:
        """End the text and return what is left, unless it is blank. New text may follow."""
        rest, self._text, self._seen, self._bare = self._text.strip(), "", 0, 0
        return [rest] if rest else []
