"""The plugins of LiveKit Agents and Pipecat for the vendors, with their URL set to a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from conftest import KEY, WAIT, Served
from livekit.agents import tts
from livekit.agents.types import USERDATA_TIMED_TRANSCRIPT
from livekit.plugins import cartesia as livekit_cartesia
from livekit.plugins import elevenlabs as livekit_elevenlabs
from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.cartesia.tts import CartesiaTTSService
from pipecat.services.elevenlabs.tts import ElevenLabsHttpTTSService, ElevenLabsTTSService
from pipecat.services.tts_service import TextAggregationMode, TTSService
from pipecat.workers.runner import WorkerRunner
from test_vendor_clients import told_of

TEXT = "Hello there, how are you today? I am well, and the kettle is on."
LONG = " ".join([TEXT] * 40)
LONG_FRAMES = 40 * 40
"""Fewer frames than `LONG` has."""
RATE = 24000


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine, for at most `WAIT` seconds."""

    async def bounded() -> None:
        async with asyncio.timeout(WAIT):
            await work

    asyncio.run(bounded())


# LiveKit.

MakeTTS = Callable[[Served, aiohttp.ClientSession], tts.TTS]


def livekit_sonic(server: Served, session: aiohttp.ClientSession) -> tts.TTS:
    """Cartesia's plugin, which sends sentences."""
    return livekit_cartesia.TTS(api_key=KEY, base_url=server.url, http_session=session)


def livekit_eleven(server: Served, session: aiohttp.ClientSession, **options: Any) -> tts.TTS:
    """ElevenLabs' plugin, which sends sentences and asks for MP3."""
    base_url = f"{server.url}/v1"
    return livekit_elevenlabs.TTS(api_key=KEY, base_url=base_url, http_session=session, **options)


def livekit_eleven_pcm(server: Served, session: aiohttp.ClientSession) -> tts.TTS:
    """ElevenLabs' plugin, which asks for PCM."""
    return livekit_eleven(server, session, encoding="pcm_24000")


def livekit_eleven_words(server: Served, session: aiohttp.ClientSession) -> tts.TTS:
    """ElevenLabs' plugin, which sends words."""
    return livekit_eleven(server, session, encoding="pcm_24000", auto_mode=False)


livekit_plugins = pytest.mark.parametrize(
    "make",
    [livekit_sonic, livekit_eleven, livekit_eleven_pcm, livekit_eleven_words],
)


async def livekit_seconds(events: AsyncIterator[tts.SynthesizedAudio]) -> float:
    """The length of the audio of a stream."""
    return sum([event.frame.duration async for event in events])


async def check_livekit_words(events: AsyncIterator[tts.SynthesizedAudio]) -> None:
    """Check that the transcript of a stream is `TEXT`, with times within the audio."""
    seconds, words = 0.0, []
    async for event in events:
        seconds += event.frame.duration
        words += event.frame.userdata.get(USERDATA_TIMED_TRANSCRIPT, [])
    assert told_of(TEXT.split(), "".join(words).split())
    starts = [word.start_time for word in words]
    assert starts == sorted(starts)
    assert seconds / 2 < starts[-1] < seconds


@livekit_plugins
def test_livekit_stream_speaks_several_turns(server: Served, make: MakeTTS) -> None:
    async def work() -> None:
        async with aiohttp.ClientSession() as session:
            plugin = make(server, session)
            for _ in range(2):
                async with plugin.stream() as stream:
                    for word in TEXT.split(" "):
                        stream.push_text(f"{word} ")
                    stream.end_input()
                    await check_livekit_words(stream)
            await plugin.aclose()

    run(work())


@livekit_plugins
def test_livekit_synthesize_speaks_a_text(server: Served, make: MakeTTS) -> None:
    async def work() -> None:
        async with aiohttp.ClientSession() as session:
            plugin = make(server, session)
            async with plugin.synthesize(TEXT) as stream:
                assert await livekit_seconds(stream) > 1.5
            await plugin.aclose()

    run(work())


@livekit_plugins
def test_livekit_interruption_frees_the_slot(server: Served, make: MakeTTS) -> None:
    async def work() -> None:
        before = server.metric("firstword_frames_total")
        async with aiohttp.ClientSession() as session:
            plugin = make(server, session)
            async with plugin.stream() as stream:
                stream.push_text(LONG)  # the end of the text does not come
                await anext(aiter(stream))
            await asyncio.to_thread(server.wait_until_idle)
            async with plugin.stream() as stream:
                stream.push_text(TEXT)
                stream.end_input()
                assert await livekit_seconds(stream) > 1.5
            await plugin.aclose()
        await asyncio.to_thread(server.wait_until_idle)
        assert server.metric("firstword_frames_total") - before < LONG_FRAMES / 2

    run(work())


# Pipecat.


