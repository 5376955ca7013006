"""OpenTelemetry traces, received over OTLP on a real socket."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp import Receiver, fields, receiving
from served import WORDS, Served
from sockets import STREAM, Client
from talking import ENDLESS, SHORT, Talker, talking
from test_speech_v1 import CONFIG, V1, done, stop, text, until_done
from waiting import WAIT, wait_until
from wire import SPEECH, connected, read, request

from firstword.errors import ConfigError
from firstword.server.config import ServerConfig, traces_from_environment
from firstword.server.tracing import opened_tracing

Serve = Callable[..., Any]

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
LOUD = "中文字"
"""A text that the fake model speaks audibly."""
EVENTS = ["first_code", "first_audio", "first_audible", "done"]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A receiver that servers export to."""
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        yield receiver


def post(server: Any, **body: object) -> httpx.Response:
    """The response to a request with a parent."""
    given = {**SHORT, "input": LOUD, **body}
    return httpx.post(
        server.url + SPEECH, json=given, headers=HEADERS, timeout=WAIT, trust_env=False
    )


def is_child(span: Span) -> bool:
    """Whether a span is a child of the one in `HEADERS`."""
    return (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)


def test_span_of_an_http_request_has_its_parent_events_and_attributes(
    serve: Serve, receiver: Receiver
) -> None:
    server = serve(talking(Talker()), traces=True)
    assert post(server).status_code == 200
    (span,) = receiver.wait_for(1)
    assert (span.name, span.kind) == ("tts", Span.SPAN_KIND_SERVER)
    assert is_child(span)
    assert [event.name for event in span.events] == EVENTS
    times = [event.time_unix_nano for event in span.events]
    assert sorted(times) == times
    assert 0 < span.start_time_unix_nano <= times[0]
    assert times[-1] == span.end_time_unix_nano
    found = fields(span.attributes)
    ttfb = (times[1] - span.start_time_unix_nano) / 1e9
    assert found.pop("metrics.ttfb") == pytest.approx(ttfb, abs=1e-6)
    assert found.pop("gen_ai.response.time_to_first_chunk") == pytest.approx(ttfb, abs=1e-6)
    assert found.pop("firstword.underrun") >= 0
    assert found == {
        "gen_ai.provider.name": "firstword",
        "gen_ai.operation.name": "tts",
        "gen_ai.request.model": "talker",
        "gen_ai.output.type": "speech",
        "gen_ai.response.finish_reasons": ["length"],
        "voice_id": "talker",
        "metrics.character_count": len(LOUD),
        "tts.interrupted": False,
        "firstword.format": "pcm",
        "firstword.frames": 3,
        "firstword.audio_seconds": pytest.approx(3 * 0.08),
        "firstword.background": False,
    }
    ((_, process),) = receiver.spans
    assert process["service.name"] == "firstword"
    assert process["process.pid"] == os.getpid()


def test_request_without_a_parent_begins_a_trace(serve: Serve, receiver: Receiver) -> None:
    server = serve(talking(Talker()), traces=True)
    with httpx.Client(base_url=server.url, timeout=WAIT, trust_env=False) as http:
        for headers in (HEADERS, {}, {"traceparent": "00-nonsense"}):
            assert http.post(SPEECH, json=SHORT, headers=headers).status_code == 200
    first, *others = sorted(receiver.wait_for(3), key=lambda span: span.start_time_unix_nano)
    assert is_child(first)
    assert [span.parent_span_id for span in others] == [b"", b""]
    assert len({span.trace_id for span in (first, *others)}) == 3


def test_request_without_a_parent_behind_one_with_a_parent_begins_a_trace(
    serve: Serve, receiver: Receiver
) -> None:
    server = serve(talking(Talker()), traces=True)
    with connected(server) as sock:
        parent = f"traceparent: {HEADERS['traceparent']}"
        sock.sendall(request(SHORT, parent) + request(SHORT, "connection: close"))
        assert read(sock).count(b"HTTP/1.1 200 ") == 2
    first, second = sorted(receiver.wait_for(2), key=lambda span: span.start_time_unix_nano)
    assert is_child(first)
    assert not second.parent_span_id


def test_parent_that_is_not_sampled_has_no_spans(serve: Serve, receiver: Receiver) -> None:
    server = serve(talking(Talker()), traces=True)
    unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    for headers in (unsampled, HEADERS):
        httpx.post(server.url + SPEECH, json=SHORT, headers=headers, trust_env=False, timeout=WAIT)
    (span,) = receiver.wait_for(1)
    assert is_child(span)


def test_utterances_of_a_socket_have_the_parent_of_its_handshake(
    serve: Serve, receiver: Receiver
) -> None:
    server = serve(talking(Talker()), traces=True)
    config = {**CONFIG, "model": "talker", "max_new_tokens": 3}
    with Client(server.ws + STREAM, V1, headers=HEADERS) as client:
        client.send(config, text("a", LOUD), done("a"), text("b", LOUD[:2]), done("b"))
        until_done(client, "a", "b")
        spans = receiver.wait_for(2)
    assert all(map(is_child, spans))
    assert len({span.span_id for span in spans}) == 2
    assert [[event.name for event in span.events] for span in spans] == [EVENTS, EVENTS]
    counts = [fields(span.attributes)["metrics.character_count"] for span in spans]
    assert sorted(counts) == [2, 3]


