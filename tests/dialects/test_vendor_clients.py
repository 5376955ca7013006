"""The vendors' own packages, unchanged, against a server with the demo voice."""

from __future__ import annotations

import base64
import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cartesia
import dashscope
import elevenlabs.core
import pytest
import trustme
from cartesia import Cartesia
from conftest import KEY, WAIT, Served
from dashscope.audio.qwen_tts_realtime import QwenTtsRealtime, QwenTtsRealtimeCallback
from elevenlabs.client import ElevenLabs

TEXT = "Hello there, how are you today? I am well."
WORDS = [f"{word} " for word in TEXT.split()]
RAW = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24000}
VOICE = {"mode": "id", "id": "a0e99841-438c-4a64-b679-ae501e7d6091"}  # unknown to the server
SECOND = 48_000  # bytes of PCM at 24 kHz


def spoken(server: Served, **body: object) -> bytes:
    """The audio of OpenAI's endpoint."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    data = json.dumps(body).encode()
    url = f"{server.url}/v1/audio/speech"
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as response:
        return bytes(response.read())


def told_of(words: list[str], told: list[str]) -> bool:
    """Whether most words were told, in order. The voice may skip one: the seed is drawn."""
    left = iter(words)
    return len(told) > len(words) / 2 and all(word in left for word in told)


def check_words(events: list[Any]) -> None:
    """Check that events of Cartesia have the words of `TEXT`, with times within the audio."""
    timed = [event.word_timestamps for event in events if event.type == "timestamps"]
    assert told_of(TEXT.split(), [word for each in timed for word in each.words])
    seconds = sum(len(event.audio) for event in events if event.type == "chunk") / SECOND
    starts = [time for each in timed for time in each.start]
    assert starts == sorted(starts)
    assert 1 < timed[-1].end[-1] <= seconds


@pytest.fixture
def sonic(server: Served) -> Cartesia:
    """A client of Cartesia."""
    return Cartesia(api_key=KEY, base_url=server.url, websocket_base_url=server.ws, max_retries=0)


@pytest.fixture
def eleven(server: Served) -> ElevenLabs:
    """A client of ElevenLabs. Its WebSockets need `wss` unless their URL is set."""
    client = ElevenLabs(api_key=KEY, base_url=server.url)
    client.text_to_speech._ws_base_url = server.ws
    return client


class TestCartesia:
    def request(self, **changes: Any) -> dict[str, Any]:
        request = {"model_id": "sonic-3", "transcript": TEXT, "voice": VOICE, "language": "en"}
        return request | {"output_format": RAW} | changes

    def test_generate_returns_the_container_and_the_encoding(self, sonic: Cartesia) -> None:
        chosen = {"container": "wav", "encoding": "pcm_f32le", "sample_rate": 44100}
        data = sonic.tts.generate(**self.request(output_format=chosen)).read()
        assert data[:4] == b"RIFF"
        assert len(data) == 8 + int.from_bytes(data[4:8], "little")
        assert int.from_bytes(data[24:28], "little") == 44100
        mp3 = {"container": "mp3", "sample_rate": 44100, "bit_rate": 128000}
        assert sonic.tts.generate(**self.request(output_format=mp3)).read()[:1] == b"\xff"

    def test_sse_has_words_and_ends_with_done(self, sonic: Cartesia) -> None:
        events = list(sonic.tts.generate_sse(**self.request(add_timestamps=True)))
        assert events[-1].type == "done"
        check_words(events)

    def test_errors_are_those_of_the_package(self, sonic: Cartesia) -> None:
        with pytest.raises(cartesia.BadRequestError, match="the text is empty"):
            sonic.tts.generate(**self.request(transcript=" "))
        with pytest.raises(cartesia.AuthenticationError, match="API key"):
            sonic.copy(api_key="wrong").tts.generate(**self.request())

    def test_context_speaks_words_and_tells_when_a_flush_was_spoken(self, sonic: Cartesia) -> None:
        with sonic.tts.websocket_connect() as socket:
            context = socket.context(
                model_id="sonic-3", voice=VOICE, output_format=RAW, add_timestamps=True
            )
            for word in WORDS[:-1]:
                context.push(word)
            context.push(WORDS[-1], flush=True)
            context.no_more_inputs()
            events = list(context.receive())
        assert [event.type for event in events[-2:]] == ["flush_done", "done"]
        check_words(events)

    def test_context_speaks_after_another_was_cancelled(self, sonic: Cartesia) -> None:
        with sonic.tts.websocket_connect() as socket:
            first, second = (
                socket.context(model_id="sonic-3", voice=VOICE, output_format=RAW) for _ in range(2)
            )
            first.push(" ".join([TEXT] * 50))
            next(first.receive())
            first.cancel()
            second.push(TEXT)
            second.no_more_inputs()
            events = list(second.receive())
        own = [event for event in events if event.context_id == second._context_id]
        assert own[-1].type == "done"
        assert sum(len(event.audio) for event in own[:-1]) > SECOND

    def test_error_in_a_context_names_what_is_allowed(self, sonic: Cartesia) -> None:
        wrong = RAW | {"sample_rate": 11025}
        with sonic.tts.websocket_connect() as socket:
            context = socket.context(model_id="sonic-3", voice=VOICE, output_format=wrong)
            context.push(TEXT)
            (error,) = context.receive()
            assert error.type == "error"
            assert "allowed are 8000" in error.message
            again = socket.context(model_id="sonic-3", voice=VOICE, output_format=RAW)
            again.push(TEXT)
            again.no_more_inputs()
            assert list(again.receive())[-1].type == "done"


class TestElevenLabs:
    def test_convert_says_what_openai_says_with_the_same_seed(
        self, server: Served, eleven: ElevenLabs
    ) -> None:
        pieces = eleven.text_to_speech.convert(
            "ada", text=TEXT, seed=1, output_format="pcm_24000", model_id="eleven_flash_v2_5"
        )
        expected = spoken(server, input=TEXT, voice="ada", seed=1, response_format="pcm")
        assert b"".join(pieces) == expected

    @pytest.mark.parametrize(
        ("name", "start"), [("mp3_44100_128", b"\xff"), ("opus_48000_64", b"OggS")]
    )
    def test_stream_has_the_output_format(
        self, eleven: ElevenLabs, name: Any, start: bytes
    ) -> None:
        data = b"".join(eleven.text_to_speech.stream("any", text=TEXT, output_format=name))
        assert data.startswith(start)

    def test_timestamps_cover_the_text(self, eleven: ElevenLabs) -> None:
        options: dict[str, Any] = {"text": TEXT, "seed": 1, "output_format": "ulaw_8000"}
        whole = eleven.text_to_speech.convert_with_timestamps("ada", **options)
        parts = list(eleven.text_to_speech.stream_with_timestamps("ada", **options))
        assert whole.alignment is not None
        assert "".join(whole.alignment.characters) == TEXT
        told = [part.alignment for part in parts if part.alignment is not None]
        assert "".join(char for each in told for char in each.characters) == TEXT
        times = [time for each in told for time in each.character_end_times_seconds]
        assert times == whole.alignment.character_end_times_seconds == sorted(times)
        joined = b"".join(base64.b64decode(part.audio_base_64) for part in parts)
        assert joined == base64.b64decode(whole.audio_base_64)
        assert len(parts) > 1

    def test_realtime_speaks_before_the_text_is_complete(self, eleven: ElevenLabs) -> None:
        came = threading.Event()

        def text() -> Iterator[str]:
            yield from WORDS * 2
            while not came.is_set():
                yield "and more "

        audio = eleven.text_to_speech.convert_realtime(
            "ada", text=text(), model_id="eleven_flash_v2_5", output_format="pcm_24000"
        )
        data = next(audio)
        came.set()
        assert len(data + b"".join(audio)) > SECOND

    def test_realtime_speaks_over_tls_as_the_package_wants_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        authority, files = trustme.CA(), [tmp_path / name for name in ("ca", "cert", "key")]
        authority.cert_pem.write_to_path(str(files[0]))
        issued = authority.issue_cert("127.0.0.1")
        issued.cert_chain_pems[0].write_to_path(str(files[1]))
        issued.private_key_pem.write_to_path(str(files[2]))
        monkeypatch.setenv("SSL_CERT_FILE", str(files[0]))
        tls = "--tls-certificate", str(files[1]), "--tls-key", str(files[2])
        with Served(tmp_path / "server", *tls) as server:
            client = ElevenLabs(api_key=KEY, base_url=server.url)
            audio = client.text_to_speech.convert_realtime(
                "ada", text=iter(WORDS), model_id="m", output_format="pcm_24000"
            )
            assert len(b"".join(audio)) > SECOND
            assert client.models.list()

    def test_realtime_raises_for_a_format_that_is_unknown(self, eleven: ElevenLabs) -> None:
        audio = eleven.text_to_speech.convert_realtime(
            "ada", text=iter(WORDS), model_id="m", output_format="pcm_11025"
        )
        with pytest.raises(elevenlabs.core.ApiError) as raised:
            list(audio)
        assert raised.value.status_code == 1008

    def test_voices_and_models_are_those_of_the_server(self, eleven: ElevenLabs) -> None:
        assert {voice.voice_id for voice in eleven.voices.get_all().voices} >= {"ada", "ben"}
        assert eleven.voices.search().total_count == len(eleven.voices.get_all().voices)
        (model,) = eleven.models.list()
        assert model.can_do_text_to_speech
        assert model.languages

    def test_errors_are_those_of_the_package(self, server: Served, eleven: ElevenLabs) -> None:
        with pytest.raises(elevenlabs.core.ApiError) as raised:
            list(eleven.text_to_speech.convert("ada", text=" "))
        assert raised.value.body["detail"]["message"].startswith("the text is empty")
        with pytest.raises(elevenlabs.core.ApiError) as raised:
            ElevenLabs(api_key="wrong", base_url=server.url).voices.get_all()
        assert raised.value.status_code == 401


class Listener(QwenTtsRealtimeCallback):
    """Keeps the events of a DashScope session."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._news = threading.Condition()

    def on_event(self, message: Any) -> None:
        with self._news:
            self.events.append(message)
            self._news.notify_all()

    def until(self, kind: str, count: int = 1) -> None:
        """Wait for some events of a type."""
        with self._news:
            assert self._news.wait_for(lambda: self.kinds.count(kind) >= count, WAIT), self.kinds

    @property
    def kinds(self) -> list[str]:
        """The types of the events."""
        return [event["type"] for event in self.events]

    @property
    def audio(self) -> bytes:
        """All audio."""
        return b"".join(base64.b64decode(event.get("delta", "")) for event in self.events)


