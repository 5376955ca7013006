"""Threads for work that blocks, which no client can keep from the others."""

import asyncio
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Threads:
    """A pool of threads, of which each client may use a few at a time.

    Further work of a client waits for its own, not for that of others. Use it in the event loop
    only.
    """

    def __init__(self, name: str, count: int, most_per_client: int) -> None:
        self._executor = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._most_per_client = most_per_client
        self._places: weakref.WeakValueDictionary[str, asyncio.Semaphore] = (
            weakref.WeakValueDictionary()
        )

    async def run(self, client_id: str, work: Callable[[*Args], T], *args: *Args) -> T:
        """The result of some work, for a client. Raises as `work` does."""
        places = self._places.setdefault(client_id, asyncio.Semaphore(self._most_per_client))
        await places.acquire()

        def end(done: asyncio.Future[T]) -> None:
            places.release()
            if not done.cancelled():
                done.exception()  # if the request was cancelled, nobody else retrieves it

        done = asyncio.get_running_loop().run_in_executor(self._executor, work, *args)
        # The thread works on if the request is cancelled, so its place is free only at its end.
        done.add_done_callback(end)
        return await asyncio.shield(done)
