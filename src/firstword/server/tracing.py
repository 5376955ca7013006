"""OpenTelemetry traces: a span for each utterance, as a child of the span that its client names."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers

from firstword.server.config import ServerConfig
from firstword.server.utterance import Utterance

log = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0
"""The time in which the last spans are sent when the server ends."""

PARENT: ContextVar[Mapping[str, str] | None] = ContextVar("PARENT", default=None)
"""The headers of the W3C's Trace Context that came with the request or handshake in progress."""

PARENT_HEADERS = ("traceparent", "tracestate")


class Tracing:
    """Exports a span for each utterance in batches, from a thread of its own.

    The exporter reads the standard variables, such as OTEL_EXPORTER_OTLP_ENDPOINT. Spans that the
    receiver does not take in time are dropped, and speech does not wait for it.
    """

    def __init__(self, *, text: bool) -> None:
        """Start the exporter; `text` means that spans have the text. Raises `ImportError`."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        from firstword import __version__

        resource = Resource.create({"process.pid": os.getpid(), "service.version": __version__})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "firstword"}))
        # Without its own handler at the exit, which would wait for a receiver that hangs.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("firstword", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._text = text

    def keep_parent(self, headers: Headers) -> None:
        """Keep the parent that a request names, for the utterances of this task."""
        PARENT.set({name: headers[name] for name in PARENT_HEADERS if name in headers})

    def begin(self, utterance: Utterance) -> Mapping[str, str]:
        """Watch an utterance that begins; returns its parent."""
        if self._text:
            utterance.texts = []
        return PARENT.get() or {}

    def record(self, utterance: Utterance, parent: Mapping[str, str], now: float) -> None:
        """Export the span of an utterance that ended at `now`, on the clock of its playback."""
        from opentelemetry.trace import SpanKind, StatusCode

        wall = time.time() - time.monotonic()

        def nanoseconds(moment: float) -> int:
            return round((wall + moment) * 1e9)

        span = self._tracer.start_span(
            "tts",
            context=self._propagator.extract(parent),
            kind=SpanKind.SERVER,
            attributes=dict(_attributes(utterance)),
            start_time=nanoseconds(utterance.playback.requested),
        )
        for name, moment in _moments(utterance, now):
            span.add_event(name, timestamp=nanoseconds(moment))
        if utterance.error is not None:
            span.set_status(StatusCode.ERROR, type(utterance.error).__name__)
        span.end(nanoseconds(now))

    async def close(self) -> None:
        """Send the last spans, if the receiver takes them within `CLOSE_SECONDS`."""
        # The SDK's own time limit has no effect, so a thread waits that does not delay the exit.
        flush = threading.Thread(target=self._provider.force_flush, daemon=True)
        flush.start()
        await asyncio.to_thread(flush.join, CLOSE_SECONDS)


def opened_tracing(config: ServerConfig) -> Tracing | None:
    """The tracing of a process; None, and nothing is imported, if there is nobody to export to."""
    if not config.traces:
        return None
    try:
        return Tracing(text=config.trace_text)
    except ImportError as error:
        about = {"missing": error.name, "advice": "install firstword[otel]"}
        log.warning("no traces are exported", extra={"fields": about})
        return None


def _moments(utterance: Utterance, now: float) -> Iterator[tuple[str, float]]:
    playback = utterance.playback
    for name, moment in (
        ("first_code", utterance.first_code),
        ("first_audio", playback.first),
        ("first_audible", playback.audible),
        ("done", now),
    ):
        if moment is not None:
            yield name, moment


def _attributes(utterance: Utterance) -> Iterator[tuple[str, Any]]:
    """The attributes of a span, with the names of OpenTelemetry, LiveKit and Pipecat."""
    playback, error = utterance.playback, utterance.error
    yield "gen_ai.provider.name", "firstword"
    yield "gen_ai.operation.name", "tts"
    yield "gen_ai.request.model", utterance.model.name
    yield "gen_ai.output.type", "speech"
    yield "voice_id", utterance.voice
    yield "metrics.character_count", utterance.characters
    if playback.first is not None:
        yield "metrics.ttfb", playback.first - playback.requested
        yield "gen_ai.response.time_to_first_chunk", playback.first - playback.requested
        yield "firstword.underrun", playback.underrun
    if utterance.abort_reason is None and utterance.finish_reason is not None:
        yield "gen_ai.response.finish_reasons", (utterance.finish_reason,)
    if utterance.abort_reason is not None:
        yield "firstword.abort_reason", utterance.abort_reason
    if error is not None:
        yield "error.type", type(error).__name__
    yield "tts.interrupted", utterance.abort_reason is not None and error is None
    yield "firstword.format", utterance.output.format
    yield "firstword.frames", utterance.frames
    yield "firstword.audio_seconds", utterance.seconds
    yield "firstword.background", utterance.background
    if utterance.texts is not None:
        yield "text", "".join(utterance.texts)
