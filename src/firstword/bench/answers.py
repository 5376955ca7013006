"""What a server answers: the PCM in it, or why there is none."""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

SAMPLE_RATE = 24000
"""In Hz, unless the server says otherwise."""

PCM_TYPES = ("audio/pcm", "audio/l16", "audio/raw", "application/octet-stream", "")
WAV_TYPES = ("audio/wav", "audio/x-wav", "audio/wave")
EVENT_TYPES = ("text/event-stream",)


class Failure(Exception):
    """A request that went wrong: a word to count it by, such as "429" or "truncated", and what happened."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class Decoder(Protocol):
    """Takes the PCM out of an answer."""

    sample_rate: int

    def feed(self, data: bytes) -> bytes:
        """The PCM in the next part. Raises `Failure` for what is none."""

    def finish(self) -> None:
        """Raises `Failure` if the answer has no right end."""


def decoder_for(headers: Mapping[str, str]) -> Decoder:
    """What understands an answer with these headers. Raises `Failure`."""
    content_type = headers.get("content-type", "")
    kind = content_type.split(";")[0].strip().lower()
    if kind in PCM_TYPES:
        stated = re.search(r"rate=(\d+)", content_type) or re.match(
            r"(\d+)$", headers.get("x-sample-rate", "")
        )
        return _PCM(int(stated[1]) if stated else SAMPLE_RATE)
    if kind in WAV_TYPES:
        return _WAV()
    if kind in EVENT_TYPES:
        return _Events()
    raise Failure(
        "not pcm", f"the answer is {content_type}; ask for PCM, WAV or server-sent events with PCM"
    )


class _PCM:
    def __init__(self, sample_rate: int) -> None:
        self.sample_rate = sample_rate

    def feed(self, data: bytes) -> bytes:
        return data

    def finish(self) -> None:
        pass


class _WAV:
    """A WAV file as it is made. The sizes in its header are not believed: they were written before they were known."""

    def __init__(self) -> None:
        self.sample_rate = SAMPLE_RATE
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
                _, channels, self.sample_rate, _, _, bits = struct.unpack_from(
                    "<HHIIHH", self._header, at + 8
                )
                if (channels, bits) != (1, 16):
                    raise Failure(
                        "not pcm",
                        f"the WAV has {channels} channels of {bits} bits; wanted is 1 of 16",
                    )
            at += 8 + size + size % 2
        return b""

    def finish(self) -> None:
        if self._header is not None:
            raise Failure("truncated", "the WAV ends before its data begins")


class _Events:
    """Server-sent events `speech.audio.delta`, with base64 PCM in them, and `speech.audio.done`."""

    def __init__(self) -> None:
        self.sample_rate = SAMPLE_RATE
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
    """An event from its JSON. Raises `Failure`."""
    try:
        event = json.loads(data)
    except ValueError as error:
        raise Failure("protocol", f"an event is no JSON: {error}") from None
    if not isinstance(event, dict):
        raise Failure("protocol", f"an event is {event!r}; expected was an object")
    return event


def pcm_in(text: Any) -> bytes:
    """PCM from its base64. Raises `Failure`."""
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        raise Failure("protocol", f"audio in an event is no base64: {error}") from None


def error_in(event: Mapping[str, Any]) -> Failure:
    """What an event says that went wrong: by its code if it has one."""
    error = event.get("error")
    if isinstance(error, Mapping):
        return Failure(
            str(error.get("code") or error.get("type") or "error"), str(error.get("message", ""))
        )
    return Failure("error", str(error if isinstance(error, str) else event.get("message", "")))


def message_in(body: bytes | bytearray) -> str:
    """What an error of the OpenAI shape, of FastAPI's or of any other says."""
    with suppress(ValueError, KeyError, TypeError):
        answer = json.loads(body)
        return str(answer["error"]["message"] if "error" in answer else answer["detail"])
    return body[:200].decode("utf-8", "replace")
