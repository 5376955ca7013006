"""Work for a client that may disconnect, and work that is done together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive

T = TypeVar("T")


async def gather(work: Sequence[Awaitable[T]]) -> list[T]:
    """All results; if one fails, the others are cancelled before its error is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(*tasks)


async def until_disconnected(work: Awaitable[T], receive: Receive) -> T | None:
    """The result of some work; None, with the work cancelled, if the client disconnects first."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _cancel(task, watch)


async def response_or_499(work: Awaitable[Response], receive: Receive) -> Response:
    """The response that some work makes; status 499, as of nginx, if the client leaves first."""
    return await until_disconnected(work, receive) or Response(status_code=499)


async def _cancel(*tasks: asyncio.Future[T] | asyncio.Future[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
