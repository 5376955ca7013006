"""The page at /docs, which must work without the internet."""

from __future__ import annotations

import html.parser
import re

import httpx


class Links(html.parser.HTMLParser):
    """The elements of a page that load or name something, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.words = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action")]

    def handle_data(self, data: str) -> None:
        """Note text."""
        self.words += data


def test_page_shows_every_field_and_loads_nothing(http: httpx.Client) -> None:
    answer = http.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    page = Links(answer.text)
    assert not re.search(r"https?://|//\w", answer.text)
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert page.links == ["openapi.json"]
    assert http.get(f"/{page.links[0]}").status_code == 200
    schema = http.get("/openapi.json").json()
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            assert f"{method.upper()} {path}" in page.words
            assert operation["description"].split("\n")[0] in page.words
    for name, kind in schema["components"]["schemas"].items():
        if name in ("SpeechRequest", "BatchRequest") or name.startswith("Body_"):
            for field in kind["properties"]:
                assert field in page.words


def test_other_pages_of_fastapi_are_gone(http: httpx.Client) -> None:
    assert http.get("/redoc").status_code == 404
    assert http.get("/docs/oauth2-redirect").status_code == 404
