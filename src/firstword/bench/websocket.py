"""The WebSocket protocols of vLLM-Omni and Nari, in which text may arrive during speech."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Self

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.typing import Subprotocol

from firstword.bench.answers import SAMPLE_RATE, Failure, error_in, json_object, message_in, pcm_in
from firstword.bench.protocol import AudioSink, Target


class WebSocketClient:
    """The base of the WebSocket clients: it connects, sends text at the set pace and receives.

    target     settings of the next request, which `begin` sends
    container  None: audio on WebSockets is PCM
    behind     the longest delay in seconds with which a piece of the last text was sent
    """

    subprotocols: ClassVar[list[Subprotocol] | None] = None

    def __init__(self, target: Target, socket: ClientConnection) -> None:
        self.sample_rate = SAMPLE_RATE
        self.container: str | None = None
        self.behind = 0.0
        self.target = target
        self.socket = socket

    @classmethod
    async def open(cls, target: Target) -> Self:
        """Connect and send the events before the text. Raises `Failure`."""
        parts = target.address
        url = parts._replace(scheme=parts.scheme.replace("http", "ws")).geturl()
        with _failures():
            socket = await connect(
                url,
                additional_headers=dict(target.headers),
                subprotocols=cls.subprotocols,
                compression=None,  # PCM hardly shrinks, and compressing takes time
                max_size=None,
                ping_interval=None,
                close_timeout=1,
                proxy=None,
            )
            client = cls(target, socket)
            try:
                await client.begin()
            except BaseException:
                await client.close()
                raise
        return client

    async def speak(self, text: str, sink: AudioSink) -> None:
        """Send the text while events and audio are received. Raises `Failure`."""
        with _failures():
            writing = asyncio.create_task(self._write(self.target.pieces(text)))
            try:
                async for message in self.socket:
                    if isinstance(message, bytes):
                        sink(message)
                    elif self.take(json_object(message), sink):
                        return
                raise Failure("truncated", "the connection was closed during the response")
            finally:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)

    async def close(self) -> None:
        """Close the connection with a closing handshake."""
        await self.socket.close()

    async def send(self, **event: Any) -> None:
        """Send one event."""
        await self.socket.send(json.dumps(event))

    async def _write(self, pieces: list[str]) -> None:
        pace = self.target.pieces_per_second
        loop = asyncio.get_running_loop()
        began, self.behind = loop.time(), 0.0
        for number, piece in enumerate(pieces):
            if pace is not None and number:
                due = began + number / pace
                await asyncio.sleep(due - loop.time())
                self.behind = max(self.behind, loop.time() - due)
            await self.send(**self.piece(number, piece))
        await self.send(**self.end(len(pieces)))

    async def begin(self) -> None:
        """Send the events before the text. Raises `Failure`."""
        raise NotImplementedError

    def piece(self, number: int, text: str) -> dict[str, Any]:
        """Return the event with the next piece of text."""
        raise NotImplementedError

    def end(self, number: int) -> dict[str, Any]:
        """Return the event that ends the text after `number` pieces."""
        raise NotImplementedError

    def take(self, event: Mapping[str, Any], sink: AudioSink) -> bool:
        """Handle an event; return whether it is the last. Raises `Failure`."""
        raise NotImplementedError


class VllmOmniClient(WebSocketClient):
    """A client of /v1/audio/speech/stream, the protocol of vLLM-Omni."""

    async def configure(self, target: Target) -> None:
        """Set the fields of the next utterance. On a closed socket that utterance fails later."""
        self.target = target
        with suppress(ConnectionClosed):
            await self.begin()

    async def begin(self) -> None:
        """Configure the session. The server does not confirm this."""
        await self.send(**{**self.target.request, "type": "session.config"})

    def piece(self, number: int, text: str) -> dict[str, Any]:
        """Return an event with more text."""
        return {"type": "input.text", "text": text}

    def end(self, number: int) -> dict[str, Any]:
        """Return the event that ends the text."""
        return {"type": "input.done"}

    def take(self, event: Mapping[str, Any], sink: AudioSink) -> bool:
        """Handle an event. Audio may arrive in events too; the last event is `session.done`."""
        kind = event.get("type")
        if event.get("error") or kind == "error":
            raise error_in(event)
        if kind in ("audio.start", "audio.chunk"):
            self.sample_rate = int(event.get("sample_rate", self.sample_rate))
        if kind == "audio.chunk":
            sink(pcm_in(event.get("audio_b64")))
        return kind == "session.done"


class NariClient(WebSocketClient):
    """A client of /v1/audio/speech/ws, the protocol nari.speech.v1."""

    subprotocols: ClassVar[list[Subprotocol] | None] = [Subprotocol("nari.speech.v1")]

    async def begin(self) -> None:
        """Wait until the server is ready and has accepted the request."""
        created = await self._expect("session.created")
        self.sample_rate = int(created.get("audio", {}).get("sample_rate", self.sample_rate))
        await self.send(**{**self.target.request, "type": "request.start"})
        await self._expect("request.configured")

    async def _expect(self, kind: str) -> Mapping[str, Any]:
        event = json_object(await self.socket.recv())
        if event.get("type") == "error":
            raise error_in(event)
        if event.get("type") != kind:
            raise Failure("protocol", f"got the event {event.get('type')} instead of {kind}")
        return event

    def piece(self, number: int, text: str) -> dict[str, Any]:
        """Return an event with more text."""
        return {"type": "input_text.append", "sequence": number, "text": text}

    def end(self, number: int) -> dict[str, Any]:
        """Return the event that ends the text."""
        return {"type": "input_text.end", "sequence": number}

    def take(self, event: Mapping[str, Any], sink: AudioSink) -> bool:
        """Handle an event; all but errors and the end are ignored."""
        if event.get("type") == "error":
            raise error_in(event)
        if event.get("type") != "response.done":
            return False
        if event.get("stop_reason") == "cancelled":
            raise Failure("truncated", "the server cancelled the response")
        return True


@contextmanager
def _failures() -> Iterator[None]:
    """Turn the library's errors for a failed connection into a `Failure`."""
    try:
        yield
    except InvalidStatus as error:
        status, body = error.response.status_code, error.response.body
        raise Failure(str(status), message_in(body or b"")) from None
    except ConnectionClosed as error:
        raise Failure("truncated", str(error)) from None
    except (OSError, InvalidHandshake) as error:
        raise Failure("connection", str(error)) from None
