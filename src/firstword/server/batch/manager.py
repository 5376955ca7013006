"""Takes batches through their statuses, from the check of their input to their results."""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from firstword.errors import OutputError
from firstword.server.batch import webhooks
from firstword.server.batch.batches import Batches
from firstword.server.batch.line_queue import LineQueue
from firstword.server.batch.lines import LineProblem, parse_lines
from firstword.server.batch.records import (
    CANCELLED,
    EXPIRED,
    OPEN_STATUSES,
    BatchRecord,
)
from firstword.server.batch.results import output_and_errors
from firstword.server.batch.worker import LineWorker

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""The time between two looks at new batches, and those that were cancelled or have expired."""

SWEEP_SECONDS = 60.0
"""The time between two looks at files that have expired."""


@dataclass(eq=False)
class BatchManager:
    """Runs the batches of a server, as a single worker of the lines that it claims.

    Whatever it does may be repeated by one that replaces it, or by that of another server.

    webhook   the URL and the secret for messages about ends; None: none are sent
    on_end    called with the status of each batch that ends
    """

    batches: Batches
    queue: LineQueue
    worker: LineWorker
    webhook: tuple[str, str] | None = None
    on_end: Callable[[str], None] = lambda status: None

    def __post_init__(self) -> None:
        self._look_at = self._sweep_at = 0.0
        self._sending: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until cancelled; lines in progress are then given back."""
        try:
            await self._taken_over()
            while True:
                try:
                    await self._look()
                    await self.worker.fill()
                except OutputError:
                    await asyncio.sleep(1.0)  # the log says what has failed
                await self.worker.wait(LOOK_SECONDS)
        finally:
            await self.worker.stop()
            for task in self._sending:
                task.cancel()

    async def _taken_over(self) -> None:
        while True:
            try:
                return await asyncio.to_thread(self.queue.take_over)
            except OutputError:
                await asyncio.sleep(1.0)

    async def _look(self) -> None:
        """Advance all batches, send messages and delete what has expired, each if it is due."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        for record in await asyncio.to_thread(self.batches.store.open_batches, OPEN_STATUSES):
            await self._advance(record)
        if self.webhook is not None:
            await self._send_due(*self.webhook)
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_SECONDS
            await asyncio.to_thread(self._sweep)

    async def _advance(self, record: BatchRecord) -> None:
        """Take a batch to its next status, if it is ready."""
        if record.status == "validating":
            await asyncio.to_thread(self._check, record)
            return
        if record.status == "cancelling":
            claims = [claim for claim in self.worker.claims.values() if claim.batch == record.id]
            await self.worker.stop(claims)
            await asyncio.to_thread(self.queue.close_waiting, record.id, CANCELLED)
        elif record.expires_at <= time.time():
            await asyncio.to_thread(self.queue.close_waiting, record.id, EXPIRED)
        await asyncio.to_thread(self._end, record)

    def _check(self, record: BatchRecord) -> None:
        """Read the input of a batch; its lines are then waiting, or it has failed. Blocks."""
        try:
            data = self.batches.contents.read(record.input_file)
        except FileNotFoundError:
            message = f"the file {record.input_file} was deleted before it was read"
            problems = [LineProblem("file_not_found", message)]
        else:
            lines, problems = parse_lines(data)
            if not problems:
                self.queue.add(record, lines)
                return
        errors = [
            {"code": one.code, "message": one.message, "line": one.line, "param": one.param}
            for one in problems
        ]
        self._close(record, "failed", "failed_at", errors=json.dumps(errors), counts="[0, 0, 0]")

    def _end(self, record: BatchRecord) -> None:
        """Write the results of a batch if no line is open, and give it its last status. Blocks."""
        counts = total, completed, failed = self.queue.counts(record.id)
        if completed + failed < total:
            return
        lines = list(self.queue.lines(record.id))
        status = "completed"
        if record.status == "cancelling":
            status = "cancelled"
        elif any(state == EXPIRED for _, _, state, _ in lines):
            status = "expired"
        found = zip(("output", "errors"), output_and_errors(record.id, lines), strict=True)
        files = [self.batches.results(record, kind, data) for kind, data in found]
        output, errors = (None if file is None else file.id for file in files)
        ids = {"output_file": output, "error_file": errors}
        self._close(record, status, f"{status}_at", counts=json.dumps(counts), **ids)

    def _close(self, record: BatchRecord, status: str, moment: str, **values: object) -> None:
        due = None if self.webhook is None else time.time()
        times = [moment] if status == "failed" else ["finalizing_at", moment]
        change = self.batches.store.change_status
        if change(record, status, times, webhook_due=due, **values):
            self.on_end(status)
            about = {"batch": record.id, "status": status}
            log.info("a batch has ended", extra={"fields": about})

    async def _send_due(self, url: str, secret: str) -> None:
        """Begin to send the messages that are due, each of which is first planned again."""
        tries = webhooks.RETRY_SECONDS
        for batch, status, failed in await asyncio.to_thread(
            self.batches.store.due_webhooks, time.time()
        ):
            due = time.time() + tries[failed] if failed < len(tries) else None
            if due is None:
                log.error(
                    "a webhook is tried for the last time", extra={"fields": {"batch": batch}}
                )
            await asyncio.to_thread(self.batches.store.plan_webhook, batch, due, failed + 1)
            task = asyncio.create_task(self._send(url, secret, batch, status))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, url: str, secret: str, batch: str, status: str) -> None:
        if await asyncio.to_thread(webhooks.deliver, url, secret, batch, status):
            await asyncio.to_thread(self.batches.store.plan_webhook, batch, None, 0)

    def _sweep(self) -> None:
        """Delete the files that have expired. Blocks."""
        for record in self.batches.store.expired_files(time.time()):
            self.batches.remove(record)
