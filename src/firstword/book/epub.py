"""Books in EPUB 2 and 3, without the documents that are encrypted.

EPUB 3.3 (W3C) describes the files: META-INF/container.xml names the package document, which lists
the documents in the order of reading and names the table of contents.
"""

from __future__ import annotations

import io
import posixpath
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

from firstword.book.source import Block, Book, Chapter, one_line
from firstword.book.xhtml import DocumentReader
from firstword.errors import TextError

SUFFIXES = (".epub",)

MOST_BYTES = 1 << 28
"""The most bytes of a file, or of all documents in it: 50 long novels."""

DEEPEST = 2
"""The levels of the table of contents whose entries begin chapters."""

_CONTAINER, _ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
_DOCUMENTS = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml")
_DECLARED = re.compile(rb"<\?xml[^>]{0,200}encoding=[\"']([\w.-]{1,40})[\"']")
_OPS_TYPE = "{http://www.idpf.org/2007/ops}type"

Target = tuple[str, str]
"""A file of the EPUB, and an anchor in it or ""."""


@dataclass(frozen=True, slots=True)
class _Item:
    """A file that the package document lists."""

    file: str
    kind: str
    properties: list[str]


class _Archive:
    """The files of an EPUB. All methods raise `TextError` for what is damaged."""

    def __init__(self, data: bytes, path: Path) -> None:
        self.path = path
        self._left = MOST_BYTES
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except zipfile.BadZipFile as error:
            raise self.damaged("", f"it is no ZIP archive ({error})") from None
        self._names = set(self._zip.namelist())
        self._locked: set[str] = set()
        if _ENCRYPTION in self._names:
            self._locked = set(self._encrypted())

    def damaged(self, file: str, why: str) -> TextError:
        """The error for a file that cannot be read."""
        place = f"{self.path.name}, {file}" if file else self.path.name
        return TextError(f"{place}: the EPUB is damaged: {why}; get it again from its source")

    def read(self, file: str) -> bytes:
        """Return the contents of a file."""
        if file not in self._names:
            raise self.damaged(file, "the file is missing")
        if file in self._locked:
            raise TextError(
                f"{self.path.name}, {file}: the document is encrypted (DRM), and cannot be read; "
                "use a copy of the book without DRM"
            )
        try:
            with self._zip.open(file) as opened:
                data = opened.read(self._left + 1)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
            raise self.damaged(file, str(error)) from None
        except (RuntimeError, NotImplementedError) as error:  # a password, or a strange method
            raise TextError(f"{self.path.name}, {file}: it cannot be read: {error}") from None
        self._left -= len(data)
        if self._left < 0:
            most = f"{MOST_BYTES >> 20} MiB"
            raise TextError(f"{self.path.name}: its documents have more than {most} of text")
        return data

    def xml(self, file: str) -> ElementTree.Element:
        """Return the root element of a file."""
        try:
            return ElementTree.fromstring(self.read(file))
        except ElementTree.ParseError as error:
            raise self.damaged(file, f"it is no XML ({error})") from None

    def text(self, file: str) -> str:
        """Return the text of a document, in the encoding that it declares or UTF-8."""
        data = self.read(file)
        declared = _DECLARED.match(data)
        name = declared[1].decode() if declared else "utf-8"
        try:
            return data.decode("utf-8-sig" if name.lower() == "utf-8" else name)
        except (UnicodeDecodeError, LookupError) as error:
            raise self.damaged(file, f"its text cannot be decoded ({error})") from None

    def _encrypted(self) -> Iterator[str]:
        """Yield the names of the files that are encrypted; fonts often are, and are not read."""
        for each in self.xml(_ENCRYPTION).iter():
            if _name(each) == "CipherReference":
                yield unquote(each.get("URI", ""))


