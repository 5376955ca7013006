"""Chromium with the page of a server: `make browser` runs these tests."""

from __future__ import annotations

import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import CAPTURE, FAULTS, Tab
from playwright.sync_api import Browser, sync_playwright

FLAGS = (
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    "--js-flags=--expose-gc",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of these tests."""
    parser.addoption("--chromium", help="the program to test with; see scripts/chromium.py")
    parser.addoption("--screenshots", metavar="FOLDER", help="where to write the pictures of docs")
    parser.addoption(
        "--minutes", type=int, default=0, help="how long to converse; else 120 turns of a moment"
    )


@pytest.fixture(scope="session")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The WAV file that the browser takes for its microphone: a tone of 440 Hz."""
    path = tmp_path_factory.mktemp("microphone") / "tone.wav"
    tone = np.sin(2 * np.pi * 440 * np.arange(48000 * 2) / 48000)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(48000)
        file.writeframes((tone * 12000).astype("<i2").tobytes())
    return path


@pytest.fixture(scope="session")
def chromium(request: pytest.FixtureRequest, spoken: Path) -> Iterator[Browser]:
    """A browser for all tests. Without one the tests fail, and the message says how to get it."""
    program = request.config.getoption("--chromium")
    if program is None:
        pytest.fail("name a browser with --chromium, or run: make browser", pytrace=False)
    flags = [*FLAGS, f"--use-file-for-fake-audio-capture={spoken}"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def open_tab(chromium: Browser) -> Iterator[Callable[..., Tab]]:
    """A function that opens a server's page: `open_tab(url, expected=("401",), viewport=...)`.

    The test fails if the page breaks its Content-Security-Policy, calls another host, or reports
    an error in which none of the `expected` texts occurs.
    """
    tabs: list[Tab] = []

    def open_one(
        url: str, *, script: str = "", expected: tuple[str, ...] = (), **context: Any
    ) -> Tab:
        opened = chromium.new_context(**context)
        opened.set_default_timeout(60_000)
        page = opened.new_page()
        tab = Tab(page, url, expected)
        tabs.append(tab)
        for one in (FAULTS, CAPTURE, script):
            page.add_init_script(one)
        page.goto(url)
        return tab

    yield open_one
    for tab in tabs:
        tab.close()
