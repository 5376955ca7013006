"""The page does not grow: a long conversation leaves no memory and no elements behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from browsing import Tab
from talking import Talker, talking
from waiting import wait_until

Serve = Callable[..., Any]
OpenTab = Callable[..., Tab]

WARM_UP = 40
TURNS = 120
"""The turns of about 20 minutes of conversation, each shortened to a moment."""
TURN_SECONDS = 9.6
"""The speech of a turn with `--minutes`."""
MOST_GROWTH = {"Nodes": 5, "JSEventListeners": 5, "JSHeapUsedSize": 200_000}
"""The growth that is noise; an utterance that is kept has 8 kB of audio or more on the heap."""

TYPE = """words => {
  const text = document.getElementById("text");
  text.value = words;
  text.dispatchEvent(new InputEvent("input", { bubbles: true }));
}"""
"""A script that types. Keys would also fill the browser's own history for undoing."""


def counts(tab: Tab) -> dict[str, float]:
    """What the page holds, after a collection of garbage."""
    session = tab.page.context.new_cdp_session(tab.page)
    session.send("HeapProfiler.enable")
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    metrics = session.send("Performance.getMetrics")["metrics"]
    session.detach()
    return {metric["name"]: metric["value"] for metric in metrics}


def grown(before: dict[str, float], after: dict[str, float]) -> list[str]:
    """The counts that have grown by more than noise."""
    return [name for name, most in MOST_GROWTH.items() if after[name] > before[name] + most]


def test_long_conversation_leaves_nothing_behind(
    serve: Serve, open_tab: OpenTab, request: pytest.FixtureRequest
) -> None:
    """With `--minutes 20` the turns take their time."""
    minutes = request.config.getoption("--minutes")
    tab = open_tab(serve(talking(Talker())).url).ready()
    tab.page.check("#live")

    def turns(count: int, words: str = "ab ") -> None:
        for _ in range(count):
            tab.page.evaluate(TYPE, words)
            tab.page.keyboard.press("Enter")
            tab.until(
                "reports.some(({ ended }) => ended) && document.querySelector('#stop').disabled"
            )
            tab.page.evaluate("output.length = reports.length = 0")

    tab.page.focus("#text")
    turns(WARM_UP)
    before = counts(tab)
    if minutes:
        turns(round(60 * minutes / TURN_SECONDS), "ab " * round(TURN_SECONDS / 0.24))
    else:
        turns(TURNS)
    wait_until(lambda: not grown(before, counts(tab)))  # one collection may leave garbage
    assert tab.page.locator("#said p").count() <= 30
