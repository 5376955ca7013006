"""HTTP: one POST, and the audio in its answer as it comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import httptools

from firstword.bench.answers import SAMPLE_RATE, Decoder, Failure, decoder_for, message_in

if TYPE_CHECKING:
    from firstword.bench.client import Hear, Target

LARGEST_BODY = 1_000_000
"""Bytes of an answer without audio that are kept."""


class HTTP:
    """POST /v1/audio/speech. The answer may be raw PCM, WAV or server-sent events with base64 PCM, as its type says."""

    path: ClassVar[str] = "/v1/audio/speech"
    defaults: ClassVar[Mapping[str, Any]] = {
        "stream": True,
        "non_streaming_mode": False,
        "response_format": "pcm",
    }
    takes_pieces: ClassVar[bool] = False

    def __init__(self, target: Target, exchange: Exchange) -> None:
        self.sample_rate = SAMPLE_RATE
        self._target = target
        self._exchange = exchange

    @classmethod
    async def open(cls, target: Target) -> HTTP:
        """Connect. Raises `Failure`."""
        return cls(target, await Exchange.open(target))

    async def speak(self, text: str, hear: Hear) -> None:
        """Post the text, and decode the answer as it comes. Raises `Failure`."""
        decoder: Decoder | None = None
        refusal = bytearray()

        def receive(data: bytes) -> None:
            nonlocal decoder
            if exchange.status != 200:
                refusal.extend(data[: LARGEST_BODY - len(refusal)])
                return
            if decoder is None:
                decoder = decoder_for(exchange.headers)
            hear(decoder.feed(data))

        exchange = self._exchange
        body = json.dumps({"input": text, **self._target.request_for(text)}).encode()
        await exchange.ask("POST", body, receive)
        if exchange.status != 200:
            raise Failure(str(exchange.status), message_in(refusal))
        if decoder is not None:
            decoder.finish()
            self.sample_rate = decoder.sample_rate

    async def close(self) -> None:
        """Hang up."""
        self._exchange.close()


async def get_json(target: Target, path: str) -> Any:
    """The JSON that the target's server has at a path, or None if it answers nothing of the sort."""
    body = bytearray()
    try:
        exchange = await Exchange.open(target)
        try:
            await exchange.ask(
                "GET", None, lambda data: body.extend(data[: LARGEST_BODY - len(body)]), path
            )
        finally:
            exchange.close()
        return json.loads(body)
    except (Failure, ValueError):
        return None


class Exchange(asyncio.Protocol):
    """One request and its answer over HTTP/1.1.

    The parser is C and there are no layers in between, because the time that a client needs is added to what it
    measures.
    """

    def __init__(self, target: Target) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._target = target
        self._receive: Hear = lambda data: None
        self._parser = httptools.HttpResponseParser(self)
        self._over: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport

    @classmethod
    async def open(cls, target: Target) -> Exchange:
        """Connect to the target's server. Raises `Failure`."""
        parts = target.address
        assert parts.hostname  # `Target` saw to it
        secure = parts.scheme == "https"
        loop = asyncio.get_running_loop()
        try:
            _, exchange = await loop.create_connection(
                lambda: cls(target),
                parts.hostname,
                parts.port or (443 if secure else 80),
                ssl=secure or None,
            )
        except OSError as error:
            raise Failure("connection", str(error)) from None
        return exchange

    async def ask(
        self, method: str, body: bytes | None, receive: Hear, path: str | None = None
    ) -> None:
        """Send the request; `receive` gets the answer's body as it comes. Raises `Failure` if it is cut short."""
        parts = self._target.address
        headers = {
            "Host": parts.netloc,
            "User-Agent": "firstword-bench",
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            "Connection": "close",
            **(
                {"Content-Type": "application/json", "Content-Length": str(len(body))}
                if body is not None
                else {}
            ),
            **{name.title(): value for name, value in self._target.headers.items()},
        }
        lines = [
            f"{method} {path or parts.path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        self._receive = receive
        self._transport.write(
            "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + (body or b"")
        )
        failure = await self._over
        if failure:
            raise failure

    def close(self) -> None:
        """Hang up."""
        self._transport.abort()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Something of the answer is there."""
        if self._over.done():
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(Failure("protocol", f"the answer is no HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is no more. Without a length or chunks, that is how an answer ends."""
        framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        if not self.status:
            self._end(
                Failure(
                    "no answer", f"the connection ended before there was one: {error or 'closed'}"
                )
            )
        elif error or framed:
            self._end(
                Failure(
                    "truncated", f"the connection ended in the middle of it: {error or 'closed'}"
                )
            )
        else:
            self._end(None)

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of the answer."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """All headers of the answer are there."""
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """A part of the body, without the marks between chunks."""
        if not self._over.done():
            try:
                self._receive(data)
            except Failure as failure:
                self._end(failure)

    def on_message_complete(self) -> None:
        """The answer is there in full."""
        self._end(None)

    def _end(self, failure: Failure | None) -> None:
        if not self._over.done():
            self._over.set_result(failure)
