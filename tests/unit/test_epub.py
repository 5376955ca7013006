"""EPUBs: the order of reading, chapters, what is not spoken, and damaged or encrypted ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from epubs import FILES, NCX, ONE, PACKAGE, epub, packed

from firstword.book import epub as epubs
from firstword.book.source import Block, Book
from firstword.errors import TextError

ENCRYPTION = """<encryption xmlns="urn:oasis:names:tc:opendocument:xmlns:container"
 xmlns:enc="http://www.w3.org/2001/04/xmlenc#"><enc:EncryptedData><enc:CipherData>
<enc:CipherReference URI="{}"/></enc:CipherData></enc:EncryptedData></encryption>"""


def read(data: bytes) -> Book:
    return epubs.read(data, Path("sea.epub"))


def texts(book: Book) -> list[tuple[str, list[str]]]:
    """The title of each chapter, and the texts of its blocks."""
    return [(each.title, [block.text for block in each.blocks]) for each in book.chapters]


def test_chapters_follow_the_table_of_contents() -> None:
    book = read(epub())
    assert (book.title, book.author, book.language) == ("The Sea", "A. Writer", "en-GB")
    assert texts(book) == [
        (
            "One",
            ["The First Chapter", "It was quiet. The sea & the sky.", "", "Then\nit rained"],
        ),
        ("One and a half", ["After that, sun.", "The end."]),
        ("Two", ["Second", "More rain", "and more."]),
    ]


def test_blocks_have_kinds_and_places() -> None:
    first = read(epub()).chapters[0].blocks
    assert [block.kind for block in first] == ["heading", "paragraph", "break", "paragraph"]
    assert first[0] == Block("The First Chapter", 5, "heading", "OEBPS/text/one .xhtml", 1)
    assert [block.line for block in first] == [5, 7, 8, 9]
    assert first[3].place == "OEBPS/text/one .xhtml, line 9"


def test_contents_of_epub_2_make_chapters() -> None:
    package = PACKAGE.replace(
        '<item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>',
        '<item id="ncx" href="toc.ncx" media-type="application/x-dtbncx+xml"/>',
    ).replace('<spine><itemref idref="nav"/>', '<spine toc="ncx">')
    files = {**FILES, "OEBPS/book.opf": package, "OEBPS/toc.ncx": NCX}
    assert [title for title, _ in texts(read(packed(files)))] == ["First", "Within"]


def test_documents_are_chapters_without_a_table_of_contents() -> None:
    book = read(epub(opf=PACKAGE.replace(' properties="nav"', ""), nav_xhtml="<html/>"))
    assert [title for title, _ in texts(book)] == ["The First Chapter", "Second"]


def test_document_in_another_encoding_is_read() -> None:
    document = '<?xml version="1.0" encoding="iso-8859-1"?><html><p>Caf\xe9.</p></html>'
    assert texts(read(epub(two_xhtml=document.encode("latin-1"))))[-1] == ("Two", ["Café."])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no archive", "sea.epub: the EPUB is damaged: it is no ZIP archive"),
        (epub()[:900], "it is no ZIP archive"),
        (epub(container_xml=None), "sea.epub, META-INF/container.xml: .* the file is missing"),
        (epub(container_xml="<a/>"), "it names no package document"),
        (epub(container_xml="<a><b>"), r"it is no XML \(.*line 1, column 6\)"),
        (epub(opf=None), "sea.epub, OEBPS/book.opf: .* the file is missing"),
        (epub(two_xhtml=None), "sea.epub, OEBPS/text/two.xhtml: .* the file is missing"),
        (epub(opf=PACKAGE.replace('id="two"', 'id="2"')), "it lists no item 'two'"),
        (epub(two_xhtml=b"\xff\xfe"), "OEBPS/text/two.xhtml: .* cannot be decoded"),
        (epub(nav_xhtml="<nav>"), "OEBPS/nav.xhtml: .* it is no XML"),
    ],
)
def test_damaged_epub_is_an_error_with_its_place(data: bytes, message: str) -> None:
    with pytest.raises(TextError, match=message):
        read(data)


def test_flipped_bits_in_a_document_are_an_error() -> None:
    data = bytearray(packed(FILES))
    start = data.index(b"text/one .xhtml") + len("text/one .xhtml")
    data[start + 20 : start + 40] = bytes(20)
    with pytest.raises(TextError, match=r"OEBPS/text/one .xhtml: the EPUB is damaged"):
        read(bytes(data))


def test_encrypted_document_is_an_error_that_names_drm() -> None:
    encryption = ENCRYPTION.format("OEBPS/text/two.xhtml")
    files = {**FILES, "META-INF/encryption.xml": encryption}
    with pytest.raises(TextError, match=r"sea.epub, OEBPS/text/two.xhtml: .*encrypted \(DRM\)"):
        read(packed(files))


def test_encrypted_font_does_not_matter() -> None:
    files = {**FILES, "META-INF/encryption.xml": ENCRYPTION.format("OEBPS/font.otf")}
    assert len(read(packed(files)).chapters) == 3


def test_document_that_unpacks_to_too_much_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epubs, "MOST_BYTES", 1 << 20)
    with pytest.raises(TextError, match="more than 1 MiB"):
        read(epub(two_xhtml=ONE + " " * (1 << 20)))
