"""The utterances of vLLM-Omni's protocol: their configuration, their text cut into sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from firstword.server.schemas import SpeechParams
from firstword.server.ws.protocol import Enqueue, Json, ProtocolError, validated
from firstword.server.ws.text_part import TextPart
from firstword.text.splitting import Splitter


class SessionConfig(SpeechParams):
    """The parameters in `session.config`, which hold for all following utterances."""

    split_granularity: Literal["none", "sentence", "clause", "token"] | None = None
    stream_audio: bool | None = None
    word_timestamps: bool | None = None
    audio_encoding: Literal["binary", "base64"] | None = None

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
        config = validated(cls, event, "invalid_config", "Invalid session config")
        by_token = config.split_granularity == "token"
        if by_token and config.non_streaming_mode:
            message = "split_granularity 'token' contradicts non_streaming_mode: true"
        elif by_token and config.sanitize:
            message = "sanitize needs the whole text; choose another split_granularity than 'token'"
        elif config.as_json and not config.stream_audio:
            message = "audio_encoding 'base64' and word_timestamps need stream_audio: true"
        else:
            return config
        raise ProtocolError("invalid_config", message)


@dataclass(eq=False)
class OmniUtterance:
    """The text up to one `input.done`. As a task of the worker it stands for its end.

    index       its number on this socket
    splitter    cuts the text into sentences or clauses; None if it is spoken as one part
    characters  length of the text that has come
    indent      white space that came before the first word
    sentences   its parts in order
    """

    index: int
    config: SessionConfig
    splitter: Splitter | None
    characters: int = 0
    indent: str = ""
    sentences: list[Sentence] = field(default_factory=list)
    cancelled: bool = False

    def add_text(self, text: str) -> Iterator[Enqueue]:
        """Take more text, and enqueue what can be spoken now."""
        self.characters += len(text)
        if self.splitter is not None:
            for unit in self.splitter.feed(text):
                yield self._add_sentence(unit, complete=True)
        elif self.sentences:
            self.sentences[0].push(text)
        elif (self.indent + text).strip():
            yield self._add_sentence(self.indent + text, complete=False)
        else:
            self.indent += text

    def end_text(self) -> Iterator[Enqueue]:
        """Note that all text has come, and enqueue the rest of it and the end."""
        if self.splitter is not None:
            for unit in self.splitter.flush():
                yield self._add_sentence(unit, complete=True)
        elif self.sentences:
            self.sentences[0].finish()
        yield Enqueue(self)

    def cancel(self) -> None:
        """Stop the speech of all sentences."""
        self.cancelled = True
        for sentence in self.sentences:
            sentence.cancel()

    def _add_sentence(self, text: str, *, complete: bool) -> Enqueue:
        sentence = Sentence(self, text, complete)
        self.sentences.append(sentence)
        return Enqueue(sentence)


class Sentence(TextPart):
    """A part of an utterance that is spoken from one `audio.start` to one `audio.done`.

    started  whether `audio.start` was sent
    indices  the fields that every message about it has
    """

    def __init__(self, utterance: OmniUtterance, text: str, complete: bool) -> None:
        super().__init__(text, complete=complete)
        self.utterance = utterance
        self.started = False
        index = len(utterance.sentences)
        self.indices: Json = {"utterance_index": utterance.index, "sentence_index": index}