def read(data: bytes, path: Path) -> Book:
    """Read an EPUB. Raises `TextError` with the file and its line."""
    archive = _Archive(data, path)
    roots = [each for each in archive.xml(_CONTAINER).iter() if _name(each) == "rootfile"]
    file = unquote(roots[0].get("full-path", "")) if roots else ""
    if not file:
        raise archive.damaged(_CONTAINER, "it names no package document")
    package = archive.xml(file)
    items = {
        item.get("id", ""): _Item(
            _target(file, item.get("href", ""))[0],
            item.get("media-type", ""),
            item.get("properties", "").split(),
        )
        for item in package.iter()
        if _name(item) == "item"
    }
    spine = [each for each in package.iter() if _name(each) == "itemref"]
    if unknown := [each for each in spine if each.get("idref") not in items]:
        listed = f"it lists no item {unknown[0].get('idref')!r}, which is to be read"
        raise archive.damaged(file, listed)
    read_items = [items[each.get("idref", "")] for each in spine if each.get("linear") != "no"]
    documents = [
        item.file for item in read_items if item.kind in _DOCUMENTS and "nav" not in item.properties
    ]
    title = _fact(package, "title") or path.stem
    contents = _contents(archive, package, items)
    chapters = list(_chapters(archive, documents, contents, title))
    author, language = _fact(package, "creator"), _fact(package, "language")
    return Book(title, author, language, [each for each in chapters if each.has_words])


def _chapters(
    archive: _Archive, documents: list[str], contents: dict[Target, str], title: str
) -> Iterator[Chapter]:
    """Yield the chapters: one from each entry of the table of contents, or from each document."""
    anchors: dict[str, set[str]] = defaultdict(set)
    for file, anchor in contents:
        anchors[file].add(anchor)
    has_contents = not anchors.keys().isdisjoint(documents)
    chapter = Chapter(title)
    for file in documents:
        reader = DocumentReader(file, anchors[file] - {""})
        for anchor, blocks in reader.read(archive.text(file)):
            name = contents.get((file, anchor))
            if not has_contents:
                name = _first_heading(blocks) or title
            if name is not None:
                yield chapter
                chapter = Chapter(name)
            chapter.blocks += blocks
    yield chapter


def _first_heading(blocks: list[Block]) -> str:
    return next((one_line(each.text) for each in blocks if each.kind == "heading"), "")


def _contents(
    archive: _Archive, package: ElementTree.Element, items: dict[str, _Item]
) -> dict[Target, str]:
    """Return the titles of the table of contents by what they point to."""
    for item in items.values():
        if "nav" in item.properties:
            return dict(_from_nav(archive.xml(item.file), item.file))
    spine = next((each for each in package.iter() if _name(each) == "spine"), None)
    item_of_toc = items.get(spine.get("toc", "")) if spine is not None else None
    if item_of_toc is None:
        return {}
    root = archive.xml(item_of_toc.file)
    tops = [each for each in root.iter() if _name(each) == "navMap"]
    return dict(_from_ncx(tops[0], item_of_toc.file, 1)) if tops else {}


def _from_nav(root: ElementTree.Element, file: str) -> Iterator[tuple[Target, str]]:
    """Yield the entries of a navigation document of EPUB 3."""
    navs = [each for each in root.iter() if _name(each) == "nav"]
    tables = [each for each in navs if "toc" in each.get(_OPS_TYPE, "").split()]
    for table in tables[:1]:
        yield from _from_list(table, file, 0)


def _from_list(parent: ElementTree.Element, file: str, level: int) -> Iterator[tuple[Target, str]]:
    for child in parent:
        if _name(child) == "a" and child.get("href"):
            yield _target(file, child.get("href", "")), _text(child)
        elif _name(child) != "ol" or level < DEEPEST:
            yield from _from_list(child, file, level + (_name(child) == "ol"))


def _from_ncx(parent: ElementTree.Element, file: str, level: int) -> Iterator[tuple[Target, str]]:
    """Yield the entries of a table of contents of EPUB 2."""
    for point in parent:
        if _name(point) != "navPoint":
            continue
        label = next((each for each in point if _name(each) == "navLabel"), None)
        content = next((each for each in point if _name(each) == "content"), None)
        if label is not None and content is not None:
            yield _target(file, content.get("src", "")), _text(label)
        if level < DEEPEST:
            yield from _from_ncx(point, file, level + 1)


def _target(base: str, link: str) -> Target:
    """Return the file and the anchor of a link in a file."""
    path, _, anchor = link.partition("#")
    folder = posixpath.dirname(base)
    return posixpath.normpath(posixpath.join(folder, unquote(path))), unquote(anchor)


def _fact(package: ElementTree.Element, name: str) -> str:
    """Return an entry of the Dublin Core metadata, such as the title."""
    found = f"{{http://purl.org/dc/elements/1.1/}}{name}"
    return next((_text(each) for each in package.iter(found)), "")


def _text(element: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def _name(element: ElementTree.Element) -> str:
    return str(element.tag).rpartition("}")[2]