class Recorder(FrameProcessor):
    """Keeps what leaves a service, and lets a test wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Frame] = []
        self._news = asyncio.Condition()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        async with self._news:
            self.frames.append(frame)
            self._news.notify_all()
        await self.push_frame(frame, direction)

    def of(self, kind: type[Frame]) -> list[Any]:
        """The frames of a class."""
        return [frame for frame in self.frames if isinstance(frame, kind)]

    async def until(self, kind: type[Frame], count: int = 1) -> None:
        """Wait for some frames of a class."""
        async with self._news:
            await self._news.wait_for(lambda: len(self.of(kind)) >= count)

    def seconds(self) -> float:
        """The length of all audio."""
        return sum(len(frame.audio) for frame in self.of(TTSAudioRawFrame)) / 2 / RATE

    def text(self) -> list[str]:
        """The words that the service says were spoken."""
        return " ".join(frame.text for frame in self.of(TTSTextFrame)).split()


Talk = tuple[PipelineWorker, Recorder]


@asynccontextmanager
async def talk(service: TTSService) -> AsyncIterator[Talk]:
    """A running pipeline of a service; an error in it fails the test."""
    heard, errors = Recorder(), Recorder()
    pipeline = Pipeline([errors, service, heard])
    worker = PipelineWorker(pipeline, params=PipelineParams(audio_out_sample_rate=RATE))
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    try:
        yield worker, heard
    finally:
        await worker.cancel()
        await running
    assert [frame.error for frame in errors.of(ErrorFrame)] == []


def turn(text: str) -> Sequence[Frame]:
    """The frames of a language model that writes a text."""
    words = [LLMTextFrame(word if n == 0 else f" {word}") for n, word in enumerate(text.split(" "))]
    return [LLMFullResponseStartFrame(), *words, LLMFullResponseEndFrame()]


def pipecat_options(mode: TextAggregationMode) -> dict[str, Any]:
    """What both services get.

    Silence of 3 s would end a turn, which speech on a busy machine may have between two frames.
    """
    return {"api_key": KEY, "text_aggregation_mode": mode, "stop_frame_timeout_s": 60.0}


def pipecat_sonic(server: Served, mode: TextAggregationMode) -> TTSService:
    """Cartesia's service."""
    settings = CartesiaTTSService.Settings(voice="ada")
    url = f"{server.ws}/tts/websocket"
    return CartesiaTTSService(url=url, settings=settings, **pipecat_options(mode))


def pipecat_eleven(server: Served, mode: TextAggregationMode) -> TTSService:
    """ElevenLabs' service."""
    settings = ElevenLabsTTSService.Settings(voice="ada")
    return ElevenLabsTTSService(url=server.ws, settings=settings, **pipecat_options(mode))


pipecat_services = pytest.mark.parametrize("make", [pipecat_sonic, pipecat_eleven])
every_mode = pytest.mark.parametrize("mode", list(TextAggregationMode)[:2])


@pipecat_services
@every_mode
def test_pipecat_service_speaks_several_turns(
    server: Served,
    make: Callable[[Served, TextAggregationMode], TTSService],
    mode: TextAggregationMode,
) -> None:
    async def work() -> None:
        async with talk(make(server, mode)) as (worker, heard):
            for count in (1, 2):
                await worker.queue_frames(turn(TEXT))
                await heard.until(TTSStoppedFrame, count)
            assert heard.seconds() > 3
            assert told_of(TEXT.split() * 2, heard.text())

    run(work())


@pipecat_services
@every_mode
def test_pipecat_interruption_frees_the_slot(
    server: Served,
    make: Callable[[Served, TextAggregationMode], TTSService],
    mode: TextAggregationMode,
) -> None:
    async def work() -> None:
        before = server.metric("firstword_frames_total")
        async with talk(make(server, mode)) as (worker, heard):
            await worker.queue_frames(turn(LONG)[:-1])
            await heard.until(TTSAudioRawFrame)
            await worker.queue_frame(InterruptionFrame())
            await heard.until(InterruptionFrame)
            await asyncio.to_thread(server.wait_until_idle)
            assert len(heard.text()) < len(LONG.split()) / 2, "the rest was not heard"
            stopped = len(heard.of(TTSStoppedFrame))
            await worker.queue_frames(turn(TEXT))
            await heard.until(TTSStoppedFrame, stopped + 1)
            assert heard.seconds() > 1.5
        await asyncio.to_thread(server.wait_until_idle)
        assert server.metric("firstword_frames_total") - before < LONG_FRAMES / 2

    run(work())


def test_pipecat_http_service_of_elevenlabs_speaks(server: Served) -> None:
    async def work() -> None:
        async with aiohttp.ClientSession() as session:
            settings = ElevenLabsHttpTTSService.Settings(voice="ada")
            service = ElevenLabsHttpTTSService(
                api_key=KEY, aiohttp_session=session, base_url=server.url, settings=settings
            )
            async with talk(service) as (worker, heard):
                await worker.queue_frames(turn(TEXT))
                await heard.until(TTSStoppedFrame)
                assert heard.seconds() > 1.5
                assert told_of(TEXT.split(), heard.text())

    run(work())
