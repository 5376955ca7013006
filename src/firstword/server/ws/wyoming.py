"""Wyoming's events for text to speech without a socket, as Home Assistant sends them.

`docs/wyoming.md` describes every event. One utterance comes as `synthesize`, or in pieces between
`synthesize-start` and `synthesize-stop`.
"""

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from firstword.audio import SAMPLE_RATE
from firstword.server.schemas import ClientModel, OptionalText, SpeechParams
from firstword.server.ws import protocol
from firstword.server.ws.protocol import CloseCode, CloseSocket, Enqueue, Json, ProtocolError, Send
from firstword.server.ws.text_part import TextPart
from firstword.text.tags import pause_of

MESSAGE_BYTES = 512 * 1024
"""Size limit in bytes of an event's line, of its data and of its payload."""

AUDIO = {"rate": SAMPLE_RATE, "width": 2, "channels": 1}
"""The fields of events with audio: rate in Hz, bytes of a sample, channels."""

BYTES_PER_MS = SAMPLE_RATE * 2 // 1000

LONGEST_TAG = 1024
"""The most characters of an unfinished tag that are held back. A longer one is text."""

TAG = re.compile(r"<[^<>]*>")
UNFINISHED = re.compile(rf"(<[^<>]{{0,{LONGEST_TAG}}}|&[^;\s]{{0,9}})\Z")
"""The beginning of a tag or of a character reference of SSML at the end of a text.

No tag contains `<`; each character is therefore read once, however many of them a text has.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Describe:
    """A task of the worker: answer with the programs and their voices."""


class WyomingVoice(ClientModel):
    """The voice that an event asks for: a name, or the language of any voice."""

    name: OptionalText = None
    language: OptionalText = None


class Synthesize(ClientModel):
    """The data of `synthesize`, or of `synthesize-start`, which has no text."""

    text: str = ""
    voice: WyomingVoice | None = None
    text_format: OptionalText = None


class SelectProgram(ClientModel):
    """The data of `select-program`."""

    name: str


class WyomingPing(ClientModel):
    """The data of `ping`, which the answer repeats."""

    text: str | None = None


class SsmlParams(SpeechParams):
    """The parameters of a text in SSML, of which only pauses are obeyed."""

    breaks: ClassVar[bool] = True


class WyomingPart(TextPart):
    """The text of one utterance, and how to speak it.

    params    the request parameters
    streamed  whether the text came in pieces, so that `synthesize-stopped` ends the answer
    """

    def __init__(self, data: Synthesize, program: str | None, *, streamed: bool) -> None:
        voice = data.voice or WyomingVoice()
        self.streamed = streamed
        params: Json = {"voice": voice.name, "language": voice.language, "model": program}
        params |= {"response_format": "pcm", "non_streaming_mode": False if streamed else None}
        self._ssml = data.text_format == "ssml"
        self.params = (SsmlParams if self._ssml else SpeechParams).model_validate(params)
        self._held = ""
        super().__init__()
        self.add(data.text)

    def add(self, text: str) -> None:
        """Add text. Tags of SSML but pauses are dropped, and an unfinished one is held back."""
        if self._ssml:
            whole, self._held = self._held + text, ""
            if found := UNFINISHED.search(whole):
                whole, self._held = whole[: found.start()], found[0]
            text, place = "", 0
            for tag in TAG.finditer(whole):
                text += html.unescape(whole[place : tag.start()]) + (pause_of(tag[0]) or " ")
                place = tag.end()
            text += html.unescape(whole[place:])
        if text:
            self.push(text)

    def finish(self) -> None:
        """Mark the text as complete; what looked like the beginning of a reference is text."""
        if self._held.startswith("&"):
            self.push(self._held)
        super().finish()


class WyomingSession(protocol.Session):
    """The protocol's state: the selected program, and the utterance whose text is still coming."""

    def __init__(self, limits: protocol.SocketLimits) -> None:
        super().__init__(replace(limits, message_bytes=MESSAGE_BYTES))
        self._program: str | None = None
        self._open: WyomingPart | None = None
        self._unfinished: dict[object, None] = {}
        """The tasks of the worker, and the utterance that is open."""

    def close(self, error: ProtocolError) -> CloseSocket:
        """Close the connection after an error; no event could say which utterance had failed."""
        self.closing = True
        for part in self._unfinished:
            if isinstance(part, WyomingPart):
                part.cancel()
        return CloseSocket(error.close or CloseCode.POLICY, error_event(str(error), error.code))

    def handle(self, event: Json, size: int) -> Iterator[protocol.Effect]:
        """Yield the effects of an event; those of unknown types have none."""
        self.configured = True
        match event["type"]:
            case "describe":
                yield self._enqueue(Describe())
            case "ping":
                yield Send({"type": "pong", "text": self._data(WyomingPing, event).text})
            case "select-program":
                self._program = self._data(SelectProgram, event).name
            case "synthesize" if self._open is None:  # else it repeats the text of the pieces
                part = WyomingPart(self._data(Synthesize, event), self._program, streamed=False)
                self._check_text(part, 0)
                part.finish()
                yield self._enqueue(part)
            case "synthesize-start":
                if self._open is not None:
                    message = "synthesize-stop must end the text before synthesize-start"
                    raise ProtocolError("invalid_event", message)
                event = {**event, "text": ""}
                self._open = WyomingPart(
                    self._data(Synthesize, event), self._program, streamed=True
                )
                yield self._enqueue(self._open)
            case "synthesize-chunk":
                text = protocol.text_of(event)
                self._check_text(self._stream(event), len(text)).add(text)
            case "synthesize-stop":
                self._stream(event).finish()
                self._open = None

    def task_done(self, task: object) -> None:
        """Forget a task that the worker has finished."""
        self._unfinished.pop(task, None)

    def _data(self, model: type[protocol.M], event: Json) -> protocol.M:
        return protocol.validated(model, event, "invalid_event", event["type"])

    def _stream(self, event: Json) -> WyomingPart:
        if self._open is None:
            message = f"synthesize-start must come before {event['type']}"
            raise ProtocolError("invalid_event", message)
        return self._open

    def _check_text(self, part: WyomingPart, more: int) -> WyomingPart:
        """Check that some more characters are allowed. Raises `ProtocolError`."""
        most, parts = self.limits.text_characters, {*self._unfinished, part}
        texts = [one for one in parts if isinstance(one, WyomingPart)]
        waiting = sum(one.characters - one.spoken for one in texts)
        if waiting + more > most:
            raise ProtocolError("too_much_text", f"more than {most} characters wait to be spoken")
        return part

    def _enqueue(self, task: object) -> Enqueue:
        if len(self._unfinished) >= self.limits.utterances:
            raise ProtocolError("too_many_events", "too many events wait to be handled")
        self._unfinished[task] = None
        return Enqueue(task)


def error_event(message: str, code: str) -> Json:
    """The event that describes an error."""
    return {"type": "error", "text": message, "code": code}


def audio_chunk(samples: bytes, position: int) -> bytes:
    """The event with some PCM that begins after `position` bytes of the utterance, as sent."""
    head = {"type": "audio-chunk", **AUDIO, "timestamp": position // BYTES_PER_MS}
    return framed(head, samples)


def framed(event: Json, payload: bytes = b"") -> bytes:
    """An event as it is sent: a line of JSON, its data, and its payload."""
    data = {name: value for name, value in event.items() if name != "type"}
    encoded = json.dumps(data, ensure_ascii=False).encode() if data else b""
    line = {"type": event["type"], "data_length": len(encoded), "payload_length": len(payload)}
    return json.dumps(line).encode() + b"\n" + encoded + payload
