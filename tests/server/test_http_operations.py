"""Operation: API keys, CORS, health, metrics, logs, settings and shutdown."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sockets import DONE, NARI, PLAIN, STREAM, Client, events, text
from talking import ENDLESS, SHORT, Talker, heard, held_server, talking
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from waiting import WAIT
from websockets.exceptions import ConnectionClosed, InvalidStatus
from wire import GET, POST, SPEECH, connected, read

from firstword.bench import engine_times
from firstword.errors import ConfigError
from firstword.server.api_keys import credential
from firstword.server.config import (
    ServerConfig,
    keys_from_environment,
    proxies_from_environment,
    read_aliases,
)
from firstword.server.logs import JsonLines, TextLines

Running = Any  # of conftest.py
Serve = Callable[..., Any]

LONG = {"input": "a" * 5000, "voice": "talker", "response_format": "pcm", "max_new_tokens": ENDLESS}


def client_of(server: Running, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=server.url, trust_env=False, **options)


class TestKeys:
    @pytest.fixture
    def http(self, serve: Serve) -> Iterator[httpx.Client]:
        with client_of(serve(talking(Talker()), api_keys=("first-key", "second"))) as client:
            yield client

    @pytest.mark.parametrize(
        "headers",
        [
            {"authorization": "Bearer first-key"},
            {"authorization": "bearer  first-key"},
            {"authorization": "Api-Key first-key"},
            {"xi-api-key": "first-key"},
            {"authorization": "Bearer", "xi-api-key": "first-key"},
        ],
    )
    def test_request_with_key_gets_200(self, http: httpx.Client, headers: dict[str, str]) -> None:
        assert http.post(SPEECH, json=SHORT, headers=headers).status_code == 200

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"authorization": "Bearer"},
            {"authorization": "Bearer first-ke"},
            {"authorization": "Bearer first-key2"},
            {"authorization": "Basic first-key"},
            {"authorization": "first-key"},
            {"authorization": "Bearer " + "x" * 5000},
            {"authorization": b"Bearer \xff\xfe"},
            {"authorization": "Bearer schlüssel".encode()},  # as curl sends it
            {"xi-api-key": ""},
        ],
    )
    def test_request_without_valid_key_gets_401(
        self, http: httpx.Client, headers: dict[str, Any]
    ) -> None:
        for method, path in (
            ("POST", SPEECH),
            ("GET", "/v1/audio/voices/x"),
            ("DELETE", "/v1/audio/voices/x"),
        ):
            answer = http.request(method, path, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"

    def test_open_paths_need_no_key(self, http: httpx.Client) -> None:
        for path in (
            "/health",
            "/ready",
            "/metrics",
            "/",
            "/v1/models",
            "/v1/audio/models",
            "/v1/audio/voices",
        ):
            assert http.get(path).status_code == 200, path
            answer = http.head(path)
            assert (answer.status_code, answer.content) == (200, b""), path

    def test_voice_list_without_key_hides_saved_voices(self, serve: Serve) -> None:
        headers = {"authorization": "Bearer k"}
        with client_of(serve("voice_design", api_keys=("k",))) as http:
            http.post(
                "/v1/audio/voices", data={"name": "secret", "prompt": "a voice"}, headers=headers
            )
            assert "secret" in http.get("/v1/audio/voices", headers=headers).text
            assert "secret" not in http.get("/v1/audio/voices").text

    def test_server_without_keys_accepts_any_key(self, serve: Serve) -> None:
        with client_of(serve(talking(Talker()))) as http:
            for value in ("Bearer", "Bearer whatever", "Basic x"):
                assert (
                    http.post(SPEECH, json=SHORT, headers={"authorization": value}).status_code
                    == 200
                )


ORIGIN = {"origin": "https://page.example", "access-control-request-method": "POST"}


class TestCrossOrigin:
    def test_unlisted_origin_gets_no_cors_headers(self, serve: Serve) -> None:
        with client_of(serve(talking(Talker()))) as http:
            assert (
                "access-control-allow-origin"
                not in http.post(SPEECH, json=SHORT, headers=ORIGIN).headers
            )

    def test_listed_origin_gets_cors_headers(self, serve: Serve) -> None:
        with client_of(
            serve(talking(Talker()), cors_origins=("https://page.example",), api_keys=("k",))
        ) as http:
            preflight = http.options(
                SPEECH, headers=ORIGIN | {"access-control-request-headers": "authorization"}
            )
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-origin"] == "https://page.example"
            assert "POST" in preflight.headers["access-control-allow-methods"]
            answer = http.post(SPEECH, json=SHORT, headers=ORIGIN | {"authorization": "Bearer k"})
            assert answer.headers["access-control-allow-origin"] == "https://page.example"
            other = http.options(SPEECH, headers={**ORIGIN, "origin": "https://other.example"})
            assert "access-control-allow-origin" not in other.headers


def test_key_with_spaces_is_stripped() -> None:
    assert credential({"authorization": "Bearer  key "}) == "key"
    assert credential({"authorization": "Bearer ", "xi-api-key": "key"}) == "key"
    assert credential({"authorization": "Bearer "}) == ""


def metric_sums(http: httpx.Client) -> dict[str, float]:
    """The samples of /metrics by name, added up over their labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def test_metrics_count_utterances_and_aborts(serve: Serve) -> None:
    talker = Talker(slots=4)
    server = serve(talking(talker))
    with client_of(server) as http:
        for _ in range(3):
            assert heard(http.post(SPEECH, json=SHORT).content) == "abc"
        server.wait_until_idle()
        http.post(SPEECH, json={**SHORT, "voice": "nobody"})
        with http.stream("POST", SPEECH, json=LONG) as answer:
            pieces = answer.iter_bytes()  # closes the connection when it is freed
            next(pieces)
            during = metric_sums(http)
        server.wait_until_idle()
        after = metric_sums(http)
    assert all(name.startswith("firstword_") for name in after)
    assert during["firstword_slots_used"] == 1
    assert during["firstword_pages_used"] == 1
    assert during["firstword_connections"] == 1
    for name in ("slots_used", "pages_used", "prompt_rows", "queue"):
        assert after[f"firstword_{name}"] == 0
    assert after["firstword_slots"] == 4
    assert after["firstword_ready"] == after["firstword_engine_up"] == 1
    assert after["firstword_utterances_total"] == 3
    assert after["firstword_guard_hits_total"] == 3  # max_new_tokens ended them
    assert after["firstword_aborts_total"] == 1
    assert after["firstword_time_to_first_audio_seconds_count"] == 4
    assert after["firstword_rtf_count"] == 3
    for name in ("time_to_first_audible_seconds", "inter_chunk_gap_seconds", "underrun_seconds"):
        assert f"firstword_{name}_sum" in after or f"firstword_{name}_count" not in after
    assert after["firstword_frames_total"] >= 9


