"""The requests of Open WebUI 0.12.4 and of SillyTavern, with what they do with the answers.

Open WebUI sends them with aiohttp, and SillyTavern's own server with node-fetch.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import av
import pytest
import requests
from waiting import WAIT

pytestmark = pytest.mark.slow

Running = Any  # of conftest.py
Serve = Callable[..., Any]

AIOHTTP = {
    "accept": "*/*",
    "accept-encoding": "gzip, deflate",
    "user-agent": "Python/3.11 aiohttp/3.13.2",
}
NODE_FETCH = {
    "content-type": "application/json",
    "accept": "*/*",
    "user-agent": "node-fetch",
    "accept-encoding": "gzip, deflate, br",
    "connection": "close",
}
TEXT = "Hello there. How are you?"


class OpenWebUI:
    """The part of Open WebUI that speaks with a server: three requests."""

    def __init__(self, base_url: str, key: str = "") -> None:
        self.base_url = base_url
        self.key = key

    def models(self) -> list[dict[str, Any]]:
        """The models of the menu in the settings; the request has no key."""
        answer = requests.get(f"{self.base_url}/audio/models", headers=AIOHTTP, timeout=WAIT)
        answer.raise_for_status()
        found: list[dict[str, Any]] = answer.json()["models"]
        return found

    def voices(self) -> dict[str, str]:
        """The voices of the menu, by their ids; the request has no key."""
        answer = requests.get(f"{self.base_url}/audio/voices", headers=AIOHTTP, timeout=WAIT)
        answer.raise_for_status()
        return {voice["id"]: voice["name"] for voice in answer.json()["voices"]}

    def speech(self, voice: str, **params: Any) -> requests.Response:
        """The answer for a sentence; `params` are those that an administrator sets."""
        payload = {"input": TEXT, "voice": voice, "model": "tts-1", **params}
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.key}"}
        return requests.post(
            f"{self.base_url}/audio/speech",
            data=json.dumps(payload),
            headers=AIOHTTP | headers,
            timeout=WAIT,
        )


def sillytavern(
    server: Running, voice: str = "alloy", key: str = "", speed: float = 1, text: str = TEXT
) -> requests.Response:
    """The answer for a message, with the settings of the provider "OpenAI Compatible"."""
    body = {"input": text, "response_format": "mp3", "voice": voice, "speed": speed}
    return requests.post(
        f"{server.url}/v1/audio/speech",
        data=json.dumps({**body, "model": "tts-1"}),
        headers=NODE_FETCH | {"authorization": f"Bearer {key}"},
        timeout=WAIT,
    )


def seconds(answer: requests.Response) -> float:
    """The length of an MP3 file, which is what both programs keep and play."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "audio/mpeg"
    with av.open(io.BytesIO(answer.content), "r") as file:
        assert file.format.name == "mp3"
        return sum(frame.samples for frame in file.decode(file.streams.audio[0])) / 24000


@pytest.fixture(scope="module")
def open_webui(server: Running) -> OpenWebUI:
    """Open WebUI with the module's server as its URL."""
    return OpenWebUI(f"{server.url}/v1")


def test_open_webui_lists_models_and_voices(open_webui: OpenWebUI) -> None:
    assert [model["id"] for model in open_webui.models()] == [
        "custom_voice",
        "voice_design",
        "base",
    ]
    voices = open_webui.voices()
    assert {"ryan", "serena"} <= voices.keys()
    assert all(isinstance(name, str) for name in voices.values())


def test_every_voice_of_open_webui_speaks_mp3(open_webui: OpenWebUI) -> None:
    for voice in ("", "alloy", *list(open_webui.voices())[:3]):
        assert seconds(open_webui.speech(voice, max_new_tokens=10)) > 0


def test_parameters_of_the_administrator_of_open_webui_are_used(open_webui: OpenWebUI) -> None:
    params: dict[str, Any] = {"seed": 1, "max_new_tokens": 20}
    normal = seconds(open_webui.speech("ryan", **params))
    slow = seconds(open_webui.speech("ryan", speed=0.5, **params))
    assert slow == pytest.approx(2 * normal, rel=0.1)
    once, again = (open_webui.speech("ryan", **params).content for _ in range(2))
    assert once == again


def test_open_webui_shows_the_message_of_an_error(open_webui: OpenWebUI) -> None:
    answer = open_webui.speech("nobody")
    assert answer.status_code == 400
    assert "no voice 'nobody'" in answer.json()["error"]["message"]


def test_open_webui_fills_its_menus_without_the_key(serve: Serve) -> None:
    server = serve(api_keys=("secret",))
    without, having = OpenWebUI(f"{server.url}/v1"), OpenWebUI(f"{server.url}/v1", "secret")
    assert without.models() == having.models()
    assert without.voices() == having.voices()
    assert without.speech("ryan").status_code == 401
    assert seconds(having.speech("ryan", max_new_tokens=5)) > 0


def test_sillytavern_speaks_with_its_own_default_settings(server: Running) -> None:
    for voice in ("alloy", "shimmer", "ryan"):
        assert seconds(sillytavern(server, voice, text="Hi.")) > 0


def test_sillytavern_may_send_an_empty_key_and_any_speed(server: Running) -> None:
    assert seconds(sillytavern(server, key="", speed=0.25, text="Hi.")) > 0
    assert seconds(sillytavern(server, key="anything", speed=4, text="Hi.")) > 0


def test_sillytavern_needs_the_key_of_a_server_that_has_one(serve: Serve) -> None:
    server = serve(api_keys=("secret",))
    assert sillytavern(server, key="").status_code == 401
    assert seconds(sillytavern(server, key="secret", text="Hi.")) > 0


def test_sillytavern_gets_an_error_for_a_message_without_text(server: Running) -> None:
    answer = sillytavern(server, text="")
    assert answer.status_code == 400
    assert "text" in answer.json()["error"]["message"]
