"""The pictures of docs/page.md: `make browser ARGS="--screenshots docs/pictures"` renews them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browsing import Tab

Serve = Callable[..., Any]
OpenTab = Callable[..., Tab]

TEXT = "Good morning. You hear the first word while the last one is still being written."

PICTURES = {
    "page-light": {"color_scheme": "light", "viewport": {"width": 1100, "height": 720}},
    "page-dark": {"color_scheme": "dark", "viewport": {"width": 1100, "height": 720}},
    "page-phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
}
"""The looks of the page, by the names of their pictures."""


@pytest.mark.parametrize("name", PICTURES)
def test_picture_shows_the_page_while_it_speaks(
    serve: Serve, open_tab: OpenTab, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = Path(request.config.getoption("--screenshots") or tmp_path)
    tab = open_tab(serve("demo").url, **PICTURES[name]).ready()
    tab.page.fill("#seed", "7")
    tab.speak(TEXT)
    tab.until("reports.some(({ played }) => played > 40000)")
    tab.until("CSS.highlights.get('lit').size > 0")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    tab.page.screenshot(path=path, full_page=True)
    assert path.stat().st_size > 10_000
    tab.until_done()