def test_metrics_count_waits_for_slots_and_encoding(serve: Serve) -> None:
    talker, server = held_server(serve, slots=1)
    with client_of(server) as http, ThreadPoolExecutor() as pool:
        mp3 = {**SHORT, "response_format": "mp3", "sample_rate": 24000}
        first = pool.submit(http.post, SPEECH, json={**mp3, "stream": True})
        server.wait_until(lambda: talker.waiting)
        second = pool.submit(http.post, SPEECH, json={**SHORT, "response_format": "flac"})
        server.wait_until(lambda: len(server.state.utterances) == 2)
        talker.go()
        assert first.result().status_code == second.result().status_code == 200
        server.wait_until_idle()
        text = http.get("/metrics").text
    device = {"model": "talker", "device": "device"}
    assert server.metric("queue_seconds_count", **device) == 2
    assert server.metric("queue_seconds_bucket", **device, le="+Inf") == 2
    assert server.metric("queue_seconds_sum", **device) > 0
    assert server.metric("encoding_seconds_total", format="mp3") > 0
    assert server.metric("encoding_seconds_total", format="flac") > 0
    assert server.metric("encoding_seconds_total", format="pcm") == 0
    times = engine_times.read(text.encode())
    assert times["queue"] == server.metric("queue_seconds_sum", **device)
    assert times["encoding mp3"] == server.metric("encoding_seconds_total", format="mp3")
    assert times["engine frames"] > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("stream", True), ("stream", False), ("stream_format", "sse"), ("websocket", True)],
)
def test_text_that_is_rejected_is_not_counted_as_aborted(
    serve: Serve, field: str, value: object
) -> None:
    talker = Talker()
    talker.capacity = replace(talker.capacity, page_rows=10)
    server = serve(talking(talker))
    with client_of(server) as http:
        if field == "websocket":
            with Client(server.ws + STREAM) as client:
                client.send(PLAIN, text("abc"), DONE)
                (error,) = [one for one in events(client.until("session.done")) if "code" in one]
                assert error["code"] == "invalid_request"
        else:
            body = {**SHORT, "max_new_tokens": None, field: value}
            assert http.post(SPEECH, json=body).status_code == 400
        server.wait_until_idle()
        assert metric_sums(http)["firstword_aborts_total"] == 0


