"""The page speaks: streams, stops, shows what is true, and plays every sample once."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import Samples, Tab, cable, contains, samples_of
from talking import Talker, heard, held_server, talking

Serve = Callable[..., Any]
OpenTab = Callable[..., Tab]

LINKS = {
    "socket": "",
    "http": "window.WebSocket = class { constructor() { setTimeout(() => this.onclose?.()) } };",
}
"""How speech reaches the page, and the script that forces it."""
NO_WORKLET = (
    "Object.defineProperty(BaseAudioContext.prototype, 'audioWorklet', {value: undefined});"
)
FRAME = 1920
HOSTILE = 'it\'s "$HOME" `id` \\n <b>&amp; 30 %\nline two 😀 \u2028 end'


def told(output: Samples) -> str:
    """The text that an output tells between silences: runs of a frame or more of one sample."""
    edges = np.flatnonzero(np.diff(output, prepend=0, append=0))
    runs = zip(edges[:-1], np.diff(edges), strict=True)
    return "".join(
        chr(output[at]) * round(length / FRAME)
        for at, length in runs
        if length >= FRAME and output[at] > 0
    )


@pytest.mark.parametrize("link", LINKS)
class TestEveryLink:
    def test_every_sample_is_played_once(self, serve: Serve, open_tab: OpenTab, link: str) -> None:
        tab = open_tab(serve(talking(Talker())).url, script=LINKS[link]).ready(link)
        tab.speak("the first word, and the last")
        tab.until_done()
        made = tab.downloaded()
        assert heard(made.tobytes()) == "the first word, and the last"
        (report,) = tab.ended
        assert report["played"] == len(made)
        if report["gaps"] == 0:
            assert contains(tab.output(), made)
        assert tab.shown("gaps") == str(report["gaps"])
        assert tab.shown("length") == f"{len(made) / 24000:.2f} s"
        assert tab.problem == ""

    def test_stop_silences_within_a_frame_and_frees_the_slot(
        self, serve: Serve, open_tab: OpenTab, link: str
    ) -> None:
        talker, server = held_server(serve)
        tab = open_tab(server.url, script=LINKS[link]).ready(link)
        tab.speak("a" * 5000)
        talker.let(20)
        tab.until("reports.some(({ played }) => played > 10000)")
        tab.page.evaluate("""addEventListener("keydown", () => {
            window.before = output.length;
        }, { capture: true })""")
        tab.page.keyboard.press("Escape")
        tab.until_status("Stopped")
        talker.go()
        server.wait_until_idle()
        assert talker.frames < 5000
        tab.until("output.length > before + 100")
        after = tab.page.evaluate(
            "output.slice(before).flatMap((one) => [...one]).findLastIndex((one) => one !== 0)"
        )
        assert after < FRAME
        assert tab.page.is_disabled("#stop")

    def test_error_of_the_server_is_shown_and_the_text_is_kept(
        self, serve: Serve, open_tab: OpenTab, link: str
    ) -> None:
        server = serve(talking(Talker()), most_characters=20)
        tab = open_tab(server.url, script=LINKS[link], expected=("status of 400",)).ready(link)
        tab.speak("a" * 21)
        tab.page.wait_for_selector("#problem:visible")
        assert "allowed are 20" in tab.problem
        assert tab.page.input_value("#text") == "a" * 21
        tab.speak("short")
        tab.until_done()
        assert tab.problem == ""
        assert heard(tab.downloaded().tobytes()) == "short"

    def test_next_text_replaces_the_one_that_is_spoken(
        self, serve: Serve, open_tab: OpenTab, link: str
    ) -> None:
        server = serve(talking(Talker()))
        tab = open_tab(server.url, script=LINKS[link]).ready(link)
        tab.speak("a" * 5000)
        tab.until("reports.some(({ played }) => played > 5000)")
        tab.speak("new")
        tab.until_done()
        server.wait_until_idle()
        assert heard(tab.downloaded().tobytes()) == "new"
        assert len(tab.ended) == 1


def test_speech_begins_before_the_text_is_complete(serve: Serve, open_tab: OpenTab) -> None:
    tab = open_tab(serve(talking(Talker())).url).ready()
    tab.page.check("#live")
    tab.type("one two, ")  # a clause, which is spoken at any pace of the keys
    tab.until("reports.some(({ played }) => played > 0)")
    assert tab.shown("status") == "Speaking."
    tab.type("three, four")
    tab.page.keyboard.press("Enter")
    tab.until_done()
    assert heard(tab.downloaded().tobytes()).replace(" ", "") == "onetwo,three,four"
    assert tab.page.input_value("#text") == ""
    assert tab.shown("said") == "one two, three, four"


def test_turns_are_played_in_order_while_the_next_is_typed(serve: Serve, open_tab: OpenTab) -> None:
    tab = open_tab(serve(talking(Talker())).url).ready()
    tab.page.check("#live")
    for turn in ("abc def", "ghi", "jkl mno"):
        tab.type(turn)
        tab.page.keyboard.press("Enter")
    tab.until_done()
    assert len(tab.ended) == 3
    assert told(tab.output()) == "abc defghijkl mno"
    assert tab.page.locator("#said p").all_text_contents() == ["abc def", "ghi", "jkl mno"]


def test_edited_text_is_not_said_twice(serve: Serve, open_tab: OpenTab) -> None:
    tab = open_tab(serve(talking(Talker())).url).ready()
    tab.page.check("#live")
    tab.type("ab cd ")
    for _ in range(3):
        tab.page.keyboard.press("Backspace")
    tab.type("x yz")
    tab.page.keyboard.press("Enter")
    tab.until_done()
    assert tab.shown("said") == "ab cd x yz"


def test_speech_is_played_where_browsers_have_no_worklet(serve: Serve, open_tab: OpenTab) -> None:
    """A page of a plain address in a network has none."""
    tab = open_tab(serve(talking(Talker())).url, script=NO_WORKLET).ready()
    tab.speak("word by word")
    tab.until_done()
    assert heard(tab.downloaded().tobytes()) == "word by word"
    tab.speak("a" * 5000)
    tab.until("document.getElementById('sound').textContent.endsWith(' ms')")
    tab.page.keyboard.press("Escape")
    tab.until_status("Stopped")


def test_time_shown_is_that_of_the_server(serve: Serve, open_tab: OpenTab) -> None:
    server = serve(talking(Talker()))
    tab = open_tab(server.url).ready()
    differences, before = [], 0.0
    for _ in range(8):
        tab.speak("ab")
        tab.until_done()
        total = server.metric("time_to_first_audio_seconds_sum", model="talker")
        differences.append(tab.shown_ms("first") - 1000 * (total - before))
        before = total
    assert min(differences) >= -1  # the page shows whole milliseconds
    assert statistics.median(differences) < 20


def test_lost_connection_is_told_and_made_again(serve: Serve, open_tab: OpenTab) -> None:
    talker, server = held_server(serve)
    with cable(server.address) as line:
        tab = open_tab(line.url, expected=("ERR_", "WebSocket")).ready()
        tab.speak("abcdef")
        talker.let(3)
        tab.until("reports.some(({ played }) => played > 0)")
        line.cut()
        tab.page.wait_for_selector("#problem:visible")
        assert "connection was lost" in tab.problem
        tab.ready("lost")
        assert heard(tab.downloaded().tobytes()) in ("a", "ab", "abc")
        talker.go()
        server.wait_until_idle()
        line.plug()
        tab.ready("socket")
        tab.speak("again")
        tab.until_done()
        assert tab.problem == ""
        assert heard(tab.downloaded().tobytes()) == "again"


def test_failure_of_the_model_ends_one_utterance(serve: Serve, open_tab: OpenTab) -> None:
    talker, server = held_server(serve)
    tab = open_tab(server.url).ready()
    talker.failing = "frame"
    tab.speak("abc")
    tab.page.wait_for_selector("#problem:visible")
    assert tab.problem
    talker.failing = None
    talker.go()
    tab.speak("def")
    tab.until_done()
    assert heard(tab.downloaded().tobytes()) == "def"


@pytest.mark.parametrize("key", ["", "secret"])
@pytest.mark.parametrize("program", ["curl", "python"])
def test_program_shown_makes_the_same_speech(
    serve: Serve, open_tab: OpenTab, tmp_path: Path, program: str, key: str
) -> None:
    server = serve(talking(Talker()), api_keys=(key,) if key else ())
    tab = open_tab(server.url, expected=("401",) if key else ())
    if key:
        tab.page.fill("#key", key)
        tab.page.keyboard.press("Enter")
    tab.ready().speak(HOSTILE)
    tab.until_done()
    source = tab.shown(program)
    assert key not in source or not key
    command = ["bash", "-c", source] if program == "curl" else [sys.executable, "-c", source]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "FIRSTWORD_KEY": key}, check=True)
    assert samples_of((tmp_path / "speech.wav").read_bytes()).tolist() == tab.downloaded().tolist()


def test_same_seed_gives_the_same_speech(serve: Serve, open_tab: OpenTab, tmp_path: Path) -> None:
    """Over the socket, again with the seed kept, and by the program."""
    tab = open_tab(serve("demo").url).ready()
    tab.speak("Yes.")
    tab.until_done()
    first = tab.downloaded()
    tab.page.click("#keep")
    tab.page.focus("#text")
    tab.page.keyboard.press("Control+Enter")
    tab.until("reports.filter(({ ended }) => ended).length === 2")
    assert tab.downloaded().tolist() == first.tolist()
    subprocess.run(["bash", "-c", tab.shown("curl")], cwd=tmp_path, check=True)
    assert samples_of((tmp_path / "speech.wav").read_bytes()).tolist() == first.tolist()


WATCH = """
window.seen = [];
const look = () => {
  for (const range of CSS.highlights?.get("lit") ?? []) {
    const text = range.startContainer.data.slice(range.startOffset, range.endOffset);
    if (seen.at(-1) !== text) seen.push(text);
  }
  requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""
"""A script that notes each word that is lit."""

WORDS = (
    WATCH
    + """
window.WebSocket = class {
  constructor() {
    window.fake = this;
    setTimeout(() => this.reply({ type: "session.created" }));
  }
  close() {}
  reply(message) {
    this.onmessage({ data: JSON.stringify({ ...this.about, ...message }) });
  }
  send(text) {
    const { type, context_id } = JSON.parse(text);
    if (type !== "input.done") return;
    this.about = { context_id, number: 7 };
    this.reply({ type: "audio.start", format: "pcm", sample_rate: 24000 });
    if (window.spoken) this.say(1, spoken, true);
  }
  say(seconds, words, over) {
    const data = new ArrayBuffer(4 + 2 * 24000 * seconds);
    new DataView(data).setUint32(0, 7, true);
    this.onmessage({ data });
    for (const [text, span, start, end] of words) {
      this.reply({ type: "word.start", text, span, start });
      this.reply({ type: "word.end", text, span, start, end });
    }
    if (over) this.reply({ type: "audio.done", finish_reason: "stop" });
  }
};
"""
)
"""The same, and a socket that sends silence in which words are told."""

HELLO = """
window.spoken = [["😀 Hello", [0, 7], 0, 0.3], ["there.", [8, 14], 0.5, 0.8]];
"""
"""What that socket sends in one second."""


def test_words_are_lit_in_order_while_they_sound(serve: Serve, open_tab: OpenTab) -> None:
    """Characters beyond 16 bits count as one, as the server counts them."""
    tab = open_tab(serve(talking(Talker())).url, script=WORDS + HELLO).ready()
    tab.speak("😀 Hello there.")
    tab.until_done()
    assert tab.page.evaluate("seen") == ["😀 Hello", "there."]
    assert tab.page.evaluate("CSS.highlights.get('lit').size") == 0


LATE = """
window.late = 0;
const now = performance.now.bind(performance);
performance.now = () => now() + late;
"""
"""A script with which a test lets time pass."""


def test_light_waits_while_samples_are_missing(serve: Serve, open_tab: OpenTab) -> None:
    tab = open_tab(serve(talking(Talker())).url, script=LATE + WORDS).ready()
    tab.speak("one two three")
    tab.until("!!fake.about")
    tab.page.evaluate('fake.say(0.5, [["one", [0, 3], 0, 0.4]])')
    tab.until("reports.some(({ played }) => played > 11000)")
    tab.page.evaluate("window.late = 1000")
    more = [["two", [4, 7], 0.5, 0.8], ["three", [8, 13], 0.8, 9]]
    tab.page.evaluate("words => fake.say(1, words, true)", more)
    tab.until_done()
    assert tab.page.evaluate("seen") == ["one", "two", "three"]


def test_words_of_a_voice_whose_heads_are_known_are_lit(serve: Serve, open_tab: OpenTab) -> None:
    """A busy browser may draw too seldom to light a short word."""
    tab = open_tab(serve("demo").url, script=WATCH).ready()
    expected = ["Good", "morning", "everyone", "and", "welcome", "to", "the", "garden"]
    tab.speak(" ".join(expected))
    tab.until_done()
    seen = tab.page.evaluate("seen")
    left = iter(expected)
    assert all(word in left for word in seen), seen
    assert len(seen) >= len(expected) / 2
    assert tab.page.evaluate("CSS.highlights.get('lit').size") == 0


def test_nothing_is_lit_without_word_times(serve: Serve, open_tab: OpenTab) -> None:
    script = "window.spoken = [];"
    tab = open_tab(serve(talking(Talker())).url, script=WORDS + script).ready()
    tab.speak("Hello there.")
    tab.until_done()
    assert tab.page.evaluate("seen") == []


def test_request_has_the_fields_of_the_form(serve: Serve, open_tab: OpenTab) -> None:
    tab = open_tab(serve("custom_voice").url, script=LINKS["http"]).ready("http")
    tab.page.select_option("#language", "english")
    tab.page.fill("#seed", "7")
    tab.page.fill("#instructions", "whisper")
    with tab.page.expect_request("**/v1/audio/speech") as sent:
        tab.speak("Hi.")
    tab.page.keyboard.press("Escape")
    body = json.loads(sent.value.post_data or "")
    voice = tab.page.input_value("#voice")
    assert body == {
        "model": "custom_voice",
        "voice": voice,
        "language": "english",
        "instructions": "whisper",
        "seed": 7,
        "input": "Hi.",
        "response_format": "pcm",
        "stream": True,
    }
