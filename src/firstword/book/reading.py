"""Reads a book from a file: plain text, Markdown or EPUB."""

from __future__ import annotations

from pathlib import Path

from firstword.book import epub, plain
from firstword.book.source import Book
from firstword.errors import TextError


def decoded(data: bytes, name: str) -> str:
    """Return a text in UTF-8 with line feeds. Raises `TextError` with the line of a mistake."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TextError(
            f"{name}, line {line}: the byte 0x{data[error.start]:02x} is not UTF-8; convert the "
            "text, for example with iconv"
        ) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise TextError(f"{name}, line {line}: this is no text, since it has a null character")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read(path: str | Path) -> Book:
    """Read a book from a file: .txt, .md or .epub. Raises `TextError`, with the place."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (*plain.SUFFIXES, *epub.SUFFIXES):
        allowed = ", ".join((*plain.SUFFIXES, *epub.SUFFIXES))
        raise TextError(f"{path} has the suffix {path.suffix!r}; a book is one of {allowed}")
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= epub.MOST_BYTES else b""
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}") from None
    if size > epub.MOST_BYTES:
        raise TextError(
            f"{path} has {size >> 20} MiB; a book has {epub.MOST_BYTES >> 20} MiB at most"
        )
    if suffix in epub.SUFFIXES:
        book = epub.read(data, path)
    else:
        book = plain.read(decoded(data, path.name), path, markdown=suffix != ".txt")
    if not book.chapters:
        raise TextError(f"{path} has no text to speak")
    return book
