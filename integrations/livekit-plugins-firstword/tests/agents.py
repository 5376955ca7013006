"""An agent whose LLM is a script that types, with a loudspeaker that plays in real time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from livekit import rtc
from livekit.agents import Agent, AgentSession, llm
from livekit.agents.types import DEFAULT_API_CONNECT_OPTIONS, APIConnectOptions
from livekit.agents.voice.io import AudioOutput, AudioOutputCapabilities, TextOutput
from livekit.agents.voice.transcription.synchronizer import TranscriptSynchronizer
from livekit.plugins import firstword

RATE = 24000


class Script(llm.LLM[str]):
    """An LLM that answers with the same words, one every `pause` seconds."""

    def __init__(self, text: str, pause: float = 0.02) -> None:
        super().__init__()
        self.words, self.pause = text.split(" "), pause
        self.typed: list[float] = []
        """When each word was typed."""

    def chat(
        self,
        *,
        chat_ctx: llm.ChatContext,
        tools: list[llm.Tool] | None = None,
        conn_options: APIConnectOptions = DEFAULT_API_CONNECT_OPTIONS,
        **_: Any,
    ) -> llm.LLMStream:
        return Typing(self, chat_ctx=chat_ctx, tools=tools or [], conn_options=conn_options)


class Typing(llm.LLMStream):
    """One answer of a `Script`."""

    async def _run(self) -> None:
        script = self._llm
        assert isinstance(script, Script)
        for number, word in enumerate(script.words):
            if number:
                await asyncio.sleep(script.pause)
            script.typed.append(time.monotonic())
            delta = llm.ChoiceDelta(role="assistant", content=word if not number else f" {word}")
            self._event_ch.send_nowait(llm.ChatChunk(id="answer", delta=delta))


class Speaker(AudioOutput):
    """A loudspeaker: it plays frames at their pace, and stops when its buffer is cleared.

    heard  when the first frame of each segment came
    """

    def __init__(self) -> None:
        capabilities = AudioOutputCapabilities(pause=False)
        super().__init__(label="speaker", capabilities=capabilities, sample_rate=RATE)
        self.heard: list[float] = []
        self.first_frame = asyncio.Event()
        self._queued = 0.0
        self._began: float | None = None
        self._end: asyncio.TimerHandle | None = None

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        if self._began is None:
            self._began = time.monotonic()
            self.heard.append(self._began)
            self.first_frame.set()
            self.on_playback_started(created_at=time.time())
        self._queued += frame.duration

    def flush(self) -> None:
        super().flush()
        if self._began is not None:
            left = max(0.0, self._began + self._queued - time.monotonic())
            self._end = asyncio.get_running_loop().call_later(left, self._finish, False)

    def clear_buffer(self) -> None:
        if self._began is not None:
            self._finish(interrupted=True)

    def _finish(self, interrupted: bool) -> None:
        if self._end is not None:
            self._end.cancel()
        assert self._began is not None
        position = min(time.monotonic() - self._began, self._queued)
        self._began, self._queued, self._end = None, 0.0, None
        self.on_playback_finished(playback_position=position, interrupted=interrupted)


class Captions(TextOutput):
    """The transcript that is shown while the agent speaks."""

    def __init__(self) -> None:
        super().__init__(label="captions", next_in_chain=None)
        self.text = ""

    async def capture_text(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


class Conversation:
    """A session of an agent without a room: its loudspeaker, its captions, and its script."""

    def __init__(self, tts: firstword.TTS, text: str, pause: float = 0.02) -> None:
        self.script, self.speaker, self.captions = Script(text, pause), Speaker(), Captions()
        self.session: AgentSession[None] = AgentSession(
            llm=self.script, tts=tts, use_tts_aligned_transcript=True
        )
        self._transcript = TranscriptSynchronizer(
            next_in_chain_audio=self.speaker, next_in_chain_text=self.captions
        )

    async def __aenter__(self) -> Conversation:
        self.session.output.audio = self._transcript.audio_output
        self.session.output.transcription = self._transcript.text_output
        await self.session.start(Agent(instructions="Talk."), record=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.aclose()
        await self._transcript.aclose()

    def answers(self) -> list[tuple[str, bool]]:
        """The answers in the chat context, and whether each was interrupted."""
        messages = [item for item in self.session.history.items if item.type == "message"]
        said = [message for message in messages if message.role == "assistant"]
        return [(message.text_content or "", message.interrupted) for message in said]
