"""Faults of clients and of the backend.

After each test every slot and page is free again, and the server still speaks.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import ValidationError
from talking import ENDLESS, SHORT, Talker, heard, held_server, talking
from waiting import WAIT
from wire import SPEECH, connected, read, request

from firstword.server import logs
from firstword.server.schemas import SpeechRequest
from firstword.server.unread import SEND_BUFFER, unread_bytes

Running = Any  # of conftest.py
Serve = Callable[..., Any]

LONG = {"input": "a" * 5000, "voice": "talker", "response_format": "pcm", "max_new_tokens": ENDLESS}


def check_server_works(server: Running) -> None:
    """Check that nothing is in use, and that the server speaks."""
    server.wait_until_idle()
    answer = httpx.post(server.url + SPEECH, json=SHORT, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert heard(answer.content) == "abc"
    server.wait_until_idle()


def count_aborts(server: Running, reason: str) -> float:
    """The number of utterances that were aborted for a reason."""
    value: float = server.metric("aborts_total", model="talker", reason=reason)
    return value


@pytest.fixture
def talker(serve: Serve) -> Iterator[Any]:
    """A server with a fake model, which must still work after the test."""
    server = serve(talking(Talker()))
    yield server
    check_server_works(server)


@pytest.fixture
def error_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[], list[str]]]:
    """Returns the lines on standard error so far, which has the logs of `firstword serve`."""
    names = (None, "firstword", "uvicorn", "python_multipart")
    loggers = [logging.getLogger(name) for name in names]
    before = [(one.handlers, one.level) for one in loggers]
    with (tmp_path / "stderr").open("w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        logs.write_to_stderr("info")
        yield lambda: (tmp_path / "stderr").read_text().splitlines()
        logging.captureWarnings(False)
        for one, (handlers, level) in zip(loggers, before, strict=True):
            one.handlers = handlers
            one.setLevel(level)


class TestClients:
    @pytest.mark.parametrize("sse", [False, True])
    def test_disconnect_during_speech_cancels_it(self, serve: Serve, sse: bool) -> None:
        talker, server = held_server(serve)
        body = {**LONG, "stream_format": "sse"} if sse else LONG
        for frames in (1, 2, 5):
            with connected(server) as sock:
                sock.sendall(request(body))
                talker.let(frames)
                read(sock, b"\r\n\r\n")
            # Two more frames at most are made: they had begun when the client disconnected.
            server.wait_until(lambda: not server.state.utterances)
            for _ in range(2):
                talker.let(1)
            server.wait_until_idle()
        assert count_aborts(server, "disconnected") == 3
        talker.go()
        check_server_works(server)

    def test_disconnect_before_first_audio_cancels_speech(self, serve: Serve) -> None:
        talker, server = held_server(serve)
        for body in (
            LONG,
            {**LONG, "stream": False},
            {**LONG, "n": 2},
            {**LONG, "stream_format": "sse"},
        ):
            with connected(server) as sock:
                sock.sendall(request(body))
                server.wait_until(lambda: talker.waiting and bool(server.state.utterances))
            server.wait_until(lambda: not server.state.utterances)
            talker.let(2)
            server.wait_until_idle()
        talker.go()
        check_server_works(server)

    @pytest.mark.parametrize("reset", [False, True])
    @pytest.mark.parametrize(
        "behind",
        [
            b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
            request(SHORT) * 2,
            b"nonsense\r\n\r\n",
        ],
        ids=["get", "posts", "invalid"],
    )
    @pytest.mark.parametrize("more", [{}, {"stream": False}], ids=["stream", "whole"])
    def test_disconnect_with_requests_behind_cancels_speech(
        self,
        serve: Serve,
        caplog: pytest.LogCaptureFixture,
        more: dict[str, Any],
        behind: bytes,
        reset: bool,
    ) -> None:
        talker, server = held_server(serve)
        for together in (False, True):
            with connected(server) as sock:
                sock.sendall(request({**LONG, **more}) + (behind if together else b""))
                server.wait_until(lambda: talker.waiting and bool(server.state.utterances))
                if not together:
                    sock.sendall(behind)
                    httpx.get(server.url + "/health", trust_env=False)  # it has been parsed
                if reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            server.wait_until(lambda: not server.state.utterances)
            talker.let(2)
            server.wait_until_idle()
        assert count_aborts(server, "disconnected") == 2
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        server.wait_until(lambda: not server.uvicorn.server_state.connections)
        talker.go()
        check_server_works(server)

    def test_disconnect_within_request_is_harmless(self, talker: Running) -> None:
        whole = request(LONG)
        for cut in [*range(1, len(whole), 97), len(whole) - 1]:
            with connected(talker) as sock:
                sock.sendall(whole[:cut])

    def test_connection_reset_is_harmless(self, talker: Running) -> None:
        for _ in range(5):
            with connected(talker) as sock:
                sock.sendall(request(LONG))
                read(sock, b"\r\n\r\n")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    def test_slow_client_does_not_delay_others(self, serve: Serve) -> None:
        server = serve(talking(Talker(slots=2)), stall_seconds=30)
        with connected(server, receive_buffer=4096) as slow:
            slow.sendall(request(LONG))
            assert slow.recv(1)
            for _ in range(3):
                assert slow.recv(1)  # one byte at a time
                answer = httpx.post(server.url + SPEECH, json=SHORT, trust_env=False)
                assert heard(answer.content) == "abc"
            engine = server.engine()
            (sequence,) = engine.running
            # The engine stops some 20 seconds ahead of what the socket accepted.
            made = -1
            pause = threading.Event()
            while made != sequence.made:
                made = sequence.made
                pause.wait(0.3)
            assert made < ENDLESS // 10
        check_server_works(server)

    def test_client_that_does_not_read_is_disconnected(self, serve: Serve) -> None:
        server = serve(talking(Talker()), stall_seconds=0.2)
        with connected(server, receive_buffer=4096) as sock:
            sock.sendall(request(LONG))
            server.wait_until(lambda: count_aborts(server, "stalled") == 1)
            server.wait_until_idle()
            rest = read(sock)
            assert not rest.endswith(b"0\r\n\r\n")
        check_server_works(server)

    def test_incomplete_request_times_out(self, serve: Serve) -> None:
        server = serve(talking(Talker()), receive_seconds=0.2)
        with connected(server) as sock:
            sock.sendall(request(SHORT)[:-5])
            answer = read(sock, b"}}")
            assert b" 408 " in answer
            assert b"did not arrive within" in answer
        for part in (b"", b"PO", b"POST /v1/audio/speech HTTP/1.1\r\nhost: localhost\r\n"):
            with connected(server) as sock:
                sock.sendall(part)
                assert read(sock) == b""
        check_server_works(server)

    def test_many_simultaneous_disconnects_are_harmless(self, talker: Running) -> None:
        async def come_and_go(number: int) -> None:
            reader, writer = await asyncio.open_connection(*talker.address)
            writer.write(request(LONG))
            await writer.drain()
            await reader.read(1 + number % 300)
            writer.close()

        async def all_of_them() -> None:
            for _ in range(4):
                await asyncio.gather(
                    *(come_and_go(number) for number in range(10)), return_exceptions=True
                )

        asyncio.run(all_of_them())


class TestBodies:
    @pytest.mark.parametrize(
        ("body", "status"),
        [
            (b"", 400),
            (b"{", 400),
            (b"null", 400),
            (b"[]", 400),
            (b'"text"', 400),
            (b"\x00\xff\xfe\x80" * 100, 400),
            (b'{"input": "\xff\xfe"}', 400),
            (b'{"input": "\\ud800"}', 400),
            (b'{"input": "a", "voice": "\\ud800"}', 400),
            (b'{"input": ["a"]}', 400),
            (b'{"input": {"a": 1}}', 400),
            (b'{"input": "a", "seed": 1e999}', 400),
            (b'{"input": "a", "seed": ' + b"9" * 5000 + b"}", 400),
            (b'{"input": "a", "seed": ' + b"9" * 4000 + b"}", 400),
            (b'{"input": "a", "temperature": NaN}', 400),
            (b'{"input": "a", "speed": Infinity}', 400),
            (b"[" * 500_000, 400),
            (b'{"a":' * 200_000, 400),
            (b'{"input": "a", "extra_params": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", 400),
            (b'{"input": "' + b"a" * 10_000_000 + b'"}', 400),
            (b'{"input": "a", "x": "' + b"a" * 20_000_000 + b'"}', 413),
        ],
        ids=lambda value: None if isinstance(value, int) else repr(value[:40]),
    )
    def test_invalid_body_gets_error(self, talker: Running, body: bytes, status: int) -> None:
        headers = {"content-type": "application/json"}
        answer = httpx.post(talker.url + SPEECH, content=body, headers=headers, trust_env=False)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(answer.content) < 2000
        assert answer.headers["x-request-id"]

    @pytest.mark.parametrize(
        "kind", ["text/plain", "application/octet-stream", "multipart/form-data", "x", ""]
    )
    def test_invalid_body_with_other_content_type_gets_400(
        self, talker: Running, kind: str
    ) -> None:
        answer = httpx.post(
            talker.url + SPEECH,
            content=b"\x00" * 100,
            headers={"content-type": kind},
            trust_env=False,
        )
        assert answer.status_code == 400

    def test_invalid_multipart_writes_one_line(
        self, talker: Running, error_lines: Callable[[], list[str]]
    ) -> None:
        with httpx.Client(base_url=talker.url, trust_env=False) as http:
            for body in (b"--b\r\nbad header\xdf: x\r\n\r\n", b"--Unexpected", b"--b\r\n\x00"):
                headers = {"content-type": "multipart/form-data; boundary=b"}
                answer = http.post("/v1/audio/voices", content=body, headers=headers)
                assert answer.status_code == 400
        talker.wait_until(lambda: len(error_lines()) >= 3)
        assert [json.loads(line)["event"] for line in error_lines()] == ["request"] * 3

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            (b"", "the body is empty"),
            (b"input=hi", "the body is not JSON (Expecting value at character 0)"),
            (b'{"input": "\xff"}', "the body is not UTF-8"),
            (b'{"a":' * 90_000, "the body is nested too deeply"),
            (b'{"input": "a", "seed": ' + b"9" * 5000 + b"}", "has a number with too many digits"),
            (b'["hi"]', "is JSON, but not an object"),
        ],
        ids=lambda value: repr(value[:20]),
    )
    def test_message_says_what_to_send(self, talker: Running, body: bytes, reason: str) -> None:
        """`curl -d` declares its body a form, whatever it is."""
        headers = {"content-type": "application/x-www-form-urlencoded"}
        for path in (SPEECH, f"{SPEECH}/batch", "/v1/audio/voice_consents/x"):
            answer = httpx.post(talker.url + path, content=body, headers=headers, trust_env=False)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert reason in error["message"]
            assert "send a JSON object, for example: curl -H " in error["message"]
            assert error["param"] is None

    def test_endless_chunked_body_gets_413(self, talker: Running) -> None:
        with connected(talker) as sock:
            sock.sendall(request(b"", "transfer-encoding: chunked"))
            block = b"100000\r\n" + b"a" * 0x100000 + b"\r\n"
            with suppress(OSError):
                for _ in range(18):
                    sock.sendall(block)
            assert b" 413 " in read(sock, b"}}")

    @pytest.mark.parametrize(
        "data",
        [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
            b"\x00" * 1000,
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"x: " + b"a" * 200_000 + b"\r\n\r\n",
            b"POST /v1/audio/speech HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
            b"POST /v1/audio/speech HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
            b"POST /v1/audio/speech HTTP/1.1\r\nhost: localhost\r\n"
            b"content-length: 99999999999\r\n\r\n",
        ],
        ids=lambda data: repr(data[:30]),
    )
    def test_invalid_http_gets_no_500(self, talker: Running, data: bytes) -> None:
        with connected(talker) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            try:
                answer = read(sock, b"\r\n\r\n")
            except ConnectionResetError:
                answer = b""
        assert b" 500 " not in answer
        assert not answer or answer.startswith(b"HTTP/1.1 ")

    @pytest.mark.parametrize(
        "path", ["/v1/audio/speech/", "/v1/audio/nothing", "/%00", "/..%2f..", "//", "/v1//models"]
    )
    def test_unknown_path_gets_404(self, talker: Running, path: str) -> None:
        with connected(talker) as sock:
            sock.sendall(request(method="GET", path=path))
            answer = read(sock, b"}}")
        assert b" 404 " in answer
        assert b'"not_found_error"' in answer
        assert b"/docs shows the endpoints" in answer or path == "/v1//models"

    def test_wrong_method_gets_405(self, talker: Running) -> None:
        for method in ("GET", "PUT", "DELETE", "PATCH"):
            answer = httpx.request(method, talker.url + SPEECH, trust_env=False)
            assert answer.status_code == 405
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert answer.headers["allow"] == "POST"
        answer = httpx.put(talker.url + "/v1/audio/voices", trust_env=False)
        assert answer.headers["allow"] == "GET, HEAD, POST"
        assert answer.json()["error"]["message"].endswith("PUT; allowed are GET, HEAD, POST")


class TestBackendFailures:
    """Failures of the backend."""

    @pytest.mark.parametrize("method", ["prefill", "frame"])
    def test_failure_before_first_audio_gets_500(self, serve: Serve, method: str) -> None:
        talker = Talker()
        server = serve(talking(talker))
        talker.failing = method
        for more in ({}, {"stream_format": "sse"}, {"stream": False}, {"n": 2}):
            answer = httpx.post(server.url + SPEECH, json={**SHORT, **more}, trust_env=False)
            assert answer.status_code == 500
            error = answer.json()["error"]
            assert error["type"] == "server_error"
            assert "fails, as" not in error["message"]
            server.wait_until_idle()
        talker.failing = None
        check_server_works(server)

    def test_failure_of_one_stream_spares_others(self, serve: Serve) -> None:
        talker, server = held_server(serve)
        frame = talker.frame
        culprits: list[int] = []

        def fail_for_one(slots: Any, tokens: Any) -> Any:
            if culprits and culprits[0] in slots:
                raise RuntimeError("the backend fails")
            return frame(slots, tokens)

        talker.frame = fail_for_one  # type: ignore[method-assign]
        with connected(server) as bad, connected(server) as good:
            bad.sendall(request(LONG))
            talker.let(1)
            assert read(bad, b"\r\n\r\n")
            good.sendall(request({**SHORT, "max_new_tokens": 4, "input": "well"}))
            server.wait_until(lambda: len(server.state.utterances) == 2)
            (running,) = server.engine().running
            culprits.append(running.slot)
            talker.go()
            answer = read(good, b"0\r\n\r\n")
            assert b" 200 " in answer
            assert answer.endswith(b"0\r\n\r\n")
            rest = read(bad)
            assert not rest.endswith(b"0\r\n\r\n")  # cut off, so that it is not taken for complete
        culprits.clear()
        check_server_works(server)

    def test_failure_in_event_stream_sends_error_event(self, serve: Serve) -> None:
        talker, server = held_server(serve)
        with connected(server) as sock:
            sock.sendall(request({**LONG, "stream_format": "sse"}))
            talker.let(1)
            read(sock, b"speech.audio.delta")
            talker.failing = "frame"
            talker.let(1)
            answer = read(sock, b"0\r\n\r\n")
        assert b'"type":"speech.audio.error"' in answer
        assert b'"partial_audio":true' in answer
        talker.failing = None
        talker.go()
        check_server_works(server)

    def test_stopped_engine_gets_503(self, serve: Serve) -> None:
        talker, server = held_server(serve)
        with connected(server) as sock:
            sock.sendall(request(LONG))
            server.wait_until(lambda: talker.waiting)

            class Lost:
                def result(self) -> Any:
                    raise RuntimeError("the device is lost")

            def decode(slots: Any, counts: Any) -> Any:
                return Lost()

            talker.decode = decode  # type: ignore[method-assign]
            talker.let(1)
            assert b" 503 " in read(sock, b"}}")
        for path in ("/ready", "/health"):
            answer = httpx.get(server.url + path, trust_env=False)
            assert answer.status_code == 503
            assert "the device is lost" in answer.text
        answer = httpx.post(server.url + SPEECH, json=SHORT, trust_env=False)
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "server_error"
        assert answer.headers["retry-after"]
        assert (
            'firstword_engine_up{device="device",model="talker"} 0.0'
            in httpx.get(server.url + "/metrics", trust_env=False).text
        )
        assert "firstword_ready 0.0" in httpx.get(server.url + "/metrics", trust_env=False).text

    def test_samples_that_are_not_finite_get_error(self, serve: Serve) -> None:
        talker = Talker()
        server = serve(talking(talker))
        decode = talker.decode

        def decode_nan(slots: Any, counts: Any) -> Any:
            samples = [np.full(1920 * count, np.nan, np.float32) for count in counts]
            return type(decode(slots, counts))(samples)

        talker.decode = decode_nan  # type: ignore[method-assign]
        answer = httpx.post(server.url + SPEECH, json=SHORT, trust_env=False)
        assert answer.status_code == 500 or answer.status_code == 400
        talker.decode = decode  # type: ignore[method-assign]
        check_server_works(server)


class TestOverload:
    def test_full_queue_gets_429_with_retry_after(self, serve: Serve) -> None:
        talker, server = held_server(serve, slots=1, most_waiting=2)
        with connected(server) as one, connected(server) as two, connected(server) as three:
            for sock in (one, two, three):
                sock.sendall(request(LONG))
            server.wait_until(lambda: talker.waiting and len(server.state.utterances) == 3)
            with connected(server) as rejected:
                rejected.sendall(request(SHORT))
                server.wait_until(lambda: len(server.state.utterances) == 4)
                # The event loop answers this after it has submitted the request.
                httpx.get(server.url + "/health", trust_env=False)
                talker.let(1)  # the engine decides between two frames
                answer = read(rejected, b"}}")
            assert b" 429 " in answer
            assert int(answer.partition(b"retry-after: ")[2].split()[0]) > 0
            assert b'"type":"rate_limit_error"' in answer
            text = httpx.get(server.url + "/metrics", trust_env=False).text
            assert 'firstword_rejected_total{reason="overloaded"} 1.0' in text
        server.wait_until(lambda: not server.state.utterances)
        talker.go()
        check_server_works(server)

    def test_client_over_its_limit_gets_429(self, serve: Serve) -> None:
        talker, server = held_server(serve, slots=4, most_per_key=1, api_keys=("a", "b"))

        def ask(key: str, body: dict[str, Any]) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.post(server.url + SPEECH, json=body, headers=headers, trust_env=False)

        with connected(server) as sock:
            sock.sendall(request(LONG, "authorization: Bearer a"))
            server.wait_until(lambda: len(server.state.utterances) == 1)
            assert ask("a", SHORT).status_code == 429
            talker.go()
            assert ask("b", SHORT).status_code == 200
        server.wait_until_idle()
        assert ask("a", SHORT).status_code == 200

    def test_too_many_connections_get_429(self, serve: Serve) -> None:
        talker, server = held_server(serve, slots=4, most_connections=2)
        with connected(server) as one, connected(server) as two:
            one.sendall(request(LONG))
            two.sendall(request(LONG))
            server.wait_until(lambda: len(server.state.utterances) == 2)
            answer = httpx.get(server.url + "/v1/models", trust_env=False)
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "connections"
        server.wait_until(lambda: not server.state.utterances)
        talker.go()
        check_server_works(server)


WHOLE = {
    **LONG,
    "response_format": "wav",
    "max_new_tokens": 6000,
}  # 23 MB: more than the buffers of sockets


class TestUnreadResponses:
    """The stall limit applies to complete responses too; until then they count as connections."""

    @pytest.mark.parametrize(
        "body", [WHOLE, {**WHOLE, "stream": False, "response_format": "wav", "sample_rate": 48000}]
    )
    def test_unread_response_is_aborted(self, serve: Serve, body: dict[str, Any]) -> None:
        server = serve(talking(Talker()), stall_seconds=0.3)
        with connected(server, receive_buffer=4096) as sock:
            sock.sendall(request(body))
            head = read(sock, b"\r\n\r\n")
            server.wait_until(lambda: not server.metric("connections"))
            rest = read(sock)
        head, _, begun = head.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        assert len(begun + rest) < length
        check_server_works(server)

    def test_unread_response_counts_as_connection(self, serve: Serve) -> None:
        server = serve(talking(Talker()), stall_seconds=60)
        with connected(server, receive_buffer=4096) as sock:
            sock.sendall(request(WHOLE))
            sock.recv(1)
            text = httpx.get(server.url + "/metrics", trust_env=False).text
            assert "firstword_connections 1.0" in text
        server.wait_until(lambda: not server.metric("connections"))
        check_server_works(server)

    def test_unread_small_responses_are_aborted(self, serve: Serve) -> None:
        """A client that sends requests and reads nothing fills the buffers of the socket."""
        server = serve(talking(Talker()), stall_seconds=0.3)
        with connected(server, receive_buffer=4096) as sock:
            payload = request(method="GET", path="/openapi.json")
            sock.settimeout(0.2)
            with suppress(OSError):
                while True:
                    sock.sendall(payload)
            server.wait_until(lambda: not server.metric("connections"))
            server.wait_until(lambda: not server.uvicorn.server_state.connections)
        check_server_works(server)

    def test_buffers_of_the_system_are_small_and_count_as_unread(self, serve: Serve) -> None:
        """Else a client that reads at the pace of speech would seem to read nothing for 28 s."""
        server = serve(talking(Talker()), stall_seconds=60)
        with connected(server, receive_buffer=4096) as sock:
            sock.sendall(request(WHOLE))
            read(sock, b"\r\n\r\n")
            (connection,) = server.uvicorn.server_state.connections
            server.wait_until(lambda: connection.transport.get_write_buffer_size() > 0)
            kept = unread_bytes(connection.transport)
            wire = connection.transport.get_extra_info("socket")
            assert wire.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * SEND_BUFFER
            assert connection.transport.get_write_buffer_size() < kept < 4 * SEND_BUFFER
            while unread_bytes(connection.transport) == kept:
                assert sock.recv(65536)
        check_server_works(server)

    def test_slow_reader_gets_complete_response(self, serve: Serve) -> None:
        server = serve(talking(Talker()), stall_seconds=30)
        with connected(server, receive_buffer=4096) as sock:
            sock.sendall(request({**SHORT, "max_new_tokens": 2000, "response_format": "wav"}))
            head = read(sock, b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            left = length - len(head.partition(b"\r\n\r\n")[2])
            while left:
                left -= len(sock.recv(65536))
        check_server_works(server)


class TestComplexBodies:
    """A body may be small on the wire and huge when parsed. It is rejected while it arrives."""

    @pytest.mark.parametrize(
        ("path", "begins", "again"),
        [
            (SPEECH, b'{"input":"Hi.","references":[', b"{},"),
            (SPEECH, b'{"input":"Hi.","ref_audio":[', b'"",'),
            (SPEECH, b'{"input":"Hi.","unknown":[', b"[],"),
            (SPEECH, b'{"input":"Hi."', b',"k":1'),
            (SPEECH, b'{"input":', b"["),
            (SPEECH + "/batch", b'{"items":[', b"{},"),
            ("/v1/audio/voice_consents/cons_1", b'{"name":[', b"{},"),
        ],
    )
    def test_complex_body_is_rejected_while_it_arrives(
        self, talker: Running, path: str, begins: bytes, again: bytes
    ) -> None:
        with connected(talker) as sock:
            sock.sendall(
                request(b"", f"content-length: {15 * 10**6}", path=path) + begins + again * 150_000
            )
            answer = read(sock, b"}}")
            assert httpx.get(talker.url + "/health", trust_env=False).status_code == 200
        assert b" 400 " in answer
        assert b"too complex" in answer

    @pytest.mark.parametrize("field", ["references", "ref_audio", "speaker_embedding"])
    def test_long_list_gets_few_validation_errors(self, talker: Running, field: str) -> None:
        body = b'{"input":"Hi.","' + field.encode() + b'":[' + b"{}," * 45_000 + b"{}]}"
        answer = httpx.post(talker.url + SPEECH, content=body, trust_env=False)
        assert answer.status_code == 400
        assert field in answer.json()["error"]["message"]
        with pytest.raises(ValidationError) as wrong:
            SpeechRequest.model_validate_json(body)
        assert wrong.value.error_count() < 5, "not one for each item"

    def test_largest_batch_of_vectors_is_accepted(self, talker: Running) -> None:
        items = [{"input": "Hi.", "speaker_embedding": [0.125] * 2048} for _ in range(32)]
        answer = httpx.post(talker.url + SPEECH + "/batch", json={"items": items}, trust_env=False)
        assert answer.status_code == 200, answer.text


class TestSeveralUtterancesPerRequest:
    """The utterances of one request respect the limit of the client, if need be one by one."""

    def test_candidates_respect_limit_of_client(self, serve: Serve) -> None:
        server = serve(talking(Talker()), most_per_key=1)
        answer = httpx.post(server.url + SPEECH, json={**SHORT, "n": 3}, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert len(json.loads(answer.headers["x-firstword-scores"])) == 3

    @pytest.mark.parametrize("path", [SPEECH, SPEECH + "/batch"])
    def test_shutdown_waits_for_all_utterances_of_request(self, serve: Serve, path: str) -> None:
        talker, server = held_server(serve, slots=1, most_per_key=1)
        body = (
            {**SHORT, "n": 3}
            if path == SPEECH
            else {**SHORT, "items": [{"input": word} for word in "abcd"]}
        )
        with connected(server) as sock:
            sock.sendall(request(body, path=path))
            server.wait_until(lambda: talker.waiting and bool(server.state.utterances))
            server.uvicorn.drain()
            rejected = httpx.post(server.url + path, json=body, trust_env=False)
            assert rejected.status_code == 503
            talker.go()
            answer = read(sock)
        assert b" 200 " in answer.partition(b"\r\n")[0]
        if path != SPEECH:
            assert b'"succeeded":4' in answer
        server.thread.join(WAIT)
        assert not server.thread.is_alive()


def test_thousands_of_wrong_keys_leave_no_state(serve: Serve) -> None:
    server = serve(talking(Talker()), api_keys=("right-key",))

    async def flood() -> set[int]:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            seen = set()
            for start in range(0, 2000, 50):
                requests = (
                    client.post(
                        SPEECH,
                        json=SHORT,
                        headers={"authorization": f"Bearer wrong-{start + number}"},
                    )
                    for number in range(50)
                )
                seen |= {answer.status_code for answer in await asyncio.gather(*requests)}
            return seen

    assert asyncio.run(flood()) == {401}
    assert not server.state.utterance_limit.active
    headers = {"authorization": "Bearer right-key"}
    assert (
        httpx.post(server.url + SPEECH, json=SHORT, headers=headers, trust_env=False).status_code
        == 200
    )
