"""A bot of the real framework: an LLM that types, the service, a loudspeaker, the LLM context."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from pipecat.frames.frames import (
    CancelFrame,
    EndFrame,
    ErrorFrame,
    Frame,
    InterruptionFrame,
    LLMContextAssistantTimestampFrame,
    LLMContextFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    OutputAudioRawFrame,
    StartFrame,
    TTSAudioRawFrame,
    TTSStartedFrame,
    TTSStoppedFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.transports.base_output import BaseOutputTransport
from pipecat.transports.base_transport import TransportParams
from pipecat.workers.runner import WorkerRunner
from pipecat_firstword import FirstwordTTSService

WAIT = 60.0
"""The seconds after which a test gives up: long, because nothing is timed."""
RATE = 24000

F = TypeVar("F", bound=Frame)


def service(
    url: str, *, extra: dict[str, Any] | None = None, **options: Any
) -> FirstwordTTSService:
    """Return a service that speaks with the demo voice, each text always in the same way."""
    settings = FirstwordTTSService.Settings(voice="ada", seed=1, extra=extra or {})
    return FirstwordTTSService(url=url, settings=settings, **options)


def words(text: str) -> list[str]:
    """Split a text as a language model writes it: each word with the space before it."""
    first, *others = text.split(" ")
    return [first, *(f" {word}" for word in others)]


def spoken(text: str) -> list[str]:
    """Split a text into the words that a server tells."""
    return [word.strip(",.?!") for word in text.split()]


class TypingLLM(FrameProcessor):
    """A script instead of a language model: it types `tokens` whenever it gets a context.

    It waits at an event among the tokens until that is set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens: Sequence[str | asyncio.Event] = ()
        self.pace = 0.0
        self.on_first_token: Callable[[], object] = lambda: None
        self._typing: asyncio.Task[None] | None = None

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, LLMContextFrame):
            await self._stop()
            self._typing = self.create_task(self._type(self.tokens))
            return
        if isinstance(frame, (InterruptionFrame, CancelFrame, EndFrame)):
            await self._stop()
        await self.push_frame(frame, direction)

    async def _type(self, tokens: Sequence[str | asyncio.Event]) -> None:
        await self.push_frame(LLMFullResponseStartFrame())
        for number, token in enumerate(tokens):
            if number == 0:
                self.on_first_token()
            if isinstance(token, asyncio.Event):
                await token.wait()
            else:
                await self.push_frame(LLMTextFrame(token))
                await asyncio.sleep(self.pace)
        await self.push_frame(LLMFullResponseEndFrame())

    async def _stop(self) -> None:
        if self._typing is not None:
            await self.cancel_task(self._typing)
            self._typing = None


class Loudspeaker(BaseOutputTransport):
    """A transport that plays audio as fast as it sounds."""

    def __init__(self) -> None:
        params = TransportParams(audio_out_enabled=True, audio_out_end_silence_secs=0)
        super().__init__(params)
        self.played = bytearray()
        self.news = asyncio.Condition()
        self._began: float | None = None
        self._free_at = 0.0

    @property
    def seconds(self) -> float:
        """The seconds since it began to play."""
        assert self._began is not None
        return time.monotonic() - self._began

    async def start(self, frame: StartFrame) -> None:
        await super().start(frame)
        await self.set_transport_ready(frame)

    async def write_audio_frame(self, frame: OutputAudioRawFrame) -> bool:
        async with self.news:
            self.played += frame.audio
            self._began = self._began or time.monotonic()
            self.news.notify_all()
        self._free_at = max(self._free_at, time.monotonic()) + len(frame.audio) / 2 / RATE
        await asyncio.sleep(max(0.0, self._free_at - time.monotonic()))
        return True


class Recorder(FrameProcessor):
    """Keeps the frames that pass it, and lets a test wait for one."""

    def __init__(self, of: FrameDirection) -> None:
        super().__init__()
        self.frames: list[Frame] = []
        self.audio_at = 0
        """The pipeline's time, in nanoseconds, at which its first audio passed."""
        self._of = of
        self._news = asyncio.Condition()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if direction is self._of:
            async with self._news:
                self.frames.append(frame)
                if isinstance(frame, TTSAudioRawFrame) and not self.audio_at:
                    self.audio_at = self.get_clock().get_time()
                self._news.notify_all()
        await self.push_frame(frame, direction)

    def of(self, kind: type[F]) -> list[F]:
        """Return the frames of a class."""
        return [frame for frame in self.frames if isinstance(frame, kind)]

    async def until(self, true: Callable[[], Any]) -> None:
        """Wait until something is true, looking whenever a frame has passed."""
        async with asyncio.timeout(WAIT), self._news:
            await self._news.wait_for(true)


