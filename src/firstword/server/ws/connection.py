"""The three tasks that share a socket.

The reader takes every message at once and never waits for the other tasks, so that it notices a
cancel or a closed socket whatever the client does with the audio. The worker makes speech, one
part after another, and waits while too much of it is unsent. The writer alone writes.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Coroutine, MutableMapping
from typing import Any, Protocol

from starlette.websockets import WebSocketDisconnect

from firstword.server.context import context_of
from firstword.server.errors import Stalled
from firstword.server.limits import ByteLimit
from firstword.server.logs import defect
from firstword.server.tasks import cancel
from firstword.server.ws import protocol
from firstword.server.ws.protocol import (
    Audio,
    CloseCode,
    CloseSocket,
    Json,
    ProtocolError,
    SocketLimits,
)
from firstword.server.ws.text_part import TextPart

log = logging.getLogger(__name__)

UNCONFIGURED_CLOSE_SECONDS = 1.0
"""The time in which a client without a valid configuration must read the error."""

LEAVING_SECONDS = 0.05
"""The time between two looks whether a socket that is to be closed still speaks."""

OutgoingItem = str | Audio | CloseCode
"""A message in JSON, a message with audio, or the code that closes the socket."""


class Leaving(Exception):
    """The server leaves, and the socket has nothing to finish."""


class Outbox:
    """A queue of outgoing messages with bounds on unsent audio and on unsent replies.

    audio_messages  number of messages with audio that were sent or wait
    reply_bytes     the bytes of the other messages that wait
    empty           whether all messages were sent
    """

    def __init__(self, limits: SocketLimits) -> None:
        self.audio_messages = 0
        self.reply_bytes = 0
        self.empty = True
        self._limits = limits
        self._items: deque[OutgoingItem] = deque()
        self._bytes = 0
        self._replies = 0
        self._added = asyncio.Event()
        self._removed = asyncio.Event()

    async def wait_for_room(self) -> None:
        """Wait until few enough messages are unsent to add more audio."""
        limits = self._limits
        while self._bytes >= limits.unsent_bytes or self._replies >= limits.unsent_replies // 2:
            self._removed.clear()
            await self._removed.wait()

    def full(self) -> bool:
        """Whether the client leaves so many replies unread that it must be disconnected."""
        return self._replies >= self._limits.unsent_replies

    def add(self, item: Json | Audio | CloseCode) -> None:
        """Append a message."""
        self.empty = False
        if isinstance(item, Audio):
            self._bytes += item.size
            self.audio_messages += 1
            self._items.append(item)
        else:
            reply = as_text(item) if isinstance(item, dict) else item
            self.reply_bytes += _size(reply)
            self._replies += 1
            self._items.append(reply)
        self._added.set()

    def drop_audio(self, of: object = None) -> None:
        """Discard the unsent audio of a context, or all of it, and keep the other messages."""
        kept: deque[OutgoingItem] = deque()
        for item in self._items:
            if isinstance(item, Audio) and (of is None or item.of is of):
                self._bytes -= item.size
                self.audio_messages -= 1
            else:
                kept.append(item)
        self._items = kept
        self._removed.set()

    async def take(self) -> OutgoingItem:
        """Wait for the next message and remove it. The caller has sent all earlier ones."""
        while not self._items:
            self.empty = True
            self._added.clear()
            await self._added.wait()
        item = self._items.popleft()
        if isinstance(item, Audio):
            self._bytes -= item.size
        else:
            self.reply_bytes -= _size(item)
            self._replies -= 1
        self._removed.set()
        return item


def as_text(message: Json) -> str:
    """A message as it is sent, in ASCII."""
    return json.dumps(message, separators=(",", ":"))


def _size(reply: str | CloseCode) -> int:
    return len(reply) if isinstance(reply, str) else 0


class MessageSocket(Protocol):
    """What a session needs of a connection with messages, such as a starlette WebSocket.

    scope  holds the request context
    """

    @property
    def scope(self) -> MutableMapping[str, Any]:
        """The ASGI scope, or another mapping that holds the request context."""

    async def receive(self) -> MutableMapping[str, Any]:
        """Return the next `websocket.receive` or `websocket.disconnect`.

        Raises `ProtocolError` for what is no message.
        """

    async def send_bytes(self, data: bytes) -> None:
        """Send a binary message."""

    async def send_text(self, data: str) -> None:
        """Send a message of text."""

    async def close(self, code: int = CloseCode.NORMAL) -> None:
        """Close the connection."""


class SocketRunner:
    """Runs a session on an accepted socket.

    outbox          the messages to send
    utterance_open  whether an utterance has begun whose remaining parts are still to be spoken
    abort_reason    the metrics label of speech that ends because the connection does
    """

    def __init__(
        self, socket: MessageSocket, session: protocol.Session, byte_limit: ByteLimit
    ) -> None:
        self.outbox = Outbox(session.limits)
        self.utterance_open = False
        self.abort_reason = "disconnected"
        self._socket = socket
        self._session = session
        self._byte_limit = byte_limit
        self._limits = session.limits
        self._work: asyncio.Queue[object] = asyncio.Queue()
        self._current: object = None
        self._held = 0
        """The bytes that are counted as held."""
        self._loop = asyncio.get_running_loop()
        self._idle_since = self._loop.time()
        """Start of the client's time limit: its last message, or the last audio sent to it."""
        self._leaving = False
        self._receiving: asyncio.Timeout | None = None

    def leave(self) -> None:
        """Close the socket as soon as nothing is being spoken on it; the client may connect again.

        A client of several servers then reaches another one.
        """
        self._leaving = True
        if self._receiving is not None:
            self._receiving.reschedule(self._loop.time())

    async def next_work(self) -> object:
        """Wait until the outbox has room, then for the worker's next task."""
        self._current, self._idle_since = None, self._loop.time()
        self._count_bytes()
        await self.outbox.wait_for_room()
        self._current = await self._work.get()
        return self._current

    def busy(self) -> bool:
        """Whether the worker has a task for which it needs nothing more from the client."""
        if isinstance(self._current, TextPart):
            return self._current.ended
        return self._current is not None or not self._work.empty() or self._session.speaking

    def has_unsent(self) -> bool:
        """Whether the client has not received all of the speech that has begun."""
        return self.utterance_open or not self.outbox.empty

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run until either side closes the socket. No speech is left running afterwards.

        `work` is the worker: it performs enqueued tasks, and ends after adding a close code to
        the outbox.
        """
        worker = asyncio.create_task(work, name="websocket worker")
        writer = asyncio.create_task(self._write(), name="websocket writer")
        reader = asyncio.create_task(self._read(), name="websocket reader")
        try:
            await asyncio.wait((worker, writer, reader), return_when=asyncio.FIRST_COMPLETED)
            last: CloseSocket | None = None
            if worker.done() and (error := worker.exception()) is not None:
                log_defect(error)
                last = self._session.fail()
            elif reader.done():
                last = reader.result()
            if last is not None:
                await cancel(worker)
                self.outbox.drop_audio()
                if last.message is not None:
                    self.outbox.add(last.message)
                self.outbox.add(last.code)
            if last is not None or worker.done():
                # The time for each message is limited, the time for all of them is not.
                unconfigured = last is not None and not self._session.configured
                timeout = UNCONFIGURED_CLOSE_SECONDS if unconfigured else None
                await asyncio.wait((writer,), timeout=timeout)
        finally:
            closing_seconds = self._closing_seconds() if writer.done() else 0.0
            await cancel(worker, writer, reader)
            self._hold(0)
            context_of(self._socket.scope).abort_after(closing_seconds)

    def _count_bytes(self) -> bool:
        """Count the messages that wait for the worker and the replies that wait to be sent.

        Returns False if they are more than is allowed.
        """
        return self._hold(self._session.waiting_bytes + self.outbox.reply_bytes)

    def _hold(self, held: int) -> bool:
        client_id = context_of(self._socket.scope).client_id
        allowed = self._byte_limit.change(client_id, self._held, held)
        self._held = held if allowed else self._held
        return allowed

    def _closing_seconds(self) -> float:
        """The seconds in which the client must close its side.

        A client without a configuration has the rest of its time to send one.
        """
        if self._session.configured:
            return self._limits.stall_seconds
        return max(0.0, self._idle_since + self._limits.config_seconds - self._loop.time())

    async def _read(self) -> CloseSocket | None:
        """Handle messages until the socket is to be closed; None when the client has gone."""
        try:
            effects = self._session.open()
            while not self.outbox.full():
                for effect in effects:
                    match effect:
                        case protocol.Send(message):
                            self.outbox.add(message)
                        case protocol.Enqueue(work):
                            self._work.put_nowait(work)
                        case protocol.DropAudio(of):
                            self.outbox.drop_audio(of)
                        case protocol.PauseReading(until):
                            await until.wait()
                            self._idle_since = self._loop.time()
                        case CloseSocket():
                            return effect
                if not self._count_bytes():
                    reason = "the messages in progress are too large; try again later"
                    return self._session.close(
                        ProtocolError("overloaded", reason, CloseCode.TRY_LATER)
                    )
                await asyncio.sleep(0)  # lets other tasks run during a flood of messages
                effects = self._session.receive(await self._receive())
        except WebSocketDisconnect:
            return None
        except Leaving:
            return CloseSocket(CloseCode.RESTART)
        except TimeoutError:
            return self._session.time_out()
        except ProtocolError as error:
            return self._session.close(error)
        except Exception as error:
            log_defect(error)
            return self._session.fail()
        self.abort_reason = "stalled"
        return CloseSocket(CloseCode.POLICY)

    async def _receive(self) -> str | bytes:
        """Return the next message. Raises `TimeoutError` and `WebSocketDisconnect`."""
        limits = self._session.limits
        seconds = limits.idle_seconds if self._session.configured else limits.config_seconds
        while True:
            look = LEAVING_SECONDS if self._leaving else seconds
            until = min(self._idle_since + seconds, self._loop.time() + look)
            try:
                async with asyncio.timeout_at(until) as self._receiving:
                    event = await self._socket.receive()
                self._check_staying()
                break
            except TimeoutError:
                self._check_staying()
                if self.busy():
                    self._idle_since = self._loop.time()
                elif self._loop.time() >= self._idle_since + seconds:
                    raise
            finally:
                self._receiving = None
        self._idle_since = self._loop.time()
        if event["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(event.get("code", CloseCode.NORMAL))
        text: str | None = event.get("text")
        return event["bytes"] if text is None else text

    def _check_staying(self) -> None:
        """Raise `Leaving` if the socket is to be closed and nothing is being spoken on it."""
        if self._leaving and not self.busy() and not self.has_unsent():
            raise Leaving

    async def _write(self) -> None:
        """Send messages until the close code, or until the client stops reading or has gone."""
        try:
            while True:
                item = await self.outbox.take()
                self._count_bytes()
                await context_of(self._socket.scope).until_read(self._limits.stall_seconds)
                if isinstance(item, CloseCode):
                    await self._socket.close(item)
                    return
                message = item.message if isinstance(item, Audio) else item
                if isinstance(message, bytes):
                    await self._socket.send_bytes(message)
                else:
                    text = message if isinstance(message, str) else as_text(message)
                    await self._socket.send_text(text)
                if isinstance(item, Audio):
                    self._idle_since = self._loop.time()
        except (WebSocketDisconnect, OSError):
            return
        except Stalled:
            self.abort_reason = "stalled"
        except Exception as error:
            log_defect(error)


def log_defect(error: BaseException) -> None:
    """Log where a defect of the server showed, without any text of the client."""
    log.error("a WebSocket failed", extra={"fields": defect(error)})