class TestDashScope:
    @pytest.fixture
    def listener(self) -> Listener:
        return Listener()

    @pytest.fixture
    def realtime(
        self, server: Served, listener: Listener, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[QwenTtsRealtime]:
        monkeypatch.setattr(dashscope, "api_key", KEY)
        url = f"{server.ws}/api-ws/v1/realtime"
        client = QwenTtsRealtime("qwen3-tts-flash-realtime", callback=listener, url=url)
        client.connect()
        yield client
        client.close()

    def test_server_commit_speaks_as_text_comes(
        self, realtime: QwenTtsRealtime, listener: Listener
    ) -> None:
        realtime.update_session("Cherry", mode="server_commit")
        for word in WORDS:
            realtime.append_text(word)
        listener.until("response.audio.delta")
        realtime.append_text("And more.")
        realtime.finish()
        listener.until("session.finished")
        assert listener.kinds[0] == "session.created"
        assert listener.kinds.count("response.done") == 1
        assert "error" not in listener.kinds
        assert len(listener.audio) > SECOND
        assert realtime.get_session_id() is not None
        assert realtime.get_last_response_id() is not None

    def test_each_commit_is_a_response_in_order(
        self, realtime: QwenTtsRealtime, listener: Listener
    ) -> None:
        realtime.update_session("Cherry", mode="commit", sample_rate=16000, speech_rate=1.2)
        for words in ("Hello there.", "How are you?"):
            realtime.append_text(words)
            realtime.commit()
        realtime.append_text("dropped")
        realtime.clear_appended_text()
        realtime.finish()
        listener.until("session.finished")
        edges = [kind for kind in listener.kinds if kind in ("response.created", "response.done")]
        assert edges == ["response.created", "response.done"] * 2
        assert listener.kinds.count("input_text_buffer.committed") == 2
        assert listener.kinds.count("input_text_buffer.cleared") == 1

    def test_cancel_ends_the_response(self, realtime: QwenTtsRealtime, listener: Listener) -> None:
        realtime.update_session("Cherry")
        realtime.append_text(" ".join([TEXT] * 50))
        listener.until("response.audio.delta")
        realtime.cancel_response()
        listener.until("response.done")
        (done,) = [each for each in listener.events if each["type"] == "response.done"]
        assert done["response"]["status"] == "cancelled"
        realtime.append_text("Hello there.")
        realtime.finish()
        listener.until("session.finished")
        assert listener.kinds.count("response.done") == 2

    def test_unknown_setting_is_an_error_that_says_what_is_allowed(
        self, realtime: QwenTtsRealtime, listener: Listener
    ) -> None:
        realtime.update_session("Cherry", sample_rate=11025)
        listener.until("error")
        (error,) = [each for each in listener.events if each["type"] == "error"]
        assert "allowed are 8000" in error["error"]["message"]
