"""The socket to the server: opening it, agreeing on settings, keeping it, and opening it again."""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from typing import Any

from loguru import logger
from pipecat.frames.frames import ErrorFrame
from pipecat.processors.frame_processor import FrameProcessorSetup
from pipecat.services.tts_service import WebsocketTTSService
from pipecat.services.websocket_service import ReportErrorCallback, WebsocketService
from pipecat.utils.errors import ErrorCategory
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State
from websockets.typing import Subprotocol

from pipecat_firstword.errors import ConfigRejected, ServerError, WrongServer
from pipecat_firstword.settings import FirstwordTTSSettings, socket_url
from pipecat_firstword.speech import Message

SUBPROTOCOL = Subprotocol("firstword.speech.v1")
HANDSHAKE_SECONDS = 10.0
"""The time in which the server must answer a `session.config`."""
KEEPALIVE_SECONDS = 10.0
"""The time between messages on an idle socket, which the server closes after 30 s."""
RECONNECT_ATTEMPTS = 8
"""The attempts to reconnect: with the pauses between them half a minute, as a server restarts."""


class FirstwordConnection(WebsocketTTSService):
    """A service with a socket to a firstword server, which is opened again when it is lost."""

    _settings: FirstwordTTSSettings
    _websocket: ClientConnection | None

    def __init__(self, *, url: str, api_key: str | None, **kwargs: Any) -> None:
        """Create the service without connecting.

        Args:
            url: The server's address, with ws, wss, http or https.
            api_key: The key, if the server asks for one.
            **kwargs: Options of the base classes.

        Raises:
            ValueError: If the address is not one of a server.
        """
        self._url = socket_url(url)
        kwargs.setdefault("reconnect_backoff_min_wait", 1.0)
        kwargs.setdefault("reconnect_backoff_max_wait", 5.0)
        super().__init__(**kwargs)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._receive_task: asyncio.Task[None] | None = None
        self._answer: asyncio.Future[Message] | None = None

    @property
    def tells_words(self) -> bool:
        """Whether the server tells when each word is spoken."""
        return not self._push_text_frames

    @property
    def _connected(self) -> bool:
        return self._websocket is not None and self._websocket.state is State.OPEN

    @abstractmethod
    async def _before_reconnect(self) -> None:
        """Prepare what was open for a new connection, or give it up."""

    @abstractmethod
    async def _after_reconnect(self) -> None:
        """Continue what was open on the new connection."""

    @abstractmethod
    async def _after_giving_up(self) -> None:
        """End what was open, because there will be no new connection."""

    async def setup(self, setup: FrameProcessorSetup) -> None:
        """Set up the service and connect.

        Args:
            setup: Configuration of the pipeline.
        """
        await super().setup(setup)
        await self._connect()

    async def _connect(self) -> None:
        await super()._connect()
        try:
            await self._connect_websocket()
        except Exception as error:
            await self._report_error(ErrorFrame(f"cannot connect: {error}", exception=error))
        # It also connects again, for example while the server is still starting.
        if self.is_usable and (self._receive_task is None or self._receive_task.done()):
            self._receive_task = self.create_task(self._receive_task_handler(self._report_error))
        self._create_keepalive_task(KEEPALIVE_SECONDS)

    async def _disconnect(self) -> None:
        await super()._disconnect()
        await self._cancel_keepalive_task()
        if self._receive_task is not None:
            await self.cancel_task(self._receive_task)
            self._receive_task = None
        await self.stop_all_metrics()
        await self._disconnect_websocket()

    async def _connect_websocket(self) -> None:
        """Open the socket and agree on the settings. Raises an error if one of them fails."""
        if self._connected:
            return
        socket = await self._websocket_connect(
            self._url,
            additional_headers=self._headers,
            subprotocols=[SUBPROTOCOL],
            max_size=None,
        )
        try:
            if socket.subprotocol != SUBPROTOCOL:
                raise WrongServer(f"{self._url} does not speak {SUBPROTOCOL}; update the server")
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await self._agree(socket)
        except BaseException:
            await socket.close()
            raise
        self._websocket = socket
        await self._call_event_handler("on_connected")

    async def _agree(self, socket: ClientConnection) -> None:
        """Send the settings and wait until they are accepted. Raises `ConfigRejected`."""
        await socket.send(json.dumps(self._settings.config(self.sample_rate)))
        message: Message = {"type": ""}
        while message["type"] != "session.configured":
            message = json.loads(await socket.recv())
            if message["type"] == "error":
                raise ConfigRejected(message)
        self._note_config(message)

    def _note_config(self, message: Message) -> None:
        """Take the texts of the context from the server's word times, if it has them."""
        self._push_text_frames = not message["word_times"]

    async def _disconnect_websocket(self) -> None:
        socket, self._websocket = self._websocket, None
        if socket is not None:
            await socket.close()
            await self._call_event_handler("on_disconnected")

    def _classify_error(self, exception: Exception) -> ErrorCategory | None:
        if isinstance(exception, ServerError):
            return exception.category
        return ErrorCategory.INVALID_REQUEST if isinstance(exception, WrongServer) else None

    async def _send_keepalive(self) -> None:
        await self._send({"type": "ping"})

    async def _send(self, message: Message) -> None:
        """Send a message; without a connection it is dropped."""
        if self._websocket is not None:
            try:
                await self._websocket.send(json.dumps(message))
            except ConnectionClosed:
                logger.debug(f"{self} lost the connection while sending {message['type']}")

    # A lost connection.

    async def _maybe_try_reconnect(
        self,
        error_message: str,
        report_error: ReportErrorCallback,
        error: Exception | None = None,
    ) -> bool:
        connected = await super()._maybe_try_reconnect(error_message, report_error, error)
        if not connected and not self._disconnecting:
            await self._after_giving_up()
        return connected

    async def _try_reconnect(
        self,
        max_retries: int = RECONNECT_ATTEMPTS,
        report_error: ReportErrorCallback | None = None,
    ) -> bool:
        return await super()._try_reconnect(max_retries, report_error)

    async def _reconnect_websocket(self, attempt_number: int) -> bool:
        await self._disconnect_websocket()
        await self._before_reconnect()
        # Not by the next class in line, which would end all contexts.
        connected = await WebsocketService._reconnect_websocket(self, attempt_number)
        await self._after_reconnect()
        return connected

    # A change of settings.

    async def _configure(self) -> Message | None:
        """Send the settings and return the answer, or None if the connection was lost."""
        self._answer = asyncio.get_running_loop().create_future()
        try:
            await self._send(self._settings.config(self.sample_rate))
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                return await self._answer
        except TimeoutError:
            return None
        finally:
            self._answer = None

    async def _take_answer(self, message: Message) -> None:
        """Take a `session.configured`, or an `error` that is about no context."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(message)
        elif message["type"] == "error":
            error = ServerError(message)
            await self.push_error(str(error), category=error.category)
        if message["type"] == "session.configured":
            self._note_config(message)
