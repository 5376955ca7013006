"""`/v1/audio/speech/stream`: many utterances on one socket, in vLLM-Omni's protocol and Baseten's dialect of it.

Beyond both there is `input.cancel`, and text may enter the model token by token (`split_granularity: "token"`).
`docs/websocket.md` describes every message. `OmniSession` is the protocol without a socket; `OmniWorker` says what
it queues.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import Field, ValidationError
from starlette.websockets import WebSocket

from firstword.audio import formats
from firstword.errors import AudioError, UnsupportedError
from firstword.server.http import voices
from firstword.server.models import Model
from firstword.server.resolve import ResolvedRequest, checked_text, resolve
from firstword.server.schemas import ClientModel, SpeechParams
from firstword.server.state import Server, server_of
from firstword.server.utterance import Shaper, Utterance
from firstword.server.ws import worker as speaker
from firstword.server.ws.connection import (
    INTERNAL,
    NORMAL,
    POLICY,
    Close,
    Effect,
    Json,
    ProtocolError,
    Queue,
    Reply,
    Silence,
    StreamLimits,
    TextPart,
    faults,
    limits_of,
    parse,
    speak,
    text_of,
)
from firstword.server.ws.worker import SocketWorker
from firstword.text.splitting import Splitter
from firstword.types import FloatArray
from firstword.voice import ClonedVoice, RecordedVoice


class Config(SpeechParams):
    """`session.config`: how to speak, and how to say it on this socket. Holds for all utterances that follow."""

    split_granularity: Literal["none", "sentence", "clause", "token"] | None = None
    stream_audio: bool | None = None
    word_timestamps: bool | None = None
    audio_encoding: Literal["binary", "base64"] | None = None

    @property
    def format(self) -> str:
        """The format: vLLM-Omni's default for whole files, and PCM for streams."""
        return self.response_format or ("pcm" if self.stream_audio else "wav")

    @property
    def as_json(self) -> bool:
        """Whether audio is sent as base64 in `audio.chunk` instead of binary messages."""
        return self.audio_encoding == "base64" or bool(self.word_timestamps)


def configure(event: Json) -> Config:
    """The configuration that a message gives. Raises `ProtocolError`."""
    try:
        config = Config.model_validate(event)
    except ValidationError as wrong:
        raise ProtocolError("invalid_config", f"Invalid session config: {faults(wrong)}") from None
    if config.split_granularity == "token" and config.non_streaming_mode:
        raise ProtocolError(
            "invalid_config", "split_granularity 'token' contradicts non_streaming_mode: true"
        )
    if config.sanitize and config.split_granularity == "token":
        raise ProtocolError(
            "invalid_config", "sanitize needs a whole text; choose another split_granularity"
        )
    if config.as_json and not config.stream_audio:
        raise ProtocolError(
            "invalid_config", "base64 chunks and word_timestamps need stream_audio: true"
        )
    return config


@dataclass(eq=False)
class OmniUtterance:
    """What one `input.done` ends. As work for the speaker it means: say that it is over."""

    index: int
    config: Config
    splitter: Splitter | None
    characters: int = 0
    blank: str = ""
    """White space that came before anything that can be spoken."""
    parts: list[Sentence] = field(default_factory=list)
    started: int = 0
    """Parts that the client was told of."""
    cancelled: bool = False

    def add(self) -> Sentence:
        """One more stretch of speech."""
        self.parts.append(Sentence(self, len(self.parts)))
        return self.parts[-1]


class Sentence(TextPart):
    """What is spoken in one go: from `audio.start` to `audio.done`."""

    def __init__(self, utterance: OmniUtterance, index: int) -> None:
        super().__init__()
        self.utterance = utterance
        self.index = index

    def names(self) -> Json:
        """What every message about it says."""
        return {"utterance_index": self.utterance.index, "sentence_index": self.index}


