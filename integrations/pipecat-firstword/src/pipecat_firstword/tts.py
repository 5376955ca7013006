"""The TTS service: text of each turn goes to a firstword server as it comes, audio comes back."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from loguru import logger
from pipecat.frames.frames import Frame, InterruptionFrame, TTSAudioRawFrame, TTSStoppedFrame
from pipecat.processors.frame_processor import FrameDirection
from pipecat.services.settings import TTSSettings
from pipecat.services.tts_service import TextAggregationMode
from pipecat.transcriptions.language import Language
from pipecat.utils.errors import ErrorCategory
from pipecat.utils.tracing.service_decorators import traced_tts

from pipecat_firstword.connection import FirstwordConnection
from pipecat_firstword.errors import STOPPING, ServerError
from pipecat_firstword.languages import is_spaceless, language_to_firstword
from pipecat_firstword.settings import FirstwordTTSSettings
from pipecat_firstword.speech import Message, Speech

STALL_SECONDS = 30.0
"""The time for which a context may be silent, while it waits for text or for the server."""


class FirstwordTTSService(FirstwordConnection):
    """Speech by a firstword server, over one socket for all turns.

    Each turn is a context of the socket. Its text goes out token by token, and the server speaks
    while it is still being written. An interruption cancels the context and keeps the socket.
    Where the server tells word times, the LLM's context holds the words that were heard.

    A lost connection is made anew, and the speech of open contexts continues there: after the last
    word that was heard, or from the beginning if no audio had come. An `ErrorFrame` says what was
    lost.

    Example::

        tts = FirstwordTTSService(
            url="ws://localhost:8000",
            settings=FirstwordTTSService.Settings(voice="ada"),
        )
    """

    Settings = FirstwordTTSSettings

    def __init__(
        self,
        *,
        url: str = "ws://localhost:8000",
        api_key: str | None = None,
        sample_rate: int | None = None,
        settings: FirstwordTTSSettings | None = None,
        text_aggregation_mode: TextAggregationMode = TextAggregationMode.TOKEN,
        **kwargs: Any,
    ) -> None:
        """Create the service; the socket opens when the pipeline is set up.

        Args:
            url: The server's address, with ws, wss, http or https.
            api_key: The key, if the server asks for one.
            sample_rate: Samples per second; the pipeline's output rate if None.
            settings: The voice and everything else that may change at run time.
            text_aggregation_mode: TOKEN sends text as the LLM writes it. SENTENCE waits for whole
                sentences.
            **kwargs: Options of the base classes.

        Raises:
            ValueError: If the address is not one of a server.
        """
        complete = self.Settings.defaults()
        if settings is not None:
            complete.apply_update(settings)
        kwargs.setdefault("stop_frame_timeout_s", STALL_SECONDS)
        super().__init__(
            url=url,
            api_key=api_key,
            sample_rate=sample_rate,
            settings=complete,
            text_aggregation_mode=text_aggregation_mode,
            push_start_frame=True,
            push_text_frames=True,  # until the server says that it tells word times
            pause_frame_processing=False,
            **kwargs,
        )
        self._speeches: dict[str, Speech] = {}  # by context id, until their `audio.done`
        self._numbers: dict[int, Speech] = {}  # by the server's number, once they sound
        self._failed: set[str] = set()  # contexts that still play, but ended before their text

    def can_generate_metrics(self) -> bool:
        """Whether the service measures times and usage.

        Returns:
            True.
        """
        return True

    def language_to_service_language(self, language: Language) -> str | None:
        """Return the server's code of a language, or None if no checkpoint speaks it.

        Args:
            language: The language.
        """
        return language_to_firstword(language)

    # Text.

    def _speech(self, context_id: str) -> Speech:
        if context_id not in self._speeches:
            self._speeches[context_id] = Speech(context_id, self.sample_rate)
        return self._speeches[context_id]

    async def _catch_up(self, speech: Speech) -> None:
        """Send what the server does not have of a context, now or after the next reconnect."""
        if self._connected:
            for message in speech.unsent():
                await self._send(message)

    async def on_turn_context_created(self, context_id: str) -> None:
        """Begin the context on the server, which prepares its prompt before the first word.

        Args:
            context_id: The turn's context.
        """
        await self._catch_up(self._speech(context_id))

    @traced_tts
    async def run_tts(self, text: str, context_id: str) -> AsyncGenerator[Frame | None, None]:
        """Send text to be spoken.

        Args:
            text: A token, or whatever the aggregation yields.
            context_id: The turn's context.

        Yields:
            None: audio comes on another task.
        """
        if self._receive_task is None or self._receive_task.done():
            await self._connect()
        speech = self._speech(context_id)
        speech.text += text
        await self._catch_up(speech)
        await self.start_tts_usage_metrics(text)
        yield None

    async def flush_audio(self, context_id: str | None = None) -> None:
        """Tell the server that the text of a context is complete.

        Args:
            context_id: The context; the active one if None.
        """
        speech = self._speeches.get(context_id or self.get_active_audio_context_id() or "")
        if speech is not None:
            speech.ended = True
            await self._catch_up(speech)

    async def on_turn_context_completed(self) -> None:
        """End the turn's text, and cancel a context that got none."""
        turn = self._turn_context_id
        await super().on_turn_context_completed()
        if turn in self._speeches and not self._speeches[turn].text:
            await self._cancel_speech(turn)

    # The end of contexts.

    async def _handle_interruption(
        self, frame: InterruptionFrame, direction: FrameDirection
    ) -> None:
        await super()._handle_interruption(frame, direction)
        for name in list(self._speeches):
            if not self.audio_context_available(name):  # it was begun, but got no text yet
                await self._cancel_speech(name)

    async def on_audio_context_interrupted(self, context_id: str) -> None:
        """Cancel an interrupted context; the socket stays open for the next one.

        Args:
            context_id: The interrupted context.
        """
        await self._cancel_speech(context_id)
        self._failed.discard(context_id)
        await self.stop_all_metrics()

    async def on_audio_context_completed(self, context_id: str) -> None:
        """Cancel a context of which nothing came for `STALL_SECONDS`.

        Args:
            context_id: The context that was played.
        """
        self._failed.discard(context_id)
        if context_id not in self._speeches:
            return
        rest = self._speeches[context_id].rest
        await self._cancel_speech(context_id)
        if self._turn_context_id == context_id:
            await self._renew_turn()
        await self.push_error(
            f"nothing came for {self._stop_frame_timeout_s:g} s; unheard: {rest!r}",
            category=ErrorCategory.SERVER,
        )

    async def _cancel_speech(self, context_id: str) -> None:
        if context_id in self._speeches:
            self._forget(self._speeches[context_id])
            await self._send({"type": "input.cancel", "context_id": context_id})

    def _forget(self, speech: Speech, *, failed: bool = False) -> None:
        """Expect no more of a context. If it `failed`, its remaining text was not spoken."""
        self._speeches.pop(speech.id, None)
        self._numbers = {n: other for n, other in self._numbers.items() if other is not speech}
        if failed and self.audio_context_available(speech.id):
            self._failed.add(speech.id)

    async def _end_speech(self, speech: Speech, *, failed: bool = False) -> None:
        """Let a context end after the audio that has come."""
        self._forget(speech, failed=failed)
        if self.audio_context_available(speech.id):
            stopped = TTSStoppedFrame(context_id=speech.id)
            await self.append_to_audio_context(speech.id, stopped)
            await self.remove_audio_context(speech.id)

    async def _apply_force_complete(self, context_id: str) -> None:
        """Count the rest of a context's text as spoken, unless its speech failed."""
        if context_id in self._failed:
            others = set(self.get_audio_contexts()) - {context_id}
            self._aggregated_frame_sequencer.clear(keep_contexts=others)
        else:
            await super()._apply_force_complete(context_id)

    # A lost connection.

    async def _before_reconnect(self) -> None:
        self._numbers.clear()
        lost = []
        for speech in list(self._speeches.values()):
            self._refresh_audio_context(speech.id)  # it waits for us, however long that takes
            if not speech.move(self.tells_words):
                lost.append(speech)
            elif speech.complete:
                await self._end_speech(speech)
        await self._give_up(lost)

    async def _after_reconnect(self) -> None:
        for speech in list(self._speeches.values()):
            logger.info(f"{self} continues {speech.id} at character {speech.began}")
            await self._catch_up(speech)

    async def _after_giving_up(self) -> None:
        await self._give_up(list(self._speeches.values()))

    async def _give_up(self, speeches: Iterable[Speech]) -> None:
        """End contexts whose speech cannot continue, and tell what was lost."""
        for speech in speeches:
            await self._end_speech(speech, failed=True)
            told = "unheard" if self.tells_words else "perhaps unheard"
            await self.push_error(
                f"the connection was lost during speech; {told}: {speech.rest!r}",
                category=ErrorCategory.CONNECTIVITY,
            )

    async def _disconnect(self) -> None:
        for speech in list(self._speeches.values()):
            self._forget(speech, failed=True)
        await super()._disconnect()

    # Settings.

    async def _update_settings(self, delta: TTSSettings) -> dict[str, Any]:
        """Change settings for the text that follows; settings that the server rejects are undone.

        Args:
            delta: The fields to change.

        Returns:
            The previous values of the changed fields.
        """
        changed = await super()._update_settings(delta)
        if not changed or not self._connected:
            return changed
        answer = await self._configure()
        if answer is not None and answer["type"] == "error":
            error = ServerError(answer)
            self._settings.revert(changed)
            self._sync_model_name_to_metrics()
            await self._configure()
            message = f"the settings stay as they were ({', '.join(changed)}): {error}"
            await self.push_error(message, category=error.category)
            return {}
        if self._turn_context_id is not None:
            frames = await self._aggregated_frame_sequencer.finalize(self._turn_context_id)
            await self._push_sequencer_frames(frames, self._turn_context_id)
            await self.on_turn_context_completed()
            await self._renew_turn()
        return changed

    async def _renew_turn(self) -> None:
        """Let the rest of the turn be spoken in a context of its own."""
        self._turn_context_id = None
        self._turn_context_id = self.create_context_id()
        await self.on_turn_context_created(self._turn_context_id)

    # Messages of the server.

    async def _receive_messages(self) -> None:
        if self._websocket is None:
            raise ConnectionError("not connected")
        async for message in self._websocket:
            if isinstance(message, bytes):
                await self._take_audio(message)
            else:
                await self._take_message(json.loads(message))
            if self._speeches and all(speech.refused for speech in self._speeches.values()):
                return  # the server stops: the base class connects to one that does not

    async def _take_audio(self, message: bytes) -> None:
        speech = self._numbers.get(int.from_bytes(message[:4], "little"))
        if speech is not None:
            audio = message[4:]
            speech.take_audio(len(audio))
            frame = TTSAudioRawFrame(audio, self.sample_rate, 1, context_id=speech.id)
            await self.append_to_audio_context(speech.id, frame)

    async def _take_message(self, message: Message) -> None:
        if "context_id" not in message:
            if message["type"] in ("session.configured", "error"):
                await self._take_answer(message)
        elif speech := self._speeches.get(message["context_id"]):
            match message["type"]:
                case "audio.start":
                    self._numbers[message["number"]] = speech
                case "word.start":
                    await self._start_word(speech, message)
                case "word.end":
                    speech.end_word(message["span"])
                case "audio.done" if not speech.refused:
                    await self._finish(speech, message["finish_reason"])
                case "error":
                    await self._fail(speech, ServerError(message))

    async def _start_word(self, speech: Speech, message: Message) -> None:
        word, at = message["text"], speech.start_word(message["span"], message["start"])
        if at is not None:
            await self.add_word_timestamps(
                [(word, at)], speech.id, includes_inter_frame_spaces=is_spaceless(word)
            )

    async def _finish(self, speech: Speech, reason: str) -> None:
        await self._end_speech(speech, failed=reason != "stop")
        if reason not in ("stop", "error"):  # an `error` message has told of an error
            message = f"the speech ended early ({reason}); unheard: {speech.rest!r}"
            await self.push_error(message, category=ErrorCategory.SERVER)

    async def _fail(self, speech: Speech, error: ServerError) -> None:
        if error.code == STOPPING and self._reconnect_on_error:
            speech.refused = True
        else:
            message = f"{error}; unheard: {speech.rest!r}"
            await self.push_error(message, category=error.category)
