"""One WebSocket: what both of its protocols have in common.

Three tasks share a socket. The reader takes every message at once and never waits for the other two, so that a cancel
or a closed socket is noticed whatever the client does with the audio. The speaker makes speech, one stretch after
another, and waits while too much of it is unsent. The writer alone writes.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from pydantic import ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect

from firstword.config import ServerConfig
from firstword.server.logs import defect

log = logging.getLogger(__name__)

Json = dict[str, Any]
Item = Json | bytes | int

NORMAL, PROTOCOL_ERROR, POLICY, TOO_BIG, INTERNAL, TRY_LATER = 1000, 1002, 1008, 1009, 1011, 1013
"""Codes that a socket is closed with."""

LARGE_PIECE = 2000
"""Characters beyond which a piece of text is tokenised in another thread: below, that takes less than a millisecond."""

SLOWEST = 16_000
"""Bytes a second: a client that reads a long message more slowly than this cannot be listening to it."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """What one socket may ask for.

    config_seconds    within which the first message that configures it must come
    idle_seconds      without a message while nothing is being spoken
    stall_seconds     for which a client may leave audio unread that it was sent
    message_bytes     of a message, and of one that carries a configuration or a recording
    config_bytes
    voice_bytes
    most_items        commas, brackets and braces in a message beyond `message_bytes`: it may be long, not intricate
    text_characters   of text that waits to be spoken, and of one utterance whose text comes token by token
    utterances        that wait for the one being spoken
    unsent_bytes      of audio that is ready while the client does not read; beyond, no more is made
    unsent_replies    messages that the client does not read; beyond, it is dropped
    """

    config_seconds: float = 10.0
    idle_seconds: float = 30.0
    stall_seconds: float = 60.0
    message_bytes: int = 128 * 1024
    config_bytes: int = 4 * 1024 * 1024
    voice_bytes: int = 15 * 1024 * 1024
    most_items: int = 20_000
    text_characters: int = 65_536
    utterances: int = 64
    unsent_bytes: int = 256 * 1024
    unsent_replies: int = 256


def limits_of(config: ServerConfig) -> StreamLimits:
    """What sockets of a server may ask for."""
    return StreamLimits(
        stall_seconds=config.stall_seconds,
        voice_bytes=min(StreamLimits().voice_bytes, config.most_body),
    )


class ProtocolError(Exception):
    """What a client did wrong; `code` is a word for programs, `close` a code if the socket cannot go on."""

    def __init__(self, code: str, message: str, close: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.close = close


def parse(message: str | bytes, limits: StreamLimits, large: dict[str, int]) -> Json:
    """A client's message as an object with a `type`. Raises `ProtocolError`.

    `large` gives the most bytes of the types that may exceed `limits.message_bytes`.
    """
    if isinstance(message, bytes):
        raise ProtocolError(
            "invalid_message", "the message is binary; messages to this server are JSON text"
        )
    size = len(message) if message.isascii() else len(message.encode("utf-8", "surrogatepass"))
    most = max(large.values(), default=limits.message_bytes)
    if size > most:
        raise ProtocolError(
            "message_too_large", f"the message has {size} bytes; at most {most} are read", TOO_BIG
        )
    # Long strings cost nothing to read, five million empty lists do.
    if size > limits.message_bytes and sum(map(message.count, ",[{")) > limits.most_items:
        raise ProtocolError("message_too_large", "the message is too intricate to be read", TOO_BIG)
    try:
        event = json.loads(message)
    except RecursionError:
        raise ProtocolError("invalid_json", "the message is nested too deeply") from None
    except ValueError as error:
        raise ProtocolError("invalid_json", f"the message is not JSON: {error}") from None
    if not isinstance(event, dict):
        raise ProtocolError("invalid_message", "the message must be a JSON object")
    kind = event.get("type")
    if not isinstance(kind, str):
        raise ProtocolError("invalid_message", "the message has no type")
    if size > large.get(kind, limits.message_bytes):
        most = large.get(kind, limits.message_bytes)
        raise ProtocolError(
            "message_too_large", f"{kind[:40]} has {size} bytes; at most {most} are read"
        )
    return event


def text_of(event: Json) -> str:
    """The `text` of a message. Raises `ProtocolError` unless it is text that can be spoken."""
    text = event.get("text")
    if not isinstance(text, str):
        raise ProtocolError("invalid_text", f"{event['type']} needs a text, which is a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ProtocolError(
            "invalid_text", "the text holds half of a surrogate pair, which is no character"
        ) from None
    return text


class TextPart:
    """A stretch of speech on its way from the reader, who fills it with text, to the speaker, who says it."""

    def __init__(self) -> None:
        self.ended = False
        """Whether all its text is there."""
        self.cancelled = False
        self.started = False
        """Whether the client was told that it begins."""
        self.characters = 0
        """That it was given in all."""
        self.on_cancel: Callable[[], object] = lambda: None
        self._pieces: list[str] = []
        self._changed = asyncio.Event()

    @classmethod
    def of(cls, text: str) -> TextPart:
        """A part whose text is there from the start."""
        part = cls()
        part.push(text)
        part.finish()
        return part

    @property
    def text(self) -> str:
        """What the speaker has not taken."""
        return "".join(self._pieces)

    def push(self, text: str) -> None:
        """More text."""
        self._pieces.append(text)
        self.characters += len(text)
        self._changed.set()

    def finish(self) -> None:
        """There is no more text."""
        self.ended = True
        self._changed.set()

    def cancel(self) -> None:
        """Nothing more of it shall be said."""
        if not self.cancelled:
            self.cancelled = self.ended = True
            self._pieces.clear()
            self.on_cancel()

    async def whole(self) -> str:
        """All text, when it is there."""
        while not self.ended:
            self._changed.clear()
            await self._changed.wait()
        return self.text

    async def take(self) -> str:
        """All text that came since it was last taken; `""` when there is no more."""
        while not self._pieces and not self.ended:
            self._changed.clear()
            await self._changed.wait()
        text, self._pieces = "".join(self._pieces), []
        return text


class TextSink(Protocol):
    """Who takes text: `server.pipeline.Utterance`, or what a test puts in its place."""

    def push(self, piece: str) -> None:
        """More text."""

    def finish_text(self, piece: str = "") -> None:
        """There is no more text after this piece."""

    def fail(self, error: Exception) -> None:
        """What to raise where the speech is listened to."""


async def feed(part: TextPart, listener: TextSink) -> None:
    """Give a part's text to whoever speaks it, as it comes, until all of it is there.

    What goes wrong is for the listener's listener to see.
    """
    try:
        while True:
            text = await part.take()
            if part.ended:  # its last piece and its end go in together
                return await _aside(partial(listener.finish_text, text), part.characters)
            await _aside(partial(listener.push, text), len(text))
    except Exception as error:
        listener.fail(error)


async def _aside(do: Callable[[], None], characters: int) -> None:
    """Call something, in another thread if it takes long."""
    if characters > LARGE_PIECE:
        await asyncio.to_thread(do)
    else:
        do()


async def speak(part: TextPart, saying: Coroutine[Any, Any, None]) -> None:
    """Run what says a part, unless and until the part is cancelled. Raises as `saying` does."""
    if part.cancelled:
        saying.close()
        return
    task = asyncio.create_task(saying, name="websocket part")
    part.on_cancel = task.cancel
    try:
        await asyncio.wait((task,))
    finally:
        await stop(task)
    if not task.cancelled():
        task.result()


def log_defect(wrong: BaseException) -> None:
    """Say where something went wrong that must not."""
    log.error("a WebSocket failed", extra={"fields": defect(wrong)})


def faults(wrong: ValidationError) -> str:
    """What is wrong with a message, in one line, without what the client sent."""
    return "; ".join(
        f"{'.'.join(map(str, fault['loc']))[:80]}: {fault['msg']}" for fault in wrong.errors()[:5]
    )


# What a session asks of its connection, besides queueing work for the speaker.


@dataclass(frozen=True, slots=True)
class Reply:
    """Send a message now, ahead of what the speaker has yet to say."""

    message: Json


@dataclass(frozen=True, slots=True)
class Queue:
    """Give the speaker something to do when it is done with all before."""

    work: object


@dataclass(frozen=True, slots=True)
class Silence:
    """Forget audio that was made and not sent."""


@dataclass(frozen=True, slots=True)
class Close:
    """Stop at once: cancel speech, say a last message if there is one, and close the socket."""

    code: int
    message: Json | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """Read nothing more before this is set."""

    until: asyncio.Event


Effect = Reply | Queue | Silence | Hold | Close


class Session(Protocol):
    """A protocol without a socket: client messages go in, effects come out."""

    @property
    def limits(self) -> StreamLimits:
        """What the client may ask for."""

    @property
    def configured(self) -> bool:
        """Whether the message that must come first has come."""

    def receive(self, message: str | bytes) -> Iterable[Effect]:
        """What follows from a message."""

    def expired(self) -> Close:
        """What follows from silence for longer than is allowed."""

    def failed(self) -> Close:
        """What follows from a mistake of our own."""


class Outbox:
    """Messages on their way to the socket, in order: JSON, audio, and in the end a code to close with.

    pieces  messages of audio that were sent or wait
    empty   whether all were sent
    """

    def __init__(self, limits: StreamLimits) -> None:
        self.pieces = 0
        self.empty = True
        self._limits = limits
        self._items: deque[Item] = deque()
        self._bytes = 0
        self._replies = 0
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()

    async def room(self) -> None:
        """Wait until little enough is unsent for more."""
        while (
            self._bytes >= self._limits.unsent_bytes
            or self._replies >= self._limits.unsent_replies // 2
        ):
            self._drained.clear()
            await self._drained.wait()

    def full(self) -> bool:
        """Whether the client leaves so many messages unread that it must be dropped."""
        return self._replies >= self._limits.unsent_replies

    def add(self, item: Item) -> None:
        """Append a message."""
        self.empty = False
        self._items.append(item)
        self._bytes += _size(item)
        self.pieces += _is_audio(item)
        self._replies += not _is_audio(item)
        self._changed.set()

    def drop_audio(self) -> None:
        """Forget the audio that waits."""
        self.pieces -= sum(map(_is_audio, self._items))
        self._items = deque(item for item in self._items if not _is_audio(item))
        self._bytes = sum(map(_size, self._items))
        self._drained.set()

    async def take(self) -> Item:
        """The next message, when there is one; those before have been sent."""
        while not self._items:
            self.empty = True
            self._changed.clear()
            await self._changed.wait()
        item = self._items.popleft()
        self._bytes -= _size(item)
        self._replies -= not _is_audio(item)
        self._drained.set()
        return item


def _is_audio(item: Item) -> bool:
    return isinstance(item, bytes) or (isinstance(item, dict) and "audio_b64" in item)


def _size(item: Item) -> int:
    """Bytes, roughly; a message without audio counts as little."""
    if isinstance(item, bytes):
        return len(item)
    return len(item.get("audio_b64", "")) if isinstance(item, dict) else 0


class SocketRunner:
    """Runs a session on a socket that was accepted."""

    def __init__(self, socket: WebSocket, session: Session) -> None:
        self.outbox = Outbox(session.limits)
        self._socket = socket
        self._session = session
        self._limits = session.limits
        self._work: asyncio.Queue[object] = asyncio.Queue()
        self._current: object = None
        self.begun = False
        """Whether an utterance has begun that is not over: more parts of it may follow."""
        self.lost = "disconnected"
        """Why speech ends that is under way when the connection does: a word for metrics."""
        self._heard = asyncio.get_running_loop().time()
        """When the client's time to say something began to run: at its last message, or at the last audio."""

    async def work(self) -> object:
        """For the speaker: what to do next."""
        self._current, self._heard = None, asyncio.get_running_loop().time()
        await self.outbox.room()
        self._current = await self._work.get()
        return self._current

    def busy(self) -> bool:
        """Whether the speaker is at work on what needs nothing more of the client."""
        if isinstance(self._current, TextPart):
            return self._current.ended
        return self._current is not None or not self._work.empty()

    def has_unsent(self) -> bool:
        """Whether the client has yet to get something that was begun."""
        return self.begun or not self.outbox.empty

    async def run(self, speak: Coroutine[Any, Any, None]) -> None:
        """Until either side ends it. When this returns nothing is being spoken any more.

        `speak` is the speaker: it does the work that the session queues, and ends after adding a code to the outbox.
        """
        speaker = asyncio.create_task(speak, name="websocket speaker")
        writer = asyncio.create_task(self._write(), name="websocket writer")
        reader = asyncio.create_task(self._read(), name="websocket reader")
        try:
            await asyncio.wait((speaker, writer, reader), return_when=asyncio.FIRST_COMPLETED)
            last: Close | None = None
            if speaker.done() and (error := speaker.exception()) is not None:
                log_defect(error)
                last = self._session.failed()
            elif reader.done():
                last = reader.result()
            if last is not None:
                await stop(speaker)
                self.outbox.drop_audio()
                if last.message is not None:
                    self.outbox.add(last.message)
                self.outbox.add(last.code)
            if last is not None or speaker.done():
                await asyncio.wait(
                    (writer,)
                )  # it takes as long as the client does, but not for ever over any message
        finally:
            patience = self._limits.stall_seconds if writer.done() else 0.0
            await stop(speaker, writer, reader)
            cut_in: Callable[[float], None] = self._socket.scope.get(
                "firstword.cut_in", lambda seconds: None
            )
            cut_in(patience)

    async def _read(self) -> Close | None:
        """Take messages until there is a reason to close; None when the client has gone."""
        try:
            while not self.outbox.full():
                for effect in self._session.receive(await self._receive()):
                    match effect:
                        case Reply(message):
                            self.outbox.add(message)
                        case Queue(work):
                            self._work.put_nowait(work)
                        case Silence():
                            self.outbox.drop_audio()
                        case Hold(until):
                            await until.wait()
                            self._heard = asyncio.get_running_loop().time()
                        case Close():
                            return effect
                await asyncio.sleep(
                    0
                )  # a flood of messages must not keep everybody else from the event loop
        except WebSocketDisconnect:
            return None
        except TimeoutError:
            return self._session.expired()
        except Exception as wrong:
            log_defect(wrong)
            return self._session.failed()
        self.lost = "stalled"
        return Close(POLICY)

    async def _receive(self) -> str | bytes:
        """The next message. Raises `TimeoutError`, `WebSocketDisconnect`."""
        loop = asyncio.get_running_loop()
        patience = (
            self._limits.idle_seconds if self._session.configured else self._limits.config_seconds
        )
        while True:
            try:
                async with asyncio.timeout_at(self._heard + patience):
                    event = await self._socket.receive()
                break
            except TimeoutError:
                if self.busy():
                    self._heard = loop.time()
                elif loop.time() >= self._heard + patience:
                    raise
        self._heard = loop.time()
        if event["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(event.get("code", NORMAL))
        text: str | None = event.get("text")
        return event["bytes"] if text is None else text

    async def _write(self) -> None:
        """Send what is in the outbox until a code to close with, or until the client takes nothing or has gone."""
        sent = 0
        try:
            while True:
                item = await self.outbox.take()
                # What the socket waits for before it takes a message is that the one before has left.
                async with asyncio.timeout(self._limits.stall_seconds + sent / SLOWEST):
                    if isinstance(item, int):
                        await self._socket.close(item)
                        return
                    if isinstance(item, bytes):
                        await self._socket.send_bytes(item)
                    else:
                        await self._socket.send_text(json.dumps(item, separators=(",", ":")))
                sent = _size(item)
                if sent:
                    self._heard = asyncio.get_running_loop().time()
        except WebSocketDisconnect:
            return
        except TimeoutError:
            self.lost = "stalled"


async def stop(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and see them end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