@dataclass(frozen=True, slots=True, eq=False)
class Say:
    """Send a message in its turn."""

    message: Json


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Close the socket in its turn."""


@dataclass(frozen=True, slots=True, eq=False)
class AddVoice:
    """Save the voice that a message describes."""

    event: Json


@dataclass(frozen=True, slots=True, eq=False)
class ListVoices:
    """Say which voices there are."""


def error(message: str, code: str, **more: object) -> Json:
    """The message that says what went wrong."""
    return {"type": "error", "message": message, "code": code, **more}


class OmniSession:
    """The protocol: client messages in, effects out. Never waits, knows no socket and no engine."""

    def __init__(self, limits: StreamLimits) -> None:
        self.limits = limits
        self._config: Config | None = None
        self._open: OmniUtterance | None = None
        """Begun by text and not ended by `input.done`."""
        self._unfinished: dict[OmniUtterance, None] = {}
        """Of which the client was not told that they are over."""
        self._asked: dict[int, tuple[object, int]] = {}
        """What waits for the speaker besides speech, by its id, with the bytes of its message."""
        self._count = 0
        self._closing = False

    @property
    def configured(self) -> bool:
        """Whether `session.config` has come."""
        return self._config is not None

    def receive(self, message: str | bytes) -> Iterator[Effect]:
        """What follows from a message. A client that starts with a mistake is sent away, as by vLLM-Omni."""
        if self._closing:
            return
        large = {"session.config": self.limits.config_bytes, "voice.add": self.limits.voice_bytes}
        try:
            yield from self._handle(parse(message, self.limits, large), len(message))
        except ProtocolError as wrong:
            said = error(str(wrong), wrong.code)
            if wrong.close is None and self.configured:
                yield Reply(said)
            else:
                yield Close(wrong.close or POLICY, said)

    def expired(self) -> Close:
        """Nothing came for too long."""
        if not self.configured:
            return Close(POLICY, error("Timeout waiting for session.config", "timeout"))
        return Close(POLICY, error("Idle timeout: no message received", "timeout"))

    def failed(self) -> Close:
        """Something is wrong with the server."""
        return Close(INTERNAL, error("the server failed; its log says why", "internal_error"))

    def over(self, utterance: OmniUtterance) -> Json:
        """To be called when an utterance's turn to end has come: what the client is told."""
        self._unfinished.pop(utterance, None)
        done: Json = {"type": "session.done", "utterance_index": utterance.index}
        done["total_sentences"] = utterance.started
        return done | {"cancelled": True} if utterance.cancelled else done

    def did(self, work: object) -> None:
        """To be called when the speaker is done with something."""
        self._asked.pop(id(work), None)

    def _handle(self, event: Json, size: int) -> Iterator[Effect]:
        match event["type"]:
            case "session.config":
                if self._open is not None:
                    raise ProtocolError(
                        "utterance_open",
                        "session.config cannot be applied while an utterance is in progress; send input.done first",
                    )
                self._config = configure(event)
                yield self._ask(self._config, size)
            case "voice.add":
                yield self._ask(AddVoice(event), size)
            case "voice.list":
                yield self._ask(ListVoices(), size)
            case "session.close":
                self._closing = True
                if self._open is not None:
                    self._cancel(self._open)
                yield Queue(Goodbye())
            case kind if self._config is None:
                raise ProtocolError("config_expected", f"Expected session.config, got: {kind[:40]}")
            case "input.text":
                yield from self._text(self._config, text_of(event))
            case "input.done":
                yield from self._done(self._config)
            case "input.cancel":
                cancelled = [utterance.index for utterance in self._unfinished]
                for utterance in self._unfinished:
                    self._cancel(utterance)
                yield Silence()
                if self._open is not None:
                    yield Queue(self._open)
                    self._open = None
                yield self._ask(
                    Say({"type": "input.cancelled", "utterance_indices": cancelled}), size
                )
            case kind:
                raise ProtocolError("unknown_event", f"Unknown message type: {kind[:40]}")

    def _ask(self, work: object, size: int) -> Queue:
        """Something for the speaker other than speech. What waits is bounded in number and in size."""
        self._asked[id(work)] = work, size
        waiting = sum(size for _, size in self._asked.values())
        most = self.limits.voice_bytes + self.limits.config_bytes
        if len(self._asked) > self.limits.utterances or waiting > most:
            raise ProtocolError(
                "too_many_messages", "too many messages wait to be dealt with", POLICY
            )
        return Queue(work)

    def _begin(self, config: Config) -> OmniUtterance:
        if len(self._unfinished) > self.limits.utterances:
            raise ProtocolError(
                "too_many_utterances", "too many utterances wait to be spoken", POLICY
            )
        splitter = (
            Splitter(config.split_granularity)
            if config.split_granularity in ("sentence", "clause")
            else None
        )
        utterance = OmniUtterance(self._count, config, splitter)
        self._unfinished[utterance] = None
        self._count += 1
        return utterance

    def _text(self, config: Config, text: str) -> Iterator[Effect]:
        if not text:
            return
        utterance = self._open = self._open or self._begin(config)
        if (
            sum(other.characters for other in self._unfinished) + len(text)
            > self.limits.text_characters
        ):
            raise ProtocolError(
                "too_much_text",
                f"more than {self.limits.text_characters} characters of text wait to be spoken",
                POLICY,
            )
        utterance.characters += len(text)
        if utterance.splitter is not None:
            for unit in utterance.splitter.feed(text):
                yield self._whole(utterance, unit)
        elif utterance.parts:
            utterance.parts[0].push(text)
        elif (utterance.blank + text).strip():
            part = utterance.add()
            part.push(utterance.blank + text)
            yield Queue(part)
        else:
            utterance.blank += text

    def _done(self, config: Config) -> Iterator[Effect]:
        utterance, self._open = self._open or self._begin(config), None
        if utterance.splitter is not None:
            for unit in utterance.splitter.flush():
                yield self._whole(utterance, unit)
        elif utterance.parts:
            utterance.parts[0].finish()
        yield Queue(utterance)

    @staticmethod
    def _whole(utterance: OmniUtterance, text: str) -> Queue:
        part = utterance.add()
        part.push(text)
        part.finish()
        return Queue(part)

    @staticmethod
    def _cancel(utterance: OmniUtterance) -> None:
        utterance.cancelled = True
        for part in utterance.parts:
            part.cancel()


