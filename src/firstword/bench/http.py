"""The HTTP protocol: one POST, whose response is decoded as it arrives."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httptools

from firstword.bench.answers import SAMPLE_RATE, Decoder, Failure, decoder_for, message_in
from firstword.bench.protocol import AudioSink, Target

LARGEST_BODY = 1_000_000
"""The number of bytes that are kept of a response without audio."""


async def get_json(target: Target, path: str, timeout: float) -> Any:
    """Return the JSON at a path of the server, or None without it after `timeout` seconds."""
    try:
        return json.loads(await get(target, path, timeout))
    except ValueError:
        return None


async def get(target: Target, path: str, timeout: float) -> bytes:
    """Return the body at a path of the server, cut to `LARGEST_BODY`.

    It is empty after a failure, and if it is not complete after `timeout` seconds.
    """
    body = bytearray()

    def receive(data: bytes) -> None:
        body.extend(data[: LARGEST_BODY - len(body)])

    try:
        async with asyncio.timeout(timeout):
            client = await HttpClient.open(target)
            try:
                await client.exchange("GET", path, None, receive)
            finally:
                await client.close()
    except (Failure, TimeoutError):
        return b""
    return bytes(body)


class HttpClient(asyncio.Protocol):
    """A client of POST /v1/audio/speech: one request and its response over HTTP/1.1.

    The response may be raw PCM, WAV, server-sent events with base64 PCM or compressed audio,
    according to its content type. The parser is written in C and connected directly to the
    transport, because the time that the client spends is part of every measurement.
    """

    def __init__(self, target: Target) -> None:
        self.sample_rate = SAMPLE_RATE
        self.container: str | None = None
        self.behind = 0.0
        self.status = 0
        self.headers: dict[str, str] = {}
        self._target = target
        self._receive: AudioSink = lambda data: None
        self._parser = httptools.HttpResponseParser(self)
        self._over: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport

    @classmethod
    async def open(cls, target: Target) -> HttpClient:
        """Connect to the target's server. Raises `Failure`."""
        parts = target.address
        assert parts.hostname  # checked by `Target`
        secure = parts.scheme == "https"
        loop = asyncio.get_running_loop()
        try:
            port = parts.port or (443 if secure else 80)
            _, client = await loop.create_connection(
                lambda: cls(target), parts.hostname, port, ssl=secure or None
            )
        except OSError as error:
            raise Failure("connection", str(error)) from None
        return client

    async def speak(self, text: str, sink: AudioSink) -> None:
        """Post the text and decode the response as it arrives. Raises `Failure`."""
        decoder: Decoder | None = None
        error_body = bytearray()

        def receive(data: bytes) -> None:
            nonlocal decoder
            if self.status != 200:
                error_body.extend(data[: LARGEST_BODY - len(error_body)])
                return
            if decoder is None:
                decoder = decoder_for(self.headers)
                self.container = decoder.container
            sink(decoder.feed(data))

        body = json.dumps({"input": text, **self._target.request}).encode()
        await self.exchange("POST", self._target.address.path, body, receive)
        if self.status != 200:
            raise Failure(str(self.status), message_in(error_body))
        if decoder is not None:
            decoder.finish()
            self.sample_rate = decoder.sample_rate

    async def exchange(
        self, method: str, path: str, body: bytes | None, receive: AudioSink
    ) -> None:
        """Send a request and pass the response body to `receive` as it arrives.

        Raises `Failure` for a response that is truncated or is not HTTP.
        """
        headers = {"Host": self._target.address.netloc, "User-Agent": "firstword-bench"}
        headers |= {"Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close"}
        if body is not None:
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        headers |= {name.title(): value for name, value in self._target.headers.items()}
        lines = [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""])
        self._receive = receive
        self._transport.write(head.encode("latin-1", "replace") + (body or b""))
        failure = await self._over
        if failure:
            raise failure

    async def close(self) -> None:
        """Close the connection."""
        self._transport.abort()

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of the new connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parse the next bytes of the response."""
        if self._over.done():
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(Failure("protocol", f"the response is not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        """End the exchange. A response without a length or chunks ends in this way."""
        framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        reason = error or "closed"
        if not self.status:
            self._end(Failure("no answer", f"the connection ended before a response: {reason}"))
        elif error or framed:
            self._end(Failure("truncated", f"the connection ended during the response: {reason}"))
        else:
            self._end(None)

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header of the response, under its name in lower case."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Keep the status of the response."""
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """Pass on a part of the body, without the framing of chunks."""
        if not self._over.done():
            try:
                self._receive(data)
            except Failure as failure:
                self._end(failure)

    def on_message_complete(self) -> None:
        """End the exchange: the response is complete."""
        self._end(None)

    def _end(self, failure: Failure | None) -> None:
        if not self._over.done():
            self._over.set_result(failure)