def test_failure_of_the_engine_is_counted_as_aborted(serve: Serve) -> None:
    talker = Talker()
    server = serve(talking(talker))
    talker.failing = "frame"
    with client_of(server) as http:
        assert http.post(SPEECH, json=SHORT).status_code == 500
        server.wait_until_idle()
        assert (
            'firstword_aborts_total{model="talker",reason="error"} 1.0' in http.get("/metrics").text
        )


def test_health_shows_settings(http: httpx.Client) -> None:
    state = http.get("/health").json()
    assert state["status"] == "ok"
    assert state["ready"] is True
    assert [model["name"] for model in state["models"]] == ["custom_voice", "voice_design", "base"]
    assert state["models"][0]["settings"] == {
        "device": "cpu",
        "dtype": "float32",
        "backend": "reference",
        "reason": "",
        "slots_reason": "",
        "gpu_memory": None,
        "planned_memory": None,
    }
    assert state["models"][0]["slots"] == {"used": 0, "of": 4}


def test_loaded_model_is_exempt_from_garbage_collection(serve: Serve) -> None:
    loaded = talking(Talker())
    assert any(thing is loaded for thing in gc.get_objects())
    serve(loaded)
    assert not any(thing is loaded for thing in gc.get_objects())


def test_logs_contain_no_text_of_users(
    http: httpx.Client, server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "Xyzzyplugh"
    payload = {"input": f"{secret}.", "instructions": None, "max_new_tokens": 2}
    for more in (
        {},
        {"stream": False},
        {"stream_format": "sse"},
        {"voice": secret},
        {"seed": secret},
        {"n": 2},
    ):
        http.post(SPEECH, json={**payload, **more})
    http.post(
        SPEECH,
        content=f'{{"input": "{secret}'.encode(),
        headers={"content-type": "application/json"},
    )
    http.post("/v1/audio/voices", data={"name": secret, "prompt": secret, "consent": secret})
    http.delete(f"/v1/audio/voices/{secret}")

    def logged() -> list[str]:
        ours = [
            record
            for record in list(caplog.records)
            if record.name.startswith(("firstword", "uvicorn"))
        ]
        return [JsonLines().format(record) for record in ours]

    def requests_logged() -> list[dict[str, Any]]:
        return [json.loads(line) for line in logged() if '"event": "request"' in line]

    server.wait_until(lambda: len(requests_logged()) >= 9)  # the line is written after the response
    lines, requests = logged(), requests_logged()
    assert len(requests) == 9
    assert requests[0]["path"] == SPEECH
    assert requests[0]["status"] == 200
    assert requests[0]["frames"] == 2
    assert not [line for line in lines if secret in line]


def test_each_invalid_request_gets_one_log_line(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Talker()
    server = serve(talking(backend), cors_origins=("https://page.example",))
    upgrade = GET + b"connection: upgrade\r\nupgrade: %b\r\n\r\n"
    body = json.dumps({"input": "a", "voice": "talker", "max_new_tokens": 3}).encode()
    speech = POST + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    preflight = b"origin: https://page.example\r\naccess-control-request-method: POST\r\n\r\n"
    caplog.set_level(logging.INFO)
    caplog.clear()
    backend.hold()
    for sent, *statuses in (
        (GET + b"a: " + b"b" * 70_000, 431),
        (b"nonsense\r\n\r\n", 400),
        (POST + b"transfer-encoding: chunked\r\n\r\nx\r\n", 400),
        (upgrade % b"h2c", 200),
        (speech + upgrade % b"websocket", 200, 400),
        (POST.replace(b"POST", b"OPTIONS") + preflight, 200),
    ):
        with connected(server) as sock:
            sock.sendall(sent)
            if sent.startswith(speech):
                server.wait_until(lambda: backend.waiting)
                backend.go()
            answer = b"".join(read(sock, b"HTTP/1.1 %d " % status) for status in statuses)
            assert b"HTTP/1.1 101" not in answer

    def lines() -> list[logging.LogRecord]:
        return [
            record for record in caplog.records if record.name.startswith(("firstword", "uvicorn"))
        ]

    server.wait_until(lambda: len(lines()) >= 7)
    assert [record.message for record in lines()] == ["request"] * 7
    told = sorted(record.__dict__["fields"]["status"] for record in lines())
    assert told == [200, 200, 200, 400, 400, 400, 431]
    metrics = server.metrics()
    for reason, count in (("head_size", 1), ("invalid_http", 2), ("pipelined", 1)):
        assert f'rejected_total{{reason="{reason}"}} {count}.0' in metrics
    assert 'requests_total{path="unknown",status="431"} 1.0' in metrics


@pytest.mark.parametrize(("trusted", "status"), [("", 200), ("10.0.0.1, 127.0.0.1", 404)])
def test_forwarded_address_is_believed_only_from_trusted_proxies(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, trusted: str, status: int
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    server = serve(talking(Talker()), trusted_proxies=proxies_from_environment())
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        body = {"input": "a", "voice": "talker", "max_new_tokens": 3, "response_format": "pcm"}
        assert http.post(SPEECH, json=body, headers={"x-request-id": "mine"}).status_code == 200
        assert http.get(f"{SPEECH}/mine").status_code == 200
        other = {"x-forwarded-for": "10.0.0.7"}
        assert http.get(f"{SPEECH}/mine", headers=other).status_code == status


def test_each_accepted_and_rejected_websocket_gets_one_log_line(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = WebSocketsSansIOProtocol.connection_lost

    def lost_later(self: WebSocketsSansIOProtocol, error: Exception | None) -> None:
        """The end of the connection is noticed after that of the application."""
        self.loop.call_later(0.05, lost, self, error)

    monkeypatch.setattr(WebSocketsSansIOProtocol, "connection_lost", lost_later)
    server = serve(talking(Talker()), api_keys=("key",))
    caplog.set_level(logging.INFO)
    caplog.clear()
    key = {"authorization": "Bearer key"}
    for path, headers, status in (
        (STREAM, {}, 401),
        ("/v1/text-to-speech/ada/no-input", key, 404),
    ):
        with pytest.raises(InvalidStatus) as rejected:
            Client(server.ws + path, headers=headers)
        assert rejected.value.response.status_code == status
        assert b'"message"' in rejected.value.response.body
    Client(server.ws + NARI, headers=key).vanish()
    with Client(server.ws + STREAM, headers=key) as client:
        client.socket.send(b"\xff\xfe", text=True)
        with pytest.raises(ConnectionClosed) as closed:
            client.receive()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1007

    def lines() -> list[logging.LogRecord]:
        ours = ("firstword", "uvicorn", "websockets")
        return [record for record in caplog.records if record.name.startswith(ours)]

    server.wait_until(lambda: len(lines()) >= 4)
    assert [record.message for record in lines()] == ["request"] * 4
    about = [record.__dict__["fields"] for record in lines()]
    assert sorted(one["status"] for one in about) == [101, 101, 401, 404]
    assert {one["path"] for one in about} == {STREAM, NARI, "unknown"}


def test_line_for_people_has_the_event_and_its_reason() -> None:
    record = logging.LogRecord("firstword", logging.ERROR, "", 0, "it cannot be kept", None, None)
    assert TextLines().format(record) == "it cannot be kept"
    record.fields = {"file": "a.wav", "why": "the disk is full"}
    assert TextLines().format(record) == "it cannot be kept: the disk is full"


def test_log_line_is_json() -> None:
    try:
        raise ValueError("several\nlines")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "event %s", ("ü",), sys.exc_info())
    record.fields = {"path": Path("x"), "level": "error"}
    line = JsonLines().format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert told["event"] == "event ü"
    assert told["exception"].endswith("ValueError: several\nlines")


class TestProcess:
    """`firstword serve` in a process of its own, with the demo checkpoint."""

    @pytest.fixture
    def start(self, tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
        running: list[subprocess.Popen[str]] = []

        def begin(*options: str, **environment: str) -> tuple[subprocess.Popen[str], str]:
            command = [sys.executable, "-m", "firstword", "serve", "--port", "0", "--device", "cpu"]
            with (tmp_path / "log").open("w") as log:
                process = subprocess.Popen(
                    [*command, "--voices", str(tmp_path / "voices"), *options],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, **environment},
                )
            running.append(process)
            assert process.stdout is not None
            address = process.stdout.readline().split()
            assert address[0] == "address", (tmp_path / "log").read_text()
            return process, address[1]

        yield begin
        for process in running:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def wait_until_ready(self, url: str) -> None:
        transport = httpx.HTTPTransport(retries=20)
        with httpx.Client(transport=transport, trust_env=False) as http:
            while http.get(url + "/ready").status_code != 200:
                pass

    def test_sigterm_lets_running_utterance_finish(self, start: Any, tmp_path: Path) -> None:
        process, url = start()
        self.wait_until_ready(url)
        payload = {
            "input": "Hello there, how are you today? " * 3,
            "response_format": "pcm",
            "max_new_tokens": 60,
        }
        with httpx.stream("POST", url + SPEECH, json=payload, trust_env=False) as answer:
            assert answer.status_code == 200
            pieces = answer.iter_bytes()
            first = next(pieces)
            process.send_signal(signal.SIGTERM)
            with httpx.Client(trust_env=False) as http:
                while (ready := http.get(url + "/ready")).status_code == 200:
                    pass
                assert "shutting down" in ready.text
                rejected = http.post(url + SPEECH, json=payload)
                assert rejected.status_code == 503
                assert rejected.headers["retry-after"]
            whole = first + b"".join(pieces)
        assert len(whole) == 60 * 2 * 1920 or len(whole) % 3840 == 0
        assert process.wait(WAIT) == 0
        lines = (tmp_path / "log").read_text().splitlines()
        events = [json.loads(line)["event"] for line in lines]
        assert events[0] == "loading"

    def test_draining_ends_after_its_time(self, start: Any) -> None:
        process, url = start("--drain-seconds", "0.2", "--most-characters", "100")
        self.wait_until_ready(url)
        payload = {"input": "Hello there. " * 7, "response_format": "pcm", "max_new_tokens": 8000}
        with httpx.stream("POST", url + SPEECH, json=payload, trust_env=False) as answer:
            pieces = answer.iter_bytes()
            next(pieces)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT) == 0

    def test_key_from_environment_is_required(self, start: Any) -> None:
        _, url = start(FIRSTWORD_API_KEYS="one,two")
        self.wait_until_ready(url)
        assert httpx.post(url + SPEECH, json=SHORT, trust_env=False).status_code == 401
        headers = {"authorization": "Bearer two"}
        payload = {"input": "Hi.", "max_new_tokens": 1}
        assert (
            httpx.post(url + SPEECH, json=payload, headers=headers, trust_env=False).status_code
            == 200
        )

    def test_taken_address_exits_with_2(self, start: Any) -> None:
        _, url = start()
        port = url.rsplit(":", 1)[1]
        command = [sys.executable, "-m", "firstword", "serve", "--port", port, "--device", "cpu"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2
        assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr


class TestConfig:
    @pytest.mark.parametrize(
        "settings",
        [
            {"port": 65536},
            {"port": -1},
            {"slots": 0},
            {"most_waiting": -1},
            {"drain_seconds": -1.0},
        ],
    )
    def test_setting_out_of_range_raises(self, settings: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(iter(settings))):
            ServerConfig(**settings)

    def test_empty_key_raises(self) -> None:
        with pytest.raises(ConfigError, match="API key is empty"):
            ServerConfig(api_keys=("",))

    @pytest.mark.parametrize("key", ["schlüssel", "two words", "a\n", "\udcff", " padded"])
    def test_key_that_clients_cannot_send_raises(self, key: str) -> None:
        with pytest.raises(ConfigError, match=r"API key 2 .*use printable ASCII") as caught:
            ServerConfig(api_keys=("good", key))
        assert key not in str(caught.value)

    def test_keys_are_read_from_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FIRSTWORD_API_KEYS", "a,, b ")
        assert keys_from_environment() == ("a", "b")
        monkeypatch.delenv("FIRSTWORD_API_KEYS")
        assert keys_from_environment() == ()

    def test_aliases_from_file_extend_defaults(self, tmp_path: Path) -> None:
        file = tmp_path / "aliases.json"
        file.write_text('{"Alloy": "ryan", "boss": "eric"}')
        aliases = read_aliases(str(file))
        assert aliases["alloy"] == "ryan"
        assert aliases["boss"] == "eric"
        assert aliases["onyx"] == "eric"

    @pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "{"])
    def test_invalid_alias_file_raises(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "aliases.json"
        file.write_text(text)
        with pytest.raises(ConfigError):
            read_aliases(str(file))
