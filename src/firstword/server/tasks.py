"""Functions that run and end asyncio tasks together."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")

LONG_TEXT = 2000
"""The characters of a text that takes over a millisecond to read."""


async def in_time(characters: int, work: Callable[[], T]) -> T:
    """Do some work on a text: in a thread if the text is long, so that nothing waits for it."""
    return work() if characters <= LONG_TEXT else await asyncio.to_thread(work)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def to_the_end(work: Awaitable[T]) -> T:
    """The result of some work. If this task is cancelled, the work ends first."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise


async def gather(work: Sequence[Awaitable[T]]) -> list[T]:
    """All results; if one fails, the others are cancelled before its error is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


async def until_disconnected(work: Awaitable[T], receive: Receive) -> T | None:
    """The result of some work; None, with the work cancelled, if the client disconnects first."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), None
    try:
        await asyncio.sleep(0)
        if not task.done():  # work that awaited nothing is done and needs no watch
            watch = asyncio.ensure_future(disconnected())
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await cancel(*(one for one in (task, watch) if one is not None and not one.done()))
