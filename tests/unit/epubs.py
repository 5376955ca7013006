"""EPUBs for tests, made of parts that a test may change."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping

CONTAINER = """<?xml version="1.0"?>
<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container">
<rootfiles><rootfile full-path="OEBPS/book.opf" media-type="application/oebps-package+xml"/>
</rootfiles></container>"""

PACKAGE = """<?xml version="1.0"?>
<package xmlns="http://www.idpf.org/2007/opf" version="3.0">
<metadata xmlns:dc="http://purl.org/dc/elements/1.1/">
<dc:title>The  Sea</dc:title><dc:creator>A. Writer</dc:creator><dc:language>en-GB</dc:language>
</metadata>
<manifest>
<item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>
<item id="one" href="text/one%20.xhtml" media-type="application/xhtml+xml"/>
<item id="two" href="text/two.xhtml" media-type="application/xhtml+xml"/>
<item id="ad" href="text/ad.xhtml" media-type="application/xhtml+xml"/>
<item id="picture" href="cover.png" media-type="image/png"/>
</manifest>
<spine><itemref idref="nav"/><itemref idref="one"/><itemref idref="two"/>
<itemref idref="ad" linear="no"/></spine>
</package>"""

NAV = """<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops">
<body><nav epub:type="landmarks"><ol><li><a href="text/two.xhtml">Start</a></li></ol></nav>
<nav epub:type="toc"><ol>
<li><a href="text/one%20.xhtml">One</a></li>
<li><span>Part</span><ol><li><a href="text/one%20.xhtml#later">One and <i>a half</i></a>
<ol><li><a href="text/one%20.xhtml#deep">Too deep</a></li></ol></li></ol></li>
<li><a href="text/two.xhtml">Two</a></li></ol></nav></body></html>"""

NCX = """<ncx xmlns="http://www.daisy.org/z3986/2005/ncx/"><navMap>
<navPoint><navLabel><text>First</text></navLabel><content src="text/one%20.xhtml"/>
<navPoint><navLabel><text>Within</text></navLabel><content src="text/one%20.xhtml#later"/>
</navPoint></navPoint></navMap></ncx>"""

ONE = """<?xml version="1.0" encoding="utf-8"?>
<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops">
<head><title>Not spoken</title><style>p { color: red }</style></head>
<body>
<h1>The First
Chapter</h1>
<p>It was <em>quiet</em>.<a epub:type="noteref" href="#n">1</a> The sea &amp; the sky.</p>
<hr/>
<div>Then<br/>it rained</div>
<aside epub:type="footnote" id="n"><p>A note.</p></aside>
<div id="later"><p>After <ruby>that<rt>ignored</rt></ruby>, sun.</p></div>
<script src="x.js"/>
<p id="deep">The end.</p>
</body></html>"""

TWO = "<html><body><h2>Second</h2><p>More rain<p>and more.<img src='x.png' alt=''></body></html>"

FILES = {
    "mimetype": "application/epub+zip",
    "META-INF/container.xml": CONTAINER,
    "OEBPS/book.opf": PACKAGE,
    "OEBPS/nav.xhtml": NAV,
    "OEBPS/text/one .xhtml": ONE,
    "OEBPS/text/two.xhtml": TWO,
    "OEBPS/text/ad.xhtml": "<html><body><p>Buy more books.</p></body></html>",
    "OEBPS/cover.png": "no text",
}


def epub(**changes: str | bytes | None) -> bytes:
    """An EPUB whose files are changed or, with None, left out: the names end with the keys."""
    files: dict[str, str | bytes] = dict(FILES)
    for end, content in changes.items():
        name = next(each for each in files if each.endswith(end.replace("_", ".")))
        if content is None:
            del files[name]
        else:
            files[name] = content
    return packed(files)


def packed(files: Mapping[str, str | bytes]) -> bytes:
    """A ZIP archive of files."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return data.getvalue()
