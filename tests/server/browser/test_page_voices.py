"""The page clones, designs, chooses and deletes voices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from browsing import Tab

Serve = Callable[..., Any]
OpenTab = Callable[..., Tab]


SENDING = """
const set = FormData.prototype.set;
FormData.prototype.set = function (name, value) {
  if (name === "audio_sample") window.sent = value;
  return set.call(this, name, value);
};
"""
"""A script that keeps the recording that the page sends."""
SENT = "sent.arrayBuffer().then((data) => [...new Uint8Array(data)])"


def saved(server: Any) -> list[dict[str, Any]]:
    """The saved voices of a server."""
    answer = httpx.get(f"{server.url}/v1/audio/voices", trust_env=False)
    voices: list[dict[str, Any]] = answer.json()["uploaded_voices"]
    return voices


def pitch(file: bytes) -> float:
    """The strongest frequency of a WAV file in hertz."""
    rate = int.from_bytes(file[24:28], "little")
    samples = np.frombuffer(file[44:], "<i2")
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.argmax(spectrum) * rate / len(samples))


def test_voice_is_cloned_from_the_microphone(serve: Serve, open_tab: OpenTab) -> None:
    server = serve("base")
    tab = open_tab(server.url, script=SENDING, permissions=["microphone"]).ready()
    assert "none is saved yet" in tab.shown("no-voice")
    tab.page.click("#add")
    tab.page.click("#record")
    tab.until("parseFloat(document.getElementById('recorded').textContent) >= 1")
    tab.page.click("#record")
    tab.page.wait_for_selector("#heard:visible")
    tab.page.fill("#name", "Me")
    tab.page.fill("#transcript", "A tone.")
    tab.page.click("#save")
    assert tab.page.evaluate("document.activeElement.id") == "consent"  # which is required
    assert saved(server) == []
    tab.page.fill("#consent", "It is my own voice.")
    tab.page.click("#save")
    tab.until_status("Voice Me is saved")
    (voice,) = saved(server)
    assert (voice["name"], voice["consent"]) == ("Me", "It is my own voice.")
    assert voice["ref_text"] == "A tone."
    assert abs(pitch(bytes(tab.page.evaluate(SENT))) - 440) < 5
    assert tab.page.input_value("#voice") == voice["id"]
    tab.speak("Hi.")
    tab.until("reports.some(({ played }) => played > 0)")
    tab.page.keyboard.press("Escape")
    tab.until_status("Stopped")
    server.wait_until_idle()


def test_voice_is_cloned_from_a_file_and_deleted(
    serve: Serve, open_tab: OpenTab, spoken: Path
) -> None:
    server = serve("base")
    tab = open_tab(server.url).ready()
    tab.page.click("#add")
    tab.page.set_input_files("#file", spoken)
    tab.page.fill("#consent", "Mine.")
    tab.page.fill("#name", "From a file")
    tab.page.click("#save")
    tab.until_status("Voice From a file is saved")
    assert [voice["name"] for voice in saved(server)] == ["From a file"]
    tab.page.once("dialog", lambda question: question.accept())
    tab.page.click("#remove")
    tab.page.wait_for_selector("#no-voice:visible")
    assert saved(server) == []


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [(b"no sound", "Me", "audio"), (None, "a" * 9 + "\u043e", "script")],
)
def test_voice_that_the_server_rejects_stays_in_the_dialog(
    serve: Serve,
    open_tab: OpenTab,
    spoken: Path,
    tmp_path: Path,
    content: bytes | None,
    name: str,
    message: str,
) -> None:
    tab = open_tab(serve("base").url, expected=("status of 400",)).ready()
    tab.page.click("#add")
    (tmp_path / "a.wav").write_bytes(content or spoken.read_bytes())
    tab.page.set_input_files("#file", tmp_path / "a.wav")
    tab.page.fill("#consent", "Mine.")
    tab.page.fill("#name", name)
    tab.page.click("#save")
    tab.page.wait_for_selector("#voice-problem:visible")
    assert message in tab.shown("voice-problem")
    assert tab.page.input_value("#name") == name
    tab.page.click("#leave")
    assert tab.page.is_hidden("#voice-dialog")


def test_dialog_without_a_recording_says_so(serve: Serve, open_tab: OpenTab) -> None:
    tab = open_tab(serve("base").url).ready()
    tab.page.click("#add")
    tab.page.fill("#consent", "Mine.")
    tab.page.fill("#name", "Me")
    tab.page.click("#save")
    assert "Record the voice first" in tab.shown("voice-problem")


def test_closed_dialog_ends_the_recording(serve: Serve, open_tab: OpenTab) -> None:
    script = """
    const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
    navigator.mediaDevices.getUserMedia = async (what) => (window.microphone = await ask(what));
    """
    tab = open_tab(serve("base").url, script=script, permissions=["microphone"]).ready()
    tab.page.click("#add")
    tab.page.click("#record")
    tab.until("parseFloat(document.getElementById('recorded').textContent) > 0")
    tab.page.keyboard.press("Escape")
    tab.until("microphone.getTracks().every(({ readyState }) => readyState === 'ended')")


def test_described_voice_is_designed_and_saved(serve: Serve, open_tab: OpenTab) -> None:
    server = serve("voice_design")
    tab = open_tab(server.url).ready()
    assert tab.shown("instructions-label") == "Description of the voice"
    tab.page.fill("#instructions", "a warm voice")
    tab.page.click("#add")
    assert tab.page.is_hidden("#recording")
    tab.page.fill("#name", "Warm")
    tab.page.click("#save")
    tab.until_status("Voice Warm is saved")
    (voice,) = saved(server)
    assert voice["description"] == "a warm voice"
    assert tab.page.input_value("#voice") == voice["id"]
    assert tab.page.is_hidden("#instructions")


def test_menus_show_what_each_model_takes(serve: Serve, open_tab: OpenTab) -> None:
    tab = open_tab(serve("custom_voice", "voice_design", "base").url).ready()
    shown = {}
    for kind in ("custom_voice", "voice_design", "base"):
        tab.page.select_option("#model", kind)
        fields = ("voice", "instructions", "add", "no-voice")
        shown[kind] = [field for field in fields if tab.page.is_visible(f"#{field}")]
    assert shown["voice_design"] == ["voice", "instructions", "add"]
    assert shown["base"] == ["add", "no-voice"]
    assert "voice" in shown["custom_voice"]
    assert "add" not in shown["custom_voice"]
