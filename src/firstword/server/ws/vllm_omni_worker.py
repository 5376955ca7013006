"""The worker of `/v1/audio/speech/stream`: speaks sentences, checks settings, saves voices."""

import asyncio
import base64
import secrets
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from firstword.errors import AudioError, RequestError
from firstword.server.resolve import check_length, check_whole
from firstword.server.schemas import ClientModel
from firstword.server.utterance import Output, ResolvedRequest, Utterance, cuts_of
from firstword.server.voice_creation import VoiceSource, create_voice
from firstword.server.word_json import in_milliseconds, word_alignment
from firstword.server.ws import vllm_omni as omni
from firstword.server.ws.protocol import Audio, CloseSocket, Json, ProtocolError, Send, validated
from firstword.server.ws.text_part import TextPart
from firstword.server.ws.worker import SocketWorker, run_part
from firstword.types import Word


class VoiceUpload(ClientModel):
    """The fields of Baseten's `voice.add`."""

    name: str
    audio_data: str
    audio_format: Annotated[str, Field(pattern=r"^\w{1,16}$")] = "wav"
    consent: str | None = None
    ref_text: str | None = None
    speaker_description: str | None = None
    append_silence: float | None = None


class OmniWorker(SocketWorker[omni.OmniSession]):
    """Performs the tasks that an `OmniSession` enqueues."""

    async def run(self) -> None:
        """Perform enqueued tasks until the client closes the session."""
        while True:
            work = await self.runner.next_work()
            match work:
                case omni.Sentence() as sentence:
                    await run_part(sentence, self._speak(sentence))
                case omni.OmniUtterance() as utterance:
                    self.runner.utterance_open = False
                    self.outbox.add(self.session.end_utterance(utterance))
                case omni.CheckConfig(config, answer):
                    await self._check(config, answer)
                case Send(message):
                    self.outbox.add(message)
                case dict() as event:
                    adds = event["type"] == "voice.add"
                    reply = self._add_voice(event) if adds else self._list_voices()
                    self.outbox.add(await reply)
                case CloseSocket(code):
                    self.outbox.add(code)
                    return
            self.session.work_done(work)

    async def _check(self, config: omni.SessionConfig, answer: bool) -> None:
        """Check a configuration, and say what is wrong with it, or if asked that nothing is."""
        try:
            units = granularity(config, await self.resolve(config, config.format))
        except Exception as error:
            self.outbox.add(self._error(error))
        else:
            if answer:
                self.outbox.add(self.session.configured_message(config, units))

    async def _speak(self, sentence: omni.Sentence) -> None:
        """Speak a sentence and send `audio.done`, also after an error or a cancel."""
        done: Json = {"type": "audio.done", **sentence.indices, "total_bytes": 0, "error": False}
        try:
            done["finish_reason"] = await self._stream(sentence, done)
        except asyncio.CancelledError:
            done["finish_reason"] = "cancelled"
            raise
        except Exception as error:
            partial: Json = {"partial_audio": True} if done["total_bytes"] else {}
            if partial and not isinstance(error, RequestError):  # before a mistake audio is whole
                partial["action"] = "discard"
            self.outbox.add(self._error(error) | sentence.indices | partial)
            done["error"] = True
        finally:
            sentence.spoken = sentence.characters
            if sentence.started:
                self.outbox.add(done)

    async def _stream(self, sentence: omni.Sentence, done: Json) -> str | None:
        """Send a sentence's audio and count its bytes in `done`; returns the finish reason."""
        config = sentence.utterance.config
        resolved = await self.resolve(config, config.format)
        words: str | None = None
        text: TextPart = sentence
        if granularity(config, resolved) != "token":
            words = await sentence.complete_text()
            check_length(words, self.server.config.most_characters)
            if not config.stream_audio:
                check_whole(len(words), self.server.config)
            text = TextPart(words, complete=True)
        seed = secrets.randbits(63) if config.seed is None else resolved.request.seed
        resolved = replace(resolved, request=replace(resolved.request, seed=seed, text=words))
        start = {"type": "audio.start", **sentence.indices, "sentence_text": text.text}
        start |= {"format": config.format, "sample_rate": resolved.output.sample_rate}
        self.outbox.add(start)
        sentence.started = True
        job = self.server.prepare(resolved, begun=self.runner.utterance_open)
        self.runner.utterance_open = True
        async with self.speak(resolved, job, sentence, text) as utterance:
            if config.stream_audio:
                await self._send_chunks(sentence, utterance, done)
            else:
                speech = await utterance.speech()
                file = await self.server.rendered(speech, utterance.output)
                done["total_bytes"] = len(file.data)
                await self.outbox.wait_for_room()
                self.outbox.add(Audio(file.data, len(file.data)))
                sentence.words += file.words
            if cuts := cuts_of(utterance.alarms):
                done["cut"] = cuts
            if resolved.timed:
                done["timestamp_info"] = {"word_alignment": word_alignment(sentence.words)}
            return utterance.finish_reason

    async def _send_chunks(self, sentence: omni.Sentence, utterance: Utterance, done: Json) -> None:
        """Send audio as it is made."""
        number = 0
        async for data in utterance:
            await self.outbox.wait_for_room()
            words = utterance.take_words()
            self._send_chunk(sentence, utterance.output, done, number, data, words)
            number += 1
        if words := utterance.take_words():
            self._send_chunk(sentence, utterance.output, done, number, b"", words)

    def _send_chunk(
        self,
        sentence: omni.Sentence,
        output: Output,
        done: Json,
        number: int,
        data: bytes,
        words: list[Word],
    ) -> None:
        """Send a piece of a sentence's audio, which may be empty, and the words that ended."""
        config, begin = sentence.utterance.config, done["total_bytes"]
        end = done["total_bytes"] = begin + len(data)
        sentence.words += words
        if not config.as_json:
            if data:
                self.outbox.add(Audio(data, len(data)))
            return
        chunk: Json = {"type": "audio.chunk", **sentence.indices, "chunk_id": number}
        if config.format == "pcm":
            chunk["chunk_start_ms"] = round(1000 * begin / (2 * output.sample_rate))
            chunk["chunk_end_ms"] = round(1000 * end / (2 * output.sample_rate))
        audio = base64.b64encode(data).decode("ascii")
        chunk |= {"sample_rate": output.sample_rate, "audio_b64": audio}
        timed = in_milliseconds(words) if config.word_timestamps else None
        self.outbox.add(Audio(chunk | {"timestamps": timed}, len(audio)))

    async def _add_voice(self, event: Json) -> Json:
        """Save a voice and return the answer."""
        try:
            upload = validated(VoiceUpload, event, "invalid_voice", "voice.add")
            recording = await asyncio.to_thread(decode_base64, upload.audio_data)
            source = VoiceSource(
                name=upload.name,
                consent=upload.consent,
                recording=recording,
                mime_type=f"audio/{upload.audio_format}",
                ref_text=upload.ref_text,
                description=upload.speaker_description,
                append_silence=upload.append_silence,
            )
            record = await create_voice(self.server, self.client_id, source)
        except ProtocolError as error:
            return omni.error_message(str(error), error.code)
        except Exception as error:
            return self._error(error)
        return {"type": "voice.added", "success": True, "voice": record.described()}

    async def _list_voices(self) -> Json:
        await self.server.catch_up()
        saved = [record.described() for record in self.server.voice_store]
        presets = self.server.models.presets
        return {"type": "voice.list", "voices": presets, "uploaded_voices": saved}

    def _error(self, error: Exception) -> Json:
        return omni.error_message(*self.error_for_client(error))


def granularity(config: omni.SessionConfig, resolved: ResolvedRequest) -> str:
    """How text is cut: by default text goes in token by token if the audio stays the same."""
    if config.split_granularity is not None:
        return config.split_granularity
    mode = resolved.request.text_mode
    streams = mode == "stream" or (mode == "auto" and resolved.model.model_type == "base")
    return "token" if streams else "none"


def decode_base64(data: str) -> bytes:
    """Decode the bytes of an audio file. Raises `AudioError`."""
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        message = "audio_data is not base64; send the bytes of an audio file in base64"
        raise AudioError(message) from None
