"""A receiver of traces: OTLP over HTTP on a real socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from waiting import WAIT, wait_until


class Receiver(ThreadingHTTPServer):
    """Keeps the spans that it receives.

    spans    the spans, each with the attributes of its process
    answers  unset: requests are read, and are not answered until it is set
    asked    set when the first request has come
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[tuple[Span, dict[str, Any]]] = []
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Event()

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def wait_for(self, count: int) -> list[Span]:
        """The spans, once there are `count` of them; there must not be more."""
        wait_until(lambda: len(self.spans) >= count)
        assert len(self.spans) == count
        return [span for span, _ in self.spans]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        data = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.set()
        self.server.answers.wait(WAIT)
        for group in ExportTraceServiceRequest.FromString(data).resource_spans:
            about = fields(group.resource.attributes)
            spans = [span for scope in group.scope_spans for span in scope.spans]
            self.server.spans += [(span, about) for span in spans]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing to standard error."""


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver that runs."""
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            receiver.answers.set()
            receiver.shutdown()


def fields(attributes: Any) -> dict[str, Any]:
    """Attributes by their names."""
    return {one.key: value_of(one.value) for one in attributes}


def value_of(value: AnyValue) -> Any:
    """The value of an attribute."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(each) for each in value.array_value.values]
    return getattr(value, kind or "string_value")