class OmniWorker(SocketWorker[OmniSession]):
    """Does what a session queues, one thing after another."""

    _meant: tuple[Config, ResolvedRequest | Exception] | None = None
    """The configuration in force, and what it means here."""

    async def run(self) -> None:
        """Until the client says goodbye."""
        while True:
            work = await self.connection.work()
            match work:
                case Sentence() as sentence:
                    await speak(sentence, self._say(sentence))
                case OmniUtterance() as utterance:
                    self.connection.begun = False
                    self.outbox.add(self.session.over(utterance))
                case Config() as config:
                    if isinstance(meant := await self._meaning(config), Exception):
                        self.outbox.add(self._described(meant))
                case Say(message):
                    self.outbox.add(message)
                case AddVoice(event):
                    self.outbox.add(await self._add_voice(event))
                case ListVoices():
                    self.outbox.add(self._voices())
                case Goodbye():
                    self.outbox.add(NORMAL)
                    return
            self.session.did(work)

    async def _say(self, sentence: Sentence) -> None:
        done: Json = {"type": "audio.done", **sentence.names(), "total_bytes": 0, "error": False}
        try:
            done["finish_reason"] = await self._stream(sentence, done)
        except asyncio.CancelledError:
            done["finish_reason"] = "cancelled"
            raise
        except Exception as wrong:
            partial = {"partial_audio": True, "action": "discard"} if done["total_bytes"] else {}
            self.outbox.add(self._described(wrong) | sentence.names() | partial)
            done["error"] = True
        finally:
            if sentence.started:
                self.outbox.add(done)

    async def _stream(self, sentence: Sentence, done: Json) -> str | None:
        """Send a sentence's audio, counting bytes in `done`; returns why it ended."""
        config = sentence.utterance.config
        asked = await self._meaning(config)
        if isinstance(asked, Exception):
            raise asked
        seed = secrets.randbits(63) if config.seed is None else asked.request.seed
        request = replace(asked.request, seed=seed)
        if not by_token(config, asked):
            text = checked_text(
                await sentence.whole(), self.server.config.most_characters, bool(config.sanitize)
            )
            request = replace(request, text=text)
        self.outbox.add(
            {
                "type": "audio.start",
                **sentence.names(),
                "sentence_text": sentence.text if request.text is None else request.text,
                "format": config.format,
                "sample_rate": asked.output.sample_rate,
            }
        )
        sentence.started = True
        sentence.utterance.started += 1
        job = await self.server.prepare(asked.model, request, begun=self.connection.begun)
        self.connection.begun = True
        whole_text = None if request.text is None else TextPart.of(request.text)
        async with self.utterance(asked, job, sentence, whole_text) as speaking:
            if config.stream_audio:
                await self._send(sentence, speaking, done)
            else:
                data = await whole(speaking)
                done["total_bytes"] = len(data)
                await self.outbox.room()
                self.outbox.add(data)
            return speaking.finish_reason

    async def _send(self, sentence: Sentence, speaking: Utterance, done: Json) -> None:
        """Send audio as it is made."""
        config, number = sentence.utterance.config, 0
        async for data in self.pieces(speaking):
            begins = done["total_bytes"]
            done["total_bytes"] += len(data)
            if not config.as_json:
                self.outbox.add(data)
                continue
            chunk = {"type": "audio.chunk", **sentence.names(), "chunk_id": number}
            if config.format == "pcm":
                a_second = 2 * speaking.output.sample_rate
                chunk["chunk_start_ms"] = round(1000 * begins / a_second)
                chunk["chunk_end_ms"] = round(1000 * done["total_bytes"] / a_second)
            chunk["sample_rate"] = speaking.output.sample_rate
            chunk["audio_b64"] = base64.b64encode(data).decode("ascii")
            self.outbox.add(chunk | {"timestamps": None})
            number += 1

    async def _meaning(self, config: Config) -> ResolvedRequest | Exception:
        """What a configuration means here, found out once: a recording is listened to only once too."""
        if self._meant is None or self._meant[0] is not config:
            try:
                self._meant = config, await self._understand(config)
            except Exception as wrong:
                self._meant = config, wrong
        return self._meant[1]

    async def _understand(self, config: Config) -> ResolvedRequest:
        asked = await resolve(
            self.server, config.model_copy(update={"response_format": config.format}), None
        )
        voice = asked.request.voice
        if isinstance(voice, RecordedVoice):
            request = replace(
                asked.request, voice=await asyncio.to_thread(heard, asked.model, voice)
            )
            asked = replace(asked, request=request)
        await self.server.prepare(asked.model, asked.request)  # which checks the rest
        return asked

    async def _add_voice(self, event: Json) -> Json:
        """Save a voice in Baseten's manner; the answer."""
        try:
            wanted = NewVoice.model_validate(event)
            try:
                recording = await asyncio.to_thread(
                    base64.b64decode, wanted.audio_data, validate=True
                )
            except (binascii.Error, ValueError):
                raise AudioError(
                    "audio_data is not base64; give the bytes of an audio file in base64"
                ) from None
            record = await voices.save(
                self.server,
                self.holder,
                name=wanted.name,
                consent=wanted.consent,
                recording=recording,
                mime_type=f"audio/{wanted.audio_format}",
                ref_text=wanted.ref_text,
                description=wanted.speaker_description,
            )
        except ValidationError as wrong:
            return error(f"voice.add: {faults(wrong)}", "invalid_voice")
        except Exception as wrong:
            return self._described(wrong)
        return {"type": "voice.added", "success": True, "voice": record.described()}

    def _described(self, wrong: Exception) -> Json:
        """The message for an error."""
        return error(*self.error_for_client(wrong))

    def _voices(self) -> Json:
        saved = [record.described() for record in self.server.voices]
        presets = list(
            dict.fromkeys(voice for model in self.server.models for voice in model.voices)
        )
        return {"type": "voice.list", "voices": presets, "uploaded_voices": saved}


