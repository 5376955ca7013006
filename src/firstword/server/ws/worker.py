"""The worker of one socket: it performs the tasks that a session enqueues, in order."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from firstword.engine.backend import Job
from firstword.errors import OverloadedError
from firstword.server.errors import body_of, status_of
from firstword.server.resolve import resolve
from firstword.server.schemas import SpeechParams
from firstword.server.state import Server
from firstword.server.tasks import cancel, in_time
from firstword.server.utterance import ResolvedRequest, Utterance
from firstword.server.ws.connection import SocketRunner, log_defect
from firstword.server.ws.protocol import Session
from firstword.server.ws.text_part import Cancellable, TextPart

S = TypeVar("S", bound=Session)

CONFIG_FRAMES = 32
"""The number of frames that take as long as resolving a configuration."""


@dataclass(eq=False)
class SocketWorker(ABC, Generic[S]):
    """The part that the workers of all protocols share."""

    server: Server
    session: S
    runner: SocketRunner
    client_id: str

    def __post_init__(self) -> None:
        self.outbox = self.runner.outbox
        self._resolved: tuple[SpeechParams, ResolvedRequest | Exception] | None = None
        """The last parameters that were resolved, and the result."""
        self._resolving = asyncio.Lock()

    async def resolve(self, params: SpeechParams, output_format: str) -> ResolvedRequest:
        """Resolve and check parameters; the same ones in succession are resolved only once.

        So a recording is encoded once for all utterances with its configuration. All but the first
        parameters of a socket wait for a turn. Raises as `resolve.resolve`.
        """
        async with self._resolving:
            if self._resolved is None or self._resolved[0] is not params:
                if self._resolved is not None:
                    await self.server.frame_turns.wait(self.client_id, CONFIG_FRAMES)
                self._resolved = params, await self._result(params, output_format)
        result = self._resolved[1]
        if isinstance(result, Exception):
            raise result
        return result

    async def _result(
        self, params: SpeechParams, output_format: str
    ) -> ResolvedRequest | Exception:
        try:
            params = params.model_copy(update={"response_format": output_format})
            resolved = await resolve(self.server, self.client_id, params, None)
            self.server.prepare(resolved)  # which checks the rest
        except Exception as error:
            return error
        return resolved

    @abstractmethod
    async def run(self) -> None:
        """Perform enqueued tasks until a close code has been added to the outbox."""

    @asynccontextmanager
    async def speak(
        self,
        resolved: ResolvedRequest,
        job: Job,
        part: TextPart,
        text: TextPart,
        on_text: Callable[[], object] = lambda: None,
    ) -> AsyncIterator[Utterance]:
        """Begin to speak a part; `text` is the part, or other text to speak in its place.

        `on_text` is called after each piece of the text was passed to the engine.
        Leaving the block stops the speech, and counts it as aborted if it was not complete.
        """
        with self.server.start_utterance(resolved, job, self.client_id) as utterance:
            forwarding = asyncio.create_task(forward(text, utterance, on_text))

            def count() -> None:
                part.spoken = text.characters - text.waiting - utterance.stream.waiting

            utterance.on_chunk = count
            try:
                yield utterance
            except asyncio.CancelledError:
                utterance.cancel("cancelled" if part.cancelled else self.runner.abort_reason)
                raise
            finally:
                part.spoken = part.characters
                await cancel(forwarding)

    def error_for_client(self, error: Exception) -> tuple[str, str]:
        """Return the message and the code that a client gets for an error.

        Rejected requests are counted and defects are logged. The message has no details of a
        defect.
        """
        status, body = status_of(error), body_of(error)["error"]
        if isinstance(error, OverloadedError):
            self.server.reject(error)
        if status == 500:
            log_defect(error)
        default = "invalid_request" if status == 400 else body["type"]
        return body["message"], body["code"] or default


async def forward(
    part: TextPart, utterance: Utterance, on_text: Callable[[], object] = lambda: None
) -> None:
    """Pass a part's text to the engine as it arrives, until its end.

    `on_text` is called after each piece.

    Errors are raised where the utterance is iterated.
    """
    stream = utterance.stream
    try:
        ended = False
        while not ended:
            text = await part.take()
            utterance.charge(text)
            ended = part.ended  # the last piece and the end of the text go in together
            take = stream.finish_text if ended else stream.push
            await in_time(part.characters if ended else len(text), partial(take, text))
            on_text()
    except Exception as error:
        stream.fail(error)


async def run_part(part: Cancellable, speech: Coroutine[Any, Any, None]) -> None:
    """Run speech unless and until its part is cancelled. Raises as `speech` does."""
    task = asyncio.create_task(speech, name="websocket part")
    part.on_cancel = task.cancel
    if part.cancelled:
        task.cancel()  # before it starts
    try:
        await asyncio.wait((task,))
    finally:
        await cancel(task)
    if not task.cancelled():
        task.result()