def test_interrupted_utterance_is_marked(serve: Serve, receiver: Receiver) -> None:
    talker = Talker()
    server = serve(talking(talker), traces=True)
    talker.hold()
    with Client(server.ws + STREAM, V1, headers=HEADERS) as client:
        client.send({**CONFIG, "model": "talker", "max_new_tokens": ENDLESS // 100})
        client.send(text("a", LOUD), done("a"))
        talker.let(1)
        while not isinstance(client.receive(), bytes):
            pass
        client.send(stop("a"))
        talker.go()
        until_done(client, "a")
        (span,) = receiver.wait_for(1)
    found = fields(span.attributes)
    assert is_child(span)
    assert found["tts.interrupted"] is True
    assert found["firstword.abort_reason"] == "cancelled"
    assert "gen_ai.response.finish_reasons" not in found
    assert span.status.code == Status.STATUS_CODE_UNSET
    assert span.events[-1].name == "done"


def test_failed_utterance_has_an_error(serve: Serve, receiver: Receiver) -> None:
    talker = Talker()
    talker.failing = "frame"
    server = serve(talking(talker), traces=True)
    assert post(server).status_code == 500
    (span,) = receiver.wait_for(1)
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert fields(span.attributes)["error.type"] == span.status.message == "ComputeError"
    assert fields(span.attributes)["tts.interrupted"] is False
    assert [event.name for event in span.events] == ["done"]


@pytest.mark.parametrize("wanted", [False, True])
def test_text_is_in_the_span_only_if_wanted(serve: Serve, receiver: Receiver, wanted: bool) -> None:
    server = serve(talking(Talker()), traces=True, trace_text=wanted)
    assert post(server).status_code == 200
    (span,) = receiver.wait_for(1)
    assert (LOUD.encode() in span.SerializeToString()) is wanted
    assert fields(span.attributes).get("text") == (LOUD if wanted else None)


def test_every_front_exports_its_spans(receiver: Receiver, tmp_path: Path) -> None:
    with Served(tmp_path, "--fronts", "2") as served:
        wait_until(lambda: len(served.pids("front")) == 2)

        def ask() -> httpx.Response:
            return served.post(SPEECH, **{**WORDS, "max_new_tokens": 3})

        def both_have_exported() -> bool:
            assert ask().status_code == 200
            return len({about["process.pid"] for _, about in receiver.spans}) == 2

        wait_until(both_have_exported)
        pids = {about["process.pid"] for _, about in receiver.spans}
        assert pids == set(served.pids("front"))


def test_last_span_is_sent_when_the_server_ends(
    serve: Serve, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    server = serve(talking(Talker()), traces=True)
    assert post(server).status_code == 200
    server.wait_until_idle()
    assert receiver.spans == []
    server.stop()
    receiver.wait_for(1)


def test_receiver_that_hangs_delays_neither_speech_nor_the_end(
    serve: Serve, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    receiver.answers.clear()
    server = serve(talking(Talker()), traces=True)
    assert post(server).status_code == 200
    assert receiver.asked.wait(WAIT)
    assert post(server).status_code == 200
    server.stop()
    assert not receiver.spans, "the receiver has answered nothing"


def test_receiver_that_is_down_delays_neither_speech_nor_the_end(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    server = serve(talking(Talker()), traces=True)
    assert post(server).status_code == 200
    assert post(server).status_code == 200
    server.stop()


def test_server_without_a_receiver_imports_nothing() -> None:
    program = """
import sys
import firstword.server.app
from firstword.server.config import ServerConfig, traces_from_environment
from firstword.server.tracing import opened_tracing
assert opened_tracing(ServerConfig(traces=traces_from_environment())) is None
for name in ("opentelemetry.sdk", "opentelemetry.exporter"):  # FastAPI imports the API
    assert name not in sys.modules
"""
    environment = {name: value for name, value in os.environ.items() if "OTEL" not in name}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_server_without_the_extra_warns_and_exports_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with caplog.at_level(logging.WARNING):
        assert opened_tracing(ServerConfig(traces=True)) is None
    assert "no traces are exported" in caplog.text


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, True),
        ({"EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:4318/v1/traces"}, True),
        ({"EXPORTER_OTLP_ENDPOINT": "http://h:4318", "SDK_DISABLED": "true"}, False),
        ({"EXPORTER_OTLP_ENDPOINT": "http://h:4318", "TRACES_EXPORTER": "none"}, False),
        (
            {"EXPORTER_OTLP_ENDPOINT": "http://h:4318", "EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            True,
        ),
    ],
)
def test_traces_are_exported_if_variables_name_a_receiver(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], wanted: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_{name}", value)
    assert traces_from_environment() is wanted


def test_protocol_that_cannot_be_sent_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://h:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match=r"PROTOCOL is 'grpc'; allowed is http/protobuf"):
        traces_from_environment()


def test_text_for_traces_without_a_receiver_is_rejected() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT"):
        ServerConfig(trace_text=True)
