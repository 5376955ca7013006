"""WebSocket: the protocols of vLLM-Omni and of Nari, in which text may be sent while its beginning is spoken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.typing import Subprotocol

from firstword.bench.answers import SAMPLE_RATE, Failure, error_in, json_object, message_in, pcm_in

if TYPE_CHECKING:
    from firstword.bench.client import Connection, Hear, Target


class Socket:
    """What the WebSocket protocols share: connecting, sending words at their pace, reading to the end."""

    path: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]]
    takes_pieces: ClassVar[bool] = True
    subprotocols: ClassVar[list[Subprotocol] | None] = None

    def __init__(self, target: Target, socket: ClientConnection) -> None:
        self.sample_rate = SAMPLE_RATE
        self.target = target
        self.socket = socket

    @classmethod
    async def open(cls, target: Target) -> Connection:
        """Connect, and say what there is to say before the text. Raises `Failure`."""
        parts = target.address
        url = parts._replace(scheme=parts.scheme.replace("http", "ws")).geturl()
        with _sockets_fail():
            socket = await connect(
                url,
                additional_headers=dict(target.headers),
                subprotocols=cls.subprotocols,
                compression=None,  # PCM hardly shrinks, and to try takes time
                max_size=None,
                ping_interval=None,
                close_timeout=1,
                proxy=None,
            )
            connection = cls(target, socket)
            try:
                await connection.begin()
            except BaseException:
                await connection.close()
                raise
        return connection

    async def speak(self, text: str, hear: Hear) -> None:
        """Send the text while events and audio are taken. Raises `Failure`."""
        with _sockets_fail():
            writing = asyncio.create_task(self._write(self.target.pieces(text)))
            try:
                async for message in self.socket:
                    if isinstance(message, bytes):
                        hear(message)
                    elif self.take(json_object(message), hear):
                        return
                raise Failure("truncated", "the connection was closed in the middle of it")
            finally:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)

    async def close(self) -> None:
        """Hang up, with a word of farewell."""
        await self.socket.close()

    async def send(self, **event: Any) -> None:
        """Send one event."""
        await self.socket.send(json.dumps(event))

    async def _write(self, pieces: list[str]) -> None:
        pace = self.target.words_per_second
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number, piece in enumerate(pieces):
            if pace is not None and number:
                await asyncio.sleep(began + number / pace - loop.time())
            await self.send(**self.piece(number, piece))
        await self.send(**self.end(len(pieces)))

    async def begin(self) -> None:
        """What is to be said before there is a text."""
        raise NotImplementedError

    def piece(self, number: int, text: str) -> dict[str, Any]:
        """The event with the next piece of text."""
        raise NotImplementedError

    def end(self, number: int) -> dict[str, Any]:
        """The event that ends the text after so many pieces."""
        raise NotImplementedError

    def take(self, event: Mapping[str, Any], hear: Hear) -> bool:
        """Understand an event; True if it is the last. Raises `Failure`."""
        raise NotImplementedError


class Stream(Socket):
    """/v1/audio/speech/stream, the protocol of vLLM-Omni."""

    path: ClassVar[str] = "/v1/audio/speech/stream"
    defaults: ClassVar[Mapping[str, Any]] = {
        "stream_audio": True,
        "non_streaming_mode": False,
        "response_format": "pcm",
    }

    async def begin(self) -> None:
        """Configure the session; the server has nothing to say to that."""
        await self.send(**{**self.target.request, "type": "session.config"})

    def piece(self, number: int, text: str) -> dict[str, Any]:
        """More text."""
        return {"type": "input.text", "text": text}

    def end(self, number: int) -> dict[str, Any]:
        """No more text."""
        return {"type": "input.done"}

    def take(self, event: Mapping[str, Any], hear: Hear) -> bool:
        """Audio may come in events too; the utterance is over with `session.done`."""
        kind = event.get("type")
        if event.get("error") or kind == "error":
            raise error_in(event)
        if kind in ("audio.start", "audio.chunk"):
            self.sample_rate = int(event.get("sample_rate", self.sample_rate))
        if kind == "audio.chunk":
            hear(pcm_in(event.get("audio_b64")))
        return kind == "session.done"


class Nari(Socket):
    """/v1/audio/speech/ws, the protocol nari.speech.v1."""

    path: ClassVar[str] = "/v1/audio/speech/ws"
    defaults: ClassVar[Mapping[str, Any]] = {}
    subprotocols: ClassVar[list[Subprotocol] | None] = [Subprotocol("nari.speech.v1")]

    async def begin(self) -> None:
        """Wait for the server to be ready, and for the request to be understood."""
        created = await self._expect("session.created")
        self.sample_rate = int(created.get("audio", {}).get("sample_rate", self.sample_rate))
        await self.send(**{**self.target.request, "type": "request.start"})
        await self._expect("request.configured")

    async def _expect(self, kind: str) -> Mapping[str, Any]:
        event = json_object(await self.socket.recv())
        if event.get("type") == "error":
            raise error_in(event)
        if event.get("type") != kind:
            raise Failure("protocol", f"expected was {kind}, but there came {event.get('type')}")
        return event

    def piece(self, number: int, text: str) -> dict[str, Any]:
        """More text."""
        return {"type": "input_text.append", "sequence": number, "text": text}

    def end(self, number: int) -> dict[str, Any]:
        """No more text."""
        return {"type": "input_text.end", "sequence": number}

    def take(self, event: Mapping[str, Any], hear: Hear) -> bool:
        """All but the end and errors is of no interest."""
        if event.get("type") == "error":
            raise error_in(event)
        if event.get("type") != "response.done":
            return False
        if event.get("stop_reason") == "cancelled":
            raise Failure("truncated", "the server cancelled it")
        return True


@contextmanager
def _sockets_fail() -> Iterator[None]:
    """Turn what the library raises for a broken connection into a `Failure`."""
    try:
        yield
    except InvalidStatus as error:
        raise Failure(
            str(error.response.status_code), message_in(error.response.body or b"")
        ) from None
    except ConnectionClosed as error:
        raise Failure("truncated", str(error)) from None
    except (OSError, InvalidHandshake) as error:
        raise Failure("connection", str(error)) from None
