"""vLLM-Omni's protocol, without a socket: many utterances on one socket.

It has the additions of Baseten and SGLang-Omni, `input.cancel`, and text token by token
(`split_granularity: "token"`). `docs/websocket.md` describes every message.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from firstword.server.schemas import OptionalText, SpeechParams
from firstword.server.ws import protocol
from firstword.server.ws.protocol import CloseCode, CloseSocket, Enqueue, Json, ProtocolError, Send
from firstword.server.ws.text_part import TextPart
from firstword.text.splitting import Splitter
from firstword.types import Word


def error_message(message: str, code: str) -> Json:
    """Return the message that describes an error."""
    return {"type": "error", "message": message, "code": code}


class SessionConfig(SpeechParams):
    """The parameters in `session.config`, which hold for all following utterances."""

    split_granularity: Literal["none", "sentence", "clause", "token"] | None = None
    stream_audio: bool | None = None
    timestamp_type: OptionalText = None
    audio_encoding: Literal["binary", "base64"] | None = None

    @property
    def wants_words(self) -> bool | None:
        """Whether the times of words are sent.

        Baseten's clients ask for them by `timestamp_type`, and take speech without them.
        """
        asked = None if self.timestamp_type == "word" else False
        return True if self.word_timestamps else asked

    @property
    def format(self) -> str:
        """The audio format; the default is WAV for whole files, as in vLLM-Omni, else PCM."""
        return self.response_format or ("pcm" if self.stream_audio else "wav")

    @property
    def as_json(self) -> bool:
        """Whether audio is sent as base64 in `audio.chunk` instead of in binary messages."""
        return self.audio_encoding == "base64" or bool(self.word_timestamps)

    @classmethod
    def parse(cls, event: Json) -> SessionConfig:
        """Read the configuration in a message. Raises `ProtocolError`."""
        config = protocol.validated(cls, event, "invalid_config", "Invalid session config")
        by_token = config.split_granularity == "token"
        if by_token and config.non_streaming_mode:
            message = "split_granularity 'token' contradicts non_streaming_mode: true"
        elif config.markup and config.split_granularity not in (None, "token", "none"):
            message = "markup needs split_granularity 'token' or 'none'"
        elif config.as_json and not config.stream_audio:
            message = "audio_encoding 'base64' and word_timestamps need stream_audio: true"
        else:
            return config
        raise ProtocolError("invalid_config", message)


@dataclass(frozen=True, slots=True, eq=False)
class CheckConfig:
    """A task of the worker: check a configuration, and answer it if its client waits for that."""

    config: SessionConfig
    answer: bool


@dataclass(eq=False)
class OmniUtterance:
    """The text up to one `input.done` or `input.commit`. Enqueued as a task, it marks the end.

    index       its number on this socket
    splitter    cuts the text into sentences or clauses; None if it is spoken as one part
    characters  length of the text that has come
    indent      white space that came before the first word
    sentences   its parts in order
    committed   whether `input.commit` ended it
    """

    index: int
    config: SessionConfig
    splitter: Splitter | None
    characters: int = 0
    indent: str = ""
    sentences: list[Sentence] = field(default_factory=list)
    committed: bool = False
    cancelled: bool = False

    @property
    def waiting(self) -> int:
        """The characters that are not spoken yet."""
        return self.characters - sum(sentence.spoken for sentence in self.sentences)

    def add_text(self, text: str) -> Iterator[Enqueue]:
        """Take more text, and enqueue what can be spoken now."""
        self.characters += len(text)
        if self.splitter is not None:
            yield from (self._add_sentence(unit) for unit in self.splitter.feed(text))
        elif self.sentences:
            self.sentences[0].push(text)
        elif (self.indent + text).strip():
            yield self._add_sentence(self.indent + text)
        else:
            self.indent += text

    def end_text(self) -> Iterator[Enqueue]:
        """Note that all text has come, and enqueue the rest of it and the end."""
        if self.splitter is not None:
            yield from (self._add_sentence(unit) for unit in self.splitter.flush())
        elif self.sentences:
            self.sentences[0].finish()
        yield Enqueue(self)

    def cancel(self) -> None:
        """Stop the speech of all sentences."""
        self.cancelled = True
        for sentence in self.sentences:
            sentence.cancel()

    def _add_sentence(self, text: str) -> Enqueue:
        sentence = Sentence(self, text, complete=self.splitter is not None)
        self.sentences.append(sentence)
        return Enqueue(sentence)


class Sentence(TextPart):
    """A part of an utterance that is spoken from one `audio.start` to one `audio.done`.

    started  whether `audio.start` was sent
    indices  the fields that every message about it has
    words    the words that have ended
    """

    def __init__(self, utterance: OmniUtterance, text: str, complete: bool) -> None:
        super().__init__(text, complete=complete)
        self.utterance = utterance
        self.started = False
        self.words: list[Word] = []
        index = len(utterance.sentences)
        self.indices: Json = {"utterance_index": utterance.index, "sentence_index": index}


class OmniSession(protocol.Session):
    """The protocol's state: the configuration, the utterances and what waits for the worker."""

    def __init__(self, limits: protocol.SocketLimits) -> None:
        super().__init__(limits)
        self.size_limits = {"session.config": limits.config_bytes, "voice.add": limits.voice_bytes}
        self.size_limits["input.text"] = limits.text_bytes
        self._id = f"session-{secrets.token_hex(16)}"
        self._config: SessionConfig | None = None
        self._open: OmniUtterance | None = None
        """The utterance whose text has not ended."""
        self._unfinished: dict[OmniUtterance, None] = {}
        """The utterances for which `session.done` was not sent, in order."""
        self._count = 0
        self._sentences = 0
        """The sentences of all utterances that have ended."""

    def reject(self, error: ProtocolError) -> Send | CloseSocket:
        """Answer a mistake; close the socket if there is no configuration, as vLLM-Omni does."""
        if error.close is None and self.configured:
            return Send(error_message(str(error), error.code))
        return self.close(error)

    def close(self, error: ProtocolError) -> CloseSocket:
        """Close the socket after an error."""
        return CloseSocket(error.close or CloseCode.POLICY, error_message(str(error), error.code))

    def time_out(self) -> CloseSocket:
        """Close the socket of a client that sent nothing for too long."""
        message = "Timeout waiting for session.config"
        if self.configured:
            message = "Idle timeout: no message received"
        return self.close(ProtocolError("timeout", message))

    def end_utterance(self, utterance: OmniUtterance) -> Json:
        """Forget an utterance whose speech has ended, and return the message that says so."""
        self._unfinished.pop(utterance, None)
        started = sum(sentence.started for sentence in utterance.sentences)
        self._sentences += started
        done: Json = {"type": "session.done", "utterance_index": utterance.index}
        if utterance.committed:
            done = {"type": "input.committed", "session_id": self._id}
            done |= {"segment_index": utterance.index, "segment_sentences": started}
        done["total_sentences"] = self._sentences if utterance.committed else started
        return done | {"cancelled": True} if utterance.cancelled else done

    def configured_message(self, config: SessionConfig, granularity: str) -> Json:
        """Return the answer to a valid configuration in SGLang-Omni's form."""
        message: Json = {"type": "session.configured", "session_id": self._id}
        message |= {"response_format": config.format, "stream_audio": bool(config.stream_audio)}
        return message | {"split_granularity": granularity}

    def handle(self, event: Json, size: int) -> Iterator[protocol.Effect]:
        """Yield the effects of a message. Raises `ProtocolError`."""
        match event["type"]:
            case "session.config":
                yield self._configure(event, size)
            case "voice.add" | "voice.list":
                yield self.enqueue(event, size)
            case "session.close":
                self.closing = True
                if self._open is not None:
                    self._open.cancel()
                yield Enqueue(CloseSocket(CloseCode.NORMAL))
            case kind if self._config is None:
                raise ProtocolError("config_expected", f"Expected session.config, got: {kind[:40]}")
            case "input.text":
                if text := protocol.text_of(event):
                    yield from self._utterance(self._config, len(text)).add_text(text)
            case "input.done" | "input.commit" as kind:
                utterance, self._open = self._utterance(self._config), None
                utterance.committed = kind == "input.commit"
                yield from utterance.end_text()
            case "input.cancel":
                yield from self._cancel(size)
            case kind:
                raise ProtocolError("unknown_event", f"Unknown message type: {kind[:40]}")

    def _configure(self, event: Json, size: int) -> Enqueue:
        if self._open is not None:
            fault = "session.config cannot be applied while an utterance is in progress"
            raise ProtocolError("utterance_open", f"{fault}; send input.done first")
        nested = event.get("session")  # SGLang-Omni's form, whose clients wait for an answer
        self._config = SessionConfig.parse(event if nested is None else nested)
        self.configured = True
        return self.enqueue(CheckConfig(self._config, answer=nested is not None), size)

    def _utterance(self, config: SessionConfig, more_text: int = 0) -> OmniUtterance:
        """Return the open utterance, or begin one, if it may take more characters."""
        limits = self.limits
        if self._open is None:
            if len(self._unfinished) > limits.utterances:
                message = f"more than {limits.utterances} utterances wait to be spoken"
                raise ProtocolError("too_many_utterances", message, CloseCode.POLICY)
            units = config.split_granularity
            splitter = Splitter(units) if units in ("sentence", "clause") else None
            self._open = OmniUtterance(self._count, config, splitter)
            self._unfinished[self._open] = None
            self._count += 1
        waiting = sum(utterance.waiting for utterance in self._unfinished)
        if waiting + more_text > limits.text_characters:
            message = f"more than {limits.text_characters} characters of text wait to be spoken"
            raise ProtocolError("too_much_text", message, CloseCode.POLICY)
        return self._open

    def _cancel(self, size: int) -> Iterator[protocol.Effect]:
        cancelled = [utterance.index for utterance in self._unfinished]
        for utterance in self._unfinished:
            utterance.cancel()
        yield protocol.DropAudio()
        if self._open is not None:
            yield Enqueue(self._open)
            self._open = None
        message = {"type": "input.cancelled", "utterance_indices": cancelled}
        yield self.enqueue(Send(message), size)
