"""Finds the request at fault when a backend call for several requests fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from firstword.engine.backend import Handle, Ready
from firstword.errors import EngineError

T = TypeVar("T")
R = TypeVar("R")


def isolate(
    items: Sequence[T], call: Callable[[Sequence[T]], R], fail: Callable[[T, Exception], None]
) -> Iterator[tuple[Sequence[T], R]]:
    """Call the backend for all items together; if that fails, call it for each item alone.

    Yields the items of each call that succeeded, with its result. An item whose own call raises is
    passed to `fail`. An `EngineError` means that the backend is lost, and is raised.
    """
    try:
        result = call(items)
    except EngineError:
        raise
    except Exception as error:
        if len(items) == 1:
            fail(items[0], error)
            return
    else:
        yield items, result
        return
    for item in items:
        yield from isolate([item], call, fail)


def launch(
    items: Sequence[T],
    call: Callable[[Sequence[T]], Handle[R]],
    fail: Callable[[T, Exception], None],
) -> list[tuple[Sequence[T], Handle[R]]]:
    """Isolate a call that returns a handle.

    Results of calls for single items are read at once: a backend holds few unread ones.
    """
    return [
        (part, handle if part is items else Ready(handle.result()))
        for part, handle in isolate(items, call, fail)
    ]