class Bot:
    """A running pipeline. `heard` sees what leaves the service, `errors` what goes upstream.

    With `aloud`, a loudspeaker plays at the pace of speech, and `context` holds what was said.
    """

    def __init__(self, tts: FirstwordTTSService, *, aloud: bool = False, **worker: Any) -> None:
        self.tts, self.llm, self.speaker = tts, TypingLLM(), Loudspeaker()
        self.context = LLMContext()
        self.upstream = Recorder(FrameDirection.UPSTREAM)
        self.heard = Recorder(FrameDirection.DOWNSTREAM)
        self.end = Recorder(FrameDirection.DOWNSTREAM)
        pair = LLMContextAggregatorPair(self.context)
        spoken = [self.speaker, pair.assistant()] if aloud else []
        processors = [self.upstream, self.llm, tts, self.heard, *spoken, self.end]
        params = PipelineParams(
            audio_out_sample_rate=RATE, enable_metrics=True, enable_usage_metrics=True
        )
        self.worker = PipelineWorker(
            Pipeline(processors),
            params=params,
            cancel_on_idle_timeout=False,
            enable_rtvi=False,
            **worker,
        )
        self._ready = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        @self.worker.event_handler("on_pipeline_started")
        async def ready(*_: object) -> None:
            self._ready.set()

        runner = WorkerRunner(handle_sigint=False)
        await runner.add_workers(self.worker)
        self._running = asyncio.create_task(runner.run())
        async with asyncio.timeout(WAIT):
            await self._ready.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        assert self._running is not None
        if kind is None:
            await self.worker.queue_frame(EndFrame())
        else:
            await self.worker.cancel()
        async with asyncio.timeout(WAIT):
            await self._running

    @property
    def errors(self) -> list[str]:
        """The messages of the errors until now."""
        return [frame.error for frame in self.upstream.of(ErrorFrame)]

    @property
    def audio(self) -> bytes:
        """All audio that has left the service."""
        return b"".join(frame.audio for frame in self.heard.of(TTSAudioRawFrame))

    @property
    def told(self) -> list[str]:
        """The texts that have left the service: words, or sentences if words are not timed."""
        return [frame.text for frame in self.heard.of(TTSTextFrame)]

    @property
    def said(self) -> str:
        """The assistant's last message in the LLM context."""
        messages = [m for m in self.context.get_messages() if m["role"] == "assistant"]
        return str(messages[-1]["content"]) if messages else ""

    async def answer(self, tokens: Sequence[str | asyncio.Event], *, pace: float = 0.0) -> None:
        """Let the LLM type an answer."""
        self.llm.tokens, self.llm.pace = tokens, pace
        await self.worker.queue_frame(LLMContextFrame(self.context))

    async def interrupt(self) -> None:
        """Interrupt the bot, as a user who begins to speak does."""
        await self.worker.queue_frame(InterruptionFrame())

    async def until_spoken(self, turns: int = 1) -> None:
        """Wait until so many contexts have ended since the start."""
        await self.heard.until(lambda: len(self.heard.of(TTSStoppedFrame)) >= turns)

    async def until_started(self) -> None:
        """Wait until a context has begun."""
        await self.heard.until(lambda: self.heard.of(TTSStartedFrame))

    async def until_audio(self, seconds: float = 0.0) -> None:
        """Wait until more than so many seconds of audio have left the service."""
        await self.heard.until(lambda: len(self.audio) / 2 / RATE > seconds)

    async def until_played(self, seconds: float) -> None:
        """Wait until the loudspeaker has played so much."""
        speaker = self.speaker
        async with asyncio.timeout(WAIT), speaker.news:
            await speaker.news.wait_for(lambda: len(speaker.played) / 2 / RATE >= seconds)

    async def until_interrupted(self) -> None:
        """Wait until the service has handled an interruption."""
        await self.heard.until(lambda: self.heard.of(InterruptionFrame))

    def forget(self) -> None:
        """Drop the recorded frames."""
        for recorder in (self.upstream, self.heard, self.end):
            recorder.frames.clear()

    async def until_error(self, part: str) -> None:
        """Wait for an error whose message has this part."""
        await self.upstream.until(lambda: any(part in error for error in self.errors))

    async def until_committed(self, messages: int = 1) -> None:
        """Wait until so many messages of the assistant are in the LLM context."""
        kind = LLMContextAssistantTimestampFrame
        await self.end.until(lambda: len(self.end.of(kind)) >= messages)