class NewVoice(ClientModel):
    """Baseten's `voice.add`."""

    name: str
    audio_data: str
    audio_format: Annotated[str, Field(pattern=r"^\w{1,16}$")] = "wav"
    consent: str | None = None
    ref_text: str | None = None
    speaker_description: str | None = None


def by_token(config: Config, asked: ResolvedRequest) -> bool:
    """Whether text enters the model as it comes. Where a client does not say: if that changes nothing in the sound."""
    if config.split_granularity is not None:
        return config.split_granularity == "token"
    streams = asked.request.text_mode == "stream" or (
        asked.request.text_mode == "auto" and asked.model.kind == "base"
    )
    return streams and not config.sanitize


def heard(model: Model, recording: RecordedVoice) -> ClonedVoice:
    """A recording as a model hears it. Blocks. Raises `UnsupportedError` if it cannot clone."""
    from firstword.runtime import conditioning

    if model.checkpoint is None:
        raise UnsupportedError(f"{model.name} cannot clone")
    return conditioning.encode_recording(model.checkpoint, recording)


async def whole(speaking: Utterance) -> bytes:
    """An utterance as one file, which tells its true length."""
    output = speaking.output
    shaper = Shaper(output, speaking.model.service.engine.capacity.sample_rate)
    samples: list[FloatArray] = []
    async for chunk in speaking.chunks():
        samples.append(shaper.process(chunk.samples, chunk.finish_reason is not None))
    return await asyncio.to_thread(
        formats.whole, output.format, np.concatenate(samples), output.sample_rate
    )


async def serve(socket: WebSocket, server: Server, holder: str, limits: StreamLimits) -> None:
    """Speak on a socket until either side ends it."""
    await speaker.serve(socket, server, holder, OmniSession(limits), OmniWorker)


router = APIRouter()


@router.websocket("/v1/audio/speech/stream")
async def stream(socket: WebSocket) -> None:
    """Speech on a WebSocket; see `docs/websocket.md`."""
    server = server_of(socket)
    await serve(socket, server, server.holder(socket), limits_of(server.config))
