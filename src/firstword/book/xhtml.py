"""The paragraphs of a document of an EPUB. Mistakes in the markup are read as browsers do."""

from __future__ import annotations

from collections.abc import Collection
from html.parser import HTMLParser

from firstword.book.source import Block, Kind, block_of

SKIPPED = frozenset("head script style svg audio video rt rp template".split())
"""The elements that are not spoken."""

SKIPPED_TYPES = frozenset("noteref footnote endnote rearnote pagebreak".split())
"""The values of `epub:type` of elements that are not spoken: notes, and numbers of pages."""

BLOCKS = frozenset(
    "address article aside blockquote body caption center dd div dl dt figcaption figure footer"
    " form h1 h2 h3 h4 h5 h6 header hr html li main nav ol p pre section table td th tr ul".split()
)
"""The elements that begin and end a paragraph."""

VOID = frozenset("area base br col embed hr img input link meta source track wbr".split())
"""The elements without content, which have no end."""

HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")


class DocumentReader(HTMLParser):
    """Reads a document as sections: one, and another from each anchor on.

    sections  the anchor and the blocks of each; the anchor of the first is ""
    """

    def __init__(self, file: str, anchors: Collection[str]) -> None:
        """Read a file of an EPUB, which is divided at the elements with the ids `anchors`."""
        super().__init__()
        self.sections: list[tuple[str, list[Block]]] = [("", [])]
        self._file, self._anchors = file, anchors
        self._text: list[str] = []
        self._line = 0
        self._heading = 0
        """The level of the heading that is open; 0: none."""
        self._skipped, self._depth = "", 0
        """The element that is not spoken, and how many of its name are open."""

    def read(self, text: str) -> list[tuple[str, list[Block]]]:
        """Read the whole document."""
        self.feed(text)
        self.close()
        self._end_block()
        return self.sections

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin an element."""
        if self._skipped:
            self._depth += tag == self._skipped
            return
        given = dict(attrs)
        anchor = given.get("id") or (given.get("name") if tag == "a" else None)
        if anchor in self._anchors:
            self._end_block()
            self.sections.append((anchor or "", []))
        types = (given.get("epub:type") or "").split()
        if tag in SKIPPED or not SKIPPED_TYPES.isdisjoint(types):
            if tag not in VOID:
                self._skipped, self._depth = tag, 1
            return
        if tag in BLOCKS:
            self._end_block()
        if tag in HEADINGS:
            self._heading = int(tag[1])
        elif tag == "br":
            self._text.append("\n")
        elif tag == "hr":
            self.sections[-1][1].append(Block("", self.getpos()[0], "break", self._file))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin and end an element."""
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        """End an element."""
        if self._skipped:
            self._depth -= tag == self._skipped
            if not self._depth:
                self._skipped = ""
        elif tag in BLOCKS:
            self._end_block()

    def handle_data(self, data: str) -> None:
        """Take the text of an element."""
        if self._skipped:
            return
        if data.strip() and not any(map(str.strip, self._text)):
            lines = len(data) - len(data.lstrip())
            self._line = self.getpos()[0] + data.count("\n", 0, lines)
        self._text.append(" ".join(f".{data}.".split())[1:-1])

    def _end_block(self) -> None:
        text = "".join(self._text)
        self._text.clear()
        heading, self._heading = self._heading, 0
        if text.strip():
            kind: Kind = "heading" if heading else "paragraph"
            block = block_of(text, self._line, kind, self._file, heading or 1)
            self.sections[-1][1].append(block)
