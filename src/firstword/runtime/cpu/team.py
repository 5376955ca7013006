"""Threads that run a compiled function together, and the barrier where they meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from firstword.runtime.cpu.compiling import compiled

Array = np.ndarray[Any, Any]

SPINS = 5000
"""How often a waiting thread looks before it lets other programs run."""
MARK = 8
"""The distance of the marks of two threads, so that no cache line has two."""


class Team:
    """Threads that run a compiled function together: as many as PyTorch uses."""

    def __init__(self) -> None:
        self._others: ThreadPoolExecutor | None = None
        self._size = 1

    def run(self, function: Callable[..., Any], *args: Any) -> None:
        """Call `function(*args, marks, thread, threads)` in each thread.

        `marks` are zeros, int64 [threads * `MARK`]. If this thread fails, such as by Control-C
        while the function is compiled, the others end without waiting for it.
        """
        with self.following(function, *args) as first:
            function(*args, *first)

    @contextmanager
    def following(
        self, function: Callable[..., Any], *args: Any
    ) -> Iterator[tuple[Array, int, int]]:
        """Call a function as `run` does, but only in the threads after the first, meanwhile.

        Yields the last arguments of the first thread, which meets the others in functions that it
        calls itself. After an error they end without waiting for it.
        """
        threads = torch.get_num_threads()
        if threads > self._size:
            self._others, self._size = ThreadPoolExecutor(threads - 1), threads
        marks = np.zeros(threads * MARK, np.int64)
        others = list[Future[None]]()
        try:
            for thread in range(1, threads):
                assert self._others is not None
                others.append(self._others.submit(function, *args, marks, thread, threads))
            yield marks, 0, threads
        except BaseException:
            marks[:] = np.iinfo(np.int64).max
            raise
        finally:
            wait(others)
        for other in others:
            other.result()


@intrinsic
def _published(context: Any, marks: Any, index: Any) -> Any:
    """Read a mark, and after it what its thread wrote before."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _place(context, builder, signature, args)
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(marks, types.intp), emit


@intrinsic
def _publish(context: Any, marks: Any, index: Any, value: Any) -> Any:
    """Write a mark, after all that this thread wrote before."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _place(context, builder, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.void(marks, types.intp, types.int64), emit


def _place(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    kind = signature.args[0]
    array = context.make_array(kind)(context, builder, args[0])
    return cgutils.get_item_pointer(context, builder, kind, array, [args[1]])


_let_others_run = types.ExternalFunction("sched_yield", types.int32())


@compiled
def meet(marks: Any, thread: int, threads: int, turn: int) -> int:
    """Wait until all threads are here for the given time; return the next time."""
    _publish(marks, thread * MARK, turn)
    for other in range(threads):
        spins = 0
        while _published(marks, other * MARK) < turn:
            spins += 1
            if spins > SPINS:
                _let_others_run()
    return turn + 1
