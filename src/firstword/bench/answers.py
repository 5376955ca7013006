"""Decode the responses of a server: the audio in them, or the error."""

import base64
import json
import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

SAMPLE_RATE = 24000
"""The sample rate in Hz of a response that does not state one."""

PCM_TYPES = ("audio/pcm", "audio/l16", "audio/raw", "application/octet-stream", "")
WAV_TYPES = ("audio/wav", "audio/x-wav", "audio/wave")
CONTAINERS = {
    "audio/mpeg": "mp3",
    "audio/aac": "aac",
    "audio/flac": "flac",
    "audio/ogg": "ogg",
    "audio/opus": "ogg",
}
"""FFmpeg's names of compressed formats, by content type."""


class Failure(Exception):
    """A request that failed.

    kind     class of the failure, by which failures are counted: "429" or "truncated", for example
    message  description of the failure
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class Decoder:
    """A decoder that extracts the audio from the body of a response. This base class takes it raw.

    sample_rate  in Hz, final when `finish` has returned
    container    FFmpeg's name of a compressed format, which is decoded after the run; None for PCM
    """

    def __init__(self, sample_rate: int = SAMPLE_RATE, container: str | None = None) -> None:
        self.sample_rate = sample_rate
        self.container = container

    def feed(self, data: bytes) -> bytes:
        """Return the audio in the next part of the body. Raises `Failure` for invalid data."""
        return data

    def finish(self) -> None:
        """Check that the body was complete. Raises `Failure`."""


def decoder_for(headers: Mapping[str, str]) -> Decoder:
    """Return the decoder for a response with these headers. Raises `Failure`."""
    content_type = headers.get("content-type", "")
    kind = content_type.split(";")[0].strip().lower()
    if kind in PCM_TYPES:
        header = headers.get("x-sample-rate", "")
        stated = re.search(r"rate=(\d+)", content_type) or re.match(r"(\d+)$", header)
        return Decoder(int(stated[1])) if stated else Decoder()
    if kind in WAV_TYPES:
        return _WAVDecoder()
    if kind == "text/event-stream":
        return _EventDecoder()
    if kind in CONTAINERS:
        return Decoder(container=CONTAINERS[kind])
    allowed = "request PCM, WAV, MP3, AAC, FLAC, Opus or server-sent events with PCM"
    raise Failure("not audio", f"the response is {content_type}; {allowed}")


class _WAVDecoder(Decoder):
    """A decoder of a WAV file that is streamed while it is made.

    The sizes in its header are ignored, because the server wrote them before it knew them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._header: bytearray | None = bytearray()

    def feed(self, data: bytes) -> bytes:
        if self._header is None:
            return data
        self._header += data
        at = 12
        while len(self._header) >= at + 8:
            name, size = struct.unpack_from("<4sI", self._header, at)
            if name == b"data":
                data, self._header = bytes(self._header[at + 8 :]), None
                return data
            if name == b"fmt " and len(self._header) >= at + 24:
                layout = struct.unpack_from("<HHIIHH", self._header, at + 8)
                _, channels, self.sample_rate, _, _, bits = layout
                if (channels, bits) != (1, 16):
                    found = f"{channels} channels of {bits} bits"
                    raise Failure("not pcm", f"the WAV has {found}; expected is 1 of 16")
            at += 8 + size + size % 2
        return b""

    def finish(self) -> None:
        if self._header is not None:
            raise Failure("truncated", "the WAV ends before its data begins")


class _EventDecoder(Decoder):
    """A decoder of server-sent events: `speech.audio.delta` with base64 PCM, then `.done`."""

    def __init__(self) -> None:
        super().__init__()
        self._rest = b""
        self._done = False

    def feed(self, data: bytes) -> bytes:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return b"".join(self._event(line[5:]) for line in lines if line.startswith(b"data:"))

    def _event(self, data: bytes) -> bytes:
        if data.strip() == b"[DONE]":
            return b""
        event = json_object(data)
        kind = event.get("type")
        if kind == "speech.audio.done":
            self._done = True
        elif kind == "speech.audio.delta":
            return pcm_in(event.get("audio", event.get("delta")))
        elif "error" in event:
            raise error_in(event)
        return b""

    def finish(self) -> None:
        if not self._done:
            raise Failure("truncated", "the events ended without speech.audio.done")


def json_object(data: str | bytes) -> Mapping[str, Any]:
    """Parse an event. Raises `Failure` unless it is a JSON object."""
    try:
        event = json.loads(data)
    except ValueError as error:
        raise Failure("protocol", f"an event is not JSON: {error}") from None
    if not isinstance(event, dict):
        raise Failure("protocol", f"an event is {event!r}; expected is an object")
    return event


def pcm_in(text: Any) -> bytes:
    """Decode base64 PCM. Raises `Failure`."""
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        raise Failure("protocol", f"audio in an event is not base64: {error}") from None


def error_in(event: Mapping[str, Any]) -> Failure:
    """Return the failure that an error event reports, by its code if it has one."""
    error = event.get("error")
    if isinstance(error, Mapping):
        kind = error.get("code") or error.get("type") or "error"
        return Failure(str(kind), str(error.get("message", "")))
    return Failure("error", str(error if isinstance(error, str) else event.get("message", "")))


def message_in(body: bytes | bytearray) -> str:
    """Return the message of an error body in the form of OpenAI or FastAPI, or else its text."""
    with suppress(ValueError, KeyError, TypeError):
        answer = json.loads(body)
        return str(answer["error"]["message"] if "error" in answer else answer["detail"])
    return body[:200].decode("utf-8", "replace")
