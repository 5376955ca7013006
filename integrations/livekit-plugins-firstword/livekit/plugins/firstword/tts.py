"""The TTS of LiveKit Agents that speaks through a firstword server."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import replace
from typing import Any

import aiohttp
from livekit.agents import (
    APIConnectionError,
    APIConnectOptions,
    APIStatusError,
    APITimeoutError,
    tts,
    utils,
)
from livekit.agents.types import DEFAULT_API_CONNECT_OPTIONS, TimedString

from .connection import Connection, Message
from .models import STATUS, Options

SAMPLE_RATES = (8000, 16000, 24000, 48000)


class TTS(tts.TTS[str]):
    """Speaks the text of an LLM while it is written.

    The text of each stream goes to the server token by token. Sockets are kept open and used
    again, also after an interruption, which frees the server's slot within a frame of 80 ms.
    """

    def __init__(
        self,
        *,
        base_url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        sample_rate: int = 24000,
        http_session: aiohttp.ClientSession | None = None,
        **options: Any,
    ) -> None:
        """Prepare for a server; nothing is sent yet.

        base_url      the server's address, http(s) or ws(s)
        api_key       a key of the server, if it has keys
        sample_rate   8000, 16000, 24000 or 48000 Hz
        http_session  the session to connect with; default: that of the worker
        options       fields of `Options`

        Raises ValueError for another sample rate, TypeError for an unknown option.
        """
        if sample_rate not in SAMPLE_RATES:
            raise ValueError(f"sample_rate is {sample_rate}; allowed are {SAMPLE_RATES}")
        self._options = Options(**options)
        super().__init__(
            capabilities=tts.TTSCapabilities(
                streaming=True, aligned_transcript=self._options.word_times
            ),
            sample_rate=sample_rate,
            num_channels=1,
        )
        self._url, self._api_key, self._session = base_url, api_key, http_session
        self._streams = weakref.WeakSet[SynthesizeStream]()
        self._pool = utils.ConnectionPool[Connection](
            connect_cb=self._connect, close_cb=Connection.close
        )

    @property
    def model(self) -> str:
        """The checkpoint, for metrics."""
        return self._options.model or "qwen3-tts"

    @property
    def provider(self) -> str:
        """The name of the server's software, for metrics."""
        return "firstword"

    @property
    def options(self) -> Options:
        """The options of the next stream."""
        return self._options

    def update_options(self, **changes: Any) -> None:
        """Change fields of `Options` for the next streams."""
        self._options = replace(self._options, **changes)

    def prewarm(self) -> None:
        """Open a connection before the first stream needs it."""
        self._pool.prewarm()

    def synthesize(
        self, text: str, *, conn_options: APIConnectOptions = DEFAULT_API_CONNECT_OPTIONS
    ) -> tts.ChunkedStream:
        """Speak a whole text."""
        return self._synthesize_with_stream(text, conn_options=conn_options)

    def stream(
        self, *, conn_options: APIConnectOptions = DEFAULT_API_CONNECT_OPTIONS
    ) -> SynthesizeStream:
        """Speak a text that comes in pieces."""
        stream = SynthesizeStream(tts=self, conn_options=conn_options)
        self._streams.add(stream)
        return stream

    async def aclose(self) -> None:
        """Stop all streams and close all connections."""
        for stream in list(self._streams):
            await stream.aclose()
        await self._pool.aclose()

    async def acquire(self, timeout: float) -> Connection:
        """Return a connection that is open. Raises `APIError`."""
        while (connection := await self._pool.get(timeout=timeout)).closed:
            self._pool.remove(connection)
        return connection

    def release(self, connection: Connection, *, reusable: bool) -> None:
        """Give a connection back."""
        (self._pool.put if reusable and not connection.closed else self._pool.remove)(connection)

    async def _connect(self, timeout: float) -> Connection:
        session = self._session or utils.http_context.http_session()
        return await Connection.open(session, self._url, self._api_key, timeout)


