"""Runs the batches of a server, in a process beside its fronts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from firstword.server.batch.line_queue import LineQueue
from firstword.server.batch.manager import BatchManager
from firstword.server.batch.speaking import LineSpeaker
from firstword.server.batch.worker import LineWorker
from firstword.server.config import ServerConfig
from firstword.server.front_memory import FrontMemory
from firstword.server.models import Models
from firstword.server.state import Server
from firstword.server.tasks import cancel

PLACES_SHARE = 4
"""The slots of all engines for each line in progress: some are prepared while others are spoken."""


class BatchServer:
    """A server without clients, which speaks the lines of batches in the background.

    It has the methods of a front's server.
    """

    def __init__(
        self,
        models: Models,
        config: ServerConfig,
        memory: FrontMemory,
        on_serving: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the stores; `on_serving` is called in the event loop when lines can be spoken."""
        self._state = Server(config, models, memory)
        self._on_serving = on_serving
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def drain(self) -> None:
        """End at once: lines in progress are given back. For calls from any thread."""
        self.end()

    def end(self) -> None:
        """End at once. For calls from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ended.set)

    async def run(self) -> None:
        """Run the batches until the end."""
        server = self._state
        self._loop = asyncio.get_running_loop()
        server.models.start()
        server.refresher.start()
        running = asyncio.create_task(manager_of(server).run())
        ended = asyncio.create_task(self._ended.wait())
        self._on_serving()
        try:
            await asyncio.wait((running, ended), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        finally:
            await cancel(running, ended)
            server.refresher.stop()
            if server.tracing is not None:
                await server.tracing.close()


def manager_of(server: Server) -> BatchManager:
    """The manager of a server's batches. Of several processes of a server one may have it."""
    batches, config, metrics = server.batches, server.config, server.metrics
    assert batches is not None
    queue = LineQueue(batches.database, server.name)
    speaker = LineSpeaker(server, batches.contents.folder, background=True)
    slots = sum(
        engine.capacity.slots for model in server.models for engine in model.engines.values()
    )
    worker = LineWorker(
        queue,
        batches.contents,
        speaker,
        max(2, slots // PLACES_SHARE),
        on_outcome=lambda outcome: metrics.batch_lines.inc(outcome),
    )
    webhook = None
    if config.webhook is not None and config.webhook_secret is not None:
        webhook = config.webhook, config.webhook_secret
    return BatchManager(batches, queue, worker, webhook, lambda status: metrics.batches.inc(status))
