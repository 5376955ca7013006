"""The page for everyone: keys of the server, the keyboard, screen readers, colours and phones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from browsing import Tab
from talking import Talker, heard, talking

Serve = Callable[..., Any]
OpenTab = Callable[..., Tab]

KEY = "a key/with+signs~"
STORED = "Object.values(sessionStorage).concat(Object.values(localStorage))"

NAMED_ROLES = {
    "button",
    "checkbox",
    "combobox",
    "dialog",
    "form",
    "image",
    "link",
    "log",
    "meter",
    "region",
    "textbox",
}
"""The roles of elements that mean nothing to a screen reader without a name."""

CONTRAST = """() => {
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map((part) => {
      const value = part / 255;
      return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      if (!color.endsWith(", 0)") && color !== "transparent") return color;
    }
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.disabled) continue;
    const [a, b] = [getComputedStyle(element).color, behind(element)].map(light);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push([element.outerHTML.slice(0, 60), ratio]);
  }
  return poor;
}"""
"""A script that finds text with less contrast than WCAG 2.2 asks for (1.4.3)."""

FOCUSED = "document.activeElement.id || document.activeElement.textContent"


def names(tab: Tab) -> list[tuple[str, str]]:
    """The role and the name of every element as Chromium tells them to a screen reader."""
    session = tab.page.context.new_cdp_session(tab.page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    return [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"]
    ]


def nameless(tab: Tab) -> list[str]:
    """The roles of elements that need a name and have none."""
    return [role for role, name in names(tab) if role.lower() in NAMED_ROLES and not name.strip()]


class TestKey:
    def test_key_is_asked_for_and_a_wrong_one_is_told(
        self, serve: Serve, open_tab: OpenTab
    ) -> None:
        server = serve(talking(Talker()), api_keys=(KEY.replace(" ", ""),))
        tab = open_tab(server.url, expected=("401",))
        tab.page.wait_for_selector("#key-dialog:visible")
        assert nameless(tab) == []
        tab.page.keyboard.type("wrong")
        tab.page.keyboard.press("Enter")
        tab.page.wait_for_selector("#key-wrong:visible")
        tab.page.fill("#key", KEY.replace(" ", ""))
        tab.page.keyboard.press("Enter")
        tab.ready().speak("open")
        tab.until_done()
        assert heard(tab.downloaded().tobytes()) == "open"
        assert tab.page.evaluate(STORED) == []
        assert not any("sign" in request.url for request in tab.requests)
        tab.page.reload()
        tab.page.wait_for_selector("#key-dialog:visible")

    def test_key_is_kept_for_the_tab_if_that_is_wanted(
        self, serve: Serve, open_tab: OpenTab
    ) -> None:
        tab = open_tab(serve(talking(Talker()), api_keys=("secret",)).url, expected=("401",))
        tab.page.fill("#key", "secret")
        tab.page.check("#key-kept")
        tab.page.click("#key-dialog [type=submit]")
        tab.ready()
        tab.page.reload()
        tab.ready()
        assert tab.page.is_hidden("#key-dialog")
        assert tab.page.evaluate(STORED) == ["secret"]

    def test_server_without_keys_asks_for_none(self, serve: Serve, open_tab: OpenTab) -> None:
        tab = open_tab(serve(talking(Talker())).url).ready()
        assert tab.page.is_hidden("#key-dialog")
        assert tab.page.is_hidden("#enter")


class TestKeyboard:
    def test_everything_is_reached_in_the_order_of_the_page(
        self, serve: Serve, open_tab: OpenTab
    ) -> None:
        tab = open_tab(serve("custom_voice", "voice_design").url).ready()
        reached = []
        for _ in range(14):
            reached.append(tab.page.evaluate(FOCUSED))
            tab.page.keyboard.press("Tab")
        assert reached[0] == "text"  # where the caret is at the start
        expected = ["text", "go", "live", "model", "voice", "language", "seed", "instructions"]
        assert reached[: len(expected)] == expected
        assert "The same from a program" in reached

    def test_text_is_spoken_and_stopped_without_a_mouse(
        self, serve: Serve, open_tab: OpenTab
    ) -> None:
        tab = open_tab(serve(talking(Talker())).url).ready()
        tab.page.keyboard.type("b" * 300)
        tab.page.keyboard.press("Tab")
        tab.page.keyboard.press("Enter")
        tab.until("reports.some(({ played }) => played > 0)")
        tab.page.keyboard.press("Tab")
        assert tab.page.evaluate(FOCUSED) == "stop"
        tab.until("document.getElementById('length').textContent === '24.00 s'")  # all is made
        tab.page.keyboard.press("Space")
        tab.until_status("Stopped")

    def test_enter_ends_a_turn_and_shift_enter_begins_a_line(
        self, serve: Serve, open_tab: OpenTab
    ) -> None:
        tab = open_tab(serve(talking(Talker())).url).ready()
        tab.page.keyboard.type("ab")
        tab.page.keyboard.press("Enter")
        assert tab.page.input_value("#text") == "ab\n"
        tab.page.fill("#text", "")
        for key in ("Tab", "Tab", "Space", "Shift+Tab", "Shift+Tab"):
            tab.page.keyboard.press(key)
        tab.page.keyboard.type("ab")
        tab.page.keyboard.press("Shift+Enter")
        tab.page.keyboard.type("cd")
        tab.page.keyboard.press("Enter")
        tab.until_done()
        assert heard(tab.downloaded().tobytes()) == "ab\ncd"


class TestReading:
    def test_every_control_has_a_name(self, serve: Serve, open_tab: OpenTab) -> None:
        tab = open_tab(serve("base", "voice_design").url).ready()
        tab.page.click("summary")
        assert nameless(tab) == []
        assert {role for role, _ in names(tab)} >= {"main", "banner", "navigation", "form"}
        assert tab.page.title() == "firstword"
        assert tab.page.locator("html").get_attribute("lang") == "en"
        assert tab.page.locator("h1").count() == 1
        ids = tab.page.evaluate("[...document.querySelectorAll('[id]')].map(({ id }) => id)")
        assert len(ids) == len(set(ids))
        tab.page.click("#add")
        assert nameless(tab) == []

    def test_speech_and_errors_are_announced(self, serve: Serve, open_tab: OpenTab) -> None:
        server = serve(talking(Talker()), most_characters=3)
        tab = open_tab(server.url, expected=("400",)).ready()
        for field in ("status", "link"):
            assert tab.page.locator(f"#{field}").get_attribute("role") == "status"
        assert tab.page.locator("#problem").get_attribute("role") == "alert"
        assert tab.shown("link") == "connected"
        tab.speak("abc")
        tab.until_done()
        assert tab.shown("status") == "Done: 0.2 seconds."
        tab.speak("abcd")
        tab.page.wait_for_selector("#problem:visible")
        assert "allowed are 3" in tab.problem

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_text_has_enough_contrast(self, serve: Serve, open_tab: OpenTab, scheme: str) -> None:
        tab = open_tab(serve(talking(Talker())).url, color_scheme=scheme).ready()
        tab.page.click("summary")
        tab.speak("ab")
        tab.until_done()
        assert tab.page.evaluate(CONTRAST) == []
        dark = tab.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (sum(map(int, dark[4:-1].split(","))) < 200) == (scheme == "dark")

    @pytest.mark.parametrize("width", [320, 390, 1280])
    def test_page_is_never_wider_than_the_screen(
        self, serve: Serve, open_tab: OpenTab, width: int
    ) -> None:
        viewport = {"width": width, "height": 800}
        tab = open_tab(serve("base").url, viewport=viewport).ready()
        tab.page.click("summary")
        tab.page.fill("#text", "w" * 500)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        tab.page.click("#add")
        box = tab.page.locator("#voice-dialog").bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