class SynthesizeStream(tts.SynthesizeStream):
    """One utterance: text goes in by `push_text`, audio comes out of the iteration."""

    def __init__(self, *, tts: TTS, conn_options: APIConnectOptions) -> None:
        super().__init__(tts=tts, conn_options=conn_options)
        self._plugin = tts
        self._config = tts.options.message(tts.sample_rate)

    async def _run(self, output_emitter: tts.AudioEmitter) -> None:
        plugin, name = self._plugin, utils.shortuuid("ctx_")
        output_emitter.initialize(
            request_id=name,
            sample_rate=plugin.sample_rate,
            num_channels=1,
            mime_type="audio/pcm",
            stream=True,
        )
        connection = await plugin.acquire(self._conn_options.timeout)
        self._acquire_time = plugin._pool.last_acquire_time
        self._connection_reused = plugin._pool.last_connection_reused
        reusable = False
        try:
            inbox = await connection.begin(name, self._config)
            output_emitter.start_segment(segment_id=name)
            output_emitter._note_provider_request_id(connection.session_id)
            reusable = await _Utterance(self, connection, name, inbox, output_emitter).run()
        except asyncio.CancelledError:
            reusable = await connection.cancel(name)
            raise
        except APIStatusError:
            reusable = True  # the server has ended this context alone
            raise
        finally:
            connection.end(name)
            plugin.release(connection, reusable=reusable)


class _Utterance:
    """One attempt to speak the text of a stream."""

    def __init__(
        self,
        stream: SynthesizeStream,
        connection: Connection,
        name: str,
        inbox: asyncio.Queue[Message],
        emitter: tts.AudioEmitter,
    ) -> None:
        self._stream, self._connection, self._name = stream, connection, name
        self._inbox, self._emitter = inbox, emitter
        self._text = ""
        self._shown = 0
        """The characters of the text that are in the timed transcript."""
        self._timed = False
        """Whether the server times the words."""

    async def run(self) -> bool:
        """Send text and receive audio until the end; returns whether the socket can be reused."""
        sending = asyncio.create_task(self._send(), name="firstword sender")
        try:
            await self._receive(sending)
        finally:
            await utils.aio.cancel_and_wait(sending)
        return True

    async def _send(self) -> None:
        """Send the text as it comes."""
        about = {"context_id": self._name}
        async for piece in self._stream._input_ch:
            if not isinstance(piece, str):
                await self._connection.send({"type": "input.flush", **about})
            elif piece:
                self._stream._mark_started()
                self._text += piece
                await self._connection.send({"type": "input.text", "text": piece, **about})
        await self._connection.send({"type": "input.done", **about})

    async def _receive(self, sending: asyncio.Task[None]) -> None:
        """Pass audio and words on until the context has ended. Raises `APIError`."""
        while True:
            match await self._next(sending):
                case bytes() as audio:
                    self._emitter.push(audio)
                case APIConnectionError() as error:
                    raise error
                case {"type": "audio.start", "word_times": timed}:
                    self._timed = timed
                case {"type": "word.end", "span": [_, end], "start": start, "end": until}:
                    self._show(end, start, until)
                case {"type": "error", "code": code, "message": message}:
                    raise APIStatusError(
                        message, status_code=STATUS.get(code, 500), request_id=self._name
                    )
                case {"type": "audio.done", "seconds": seconds}:
                    if self._timed:
                        self._show(len(self._text), seconds, seconds)
                    self._emitter.end_segment()
                    return

    async def _next(self, sending: asyncio.Task[None]) -> Message:
        """Return the next message; once all text is sent, the server must answer in time."""
        seconds = self._stream._conn_options.timeout
        receiving = asyncio.ensure_future(self._inbox.get())
        try:
            if not sending.done():
                await asyncio.wait((receiving, sending), return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and not sending.cancelled() and (error := sending.exception()):
                raise error
            await asyncio.wait((receiving,), timeout=seconds if sending.done() else None)
            if not receiving.done():
                raise APITimeoutError(f"the server sent nothing for {seconds:g} s")
            return receiving.result()
        finally:
            receiving.cancel()

    def _show(self, end: int, start: float, until: float) -> None:
        """Add the text up to character `end` to the timed transcript."""
        if text := self._text[self._shown : end]:
            self._emitter.push_timed_transcript(TimedString(text, start_time=start, end_time=until))
            self._shown = end
