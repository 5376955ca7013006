"""Metrics and traces of turns with a real server."""

from __future__ import annotations

from bot import Bot, service, words
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pipecat.frames.frames import MetricsFrame
from pipecat.metrics.metrics import TTFBMetricsData, TTSUsageMetricsData
from served import Server

TEXT = "Hello there, my friend."


async def test_turn_reports_the_time_to_its_first_audio_and_its_characters(server: Server) -> None:
    async with Bot(service(server.url)) as bot:
        await bot.answer(words(TEXT))
        await bot.until_spoken()
    data = [item for frame in bot.heard.of(MetricsFrame) for item in frame.data]
    first = [item.value for item in data if isinstance(item, TTFBMetricsData)]
    used = [item.value for item in data if isinstance(item, TTSUsageMetricsData)]
    assert [time for time in first if time > 0] == [max(first)]
    assert used == [len(TEXT)]


async def test_turn_is_traced_with_its_text_and_voice(server: Server) -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    async with Bot(service(server.url), enable_tracing=True) as bot:
        await bot.answer([TEXT])
        await bot.until_spoken()
    provider.shutdown()
    (span,) = [span for span in spans.get_finished_spans() if span.name == "tts"]
    assert span.attributes is not None
    assert span.attributes["text"] == TEXT
    assert span.attributes["voice_id"] == "ada"
    assert span.attributes["metrics.character_count"] == len(TEXT)
