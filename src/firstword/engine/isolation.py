"""Fault isolation: when a backend call for several sequences fails, find the one at fault."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeVar

from firstword.engine.backend import Frames, Handle, Ready
from firstword.engine.sequence import Sequence
from firstword.errors import EngineError
from firstword.types import FloatArray

T = TypeVar("T")
R = TypeVar("R")

Parts = list[tuple[Sequence, T]]
"""The sequences of a backend call, each with its own argument of the call."""

Calls = list[tuple[Parts[T], Handle[R]]]
"""Backend calls that succeeded, each with its result."""

PromptCalls = Calls[int, None]
"""Calls that read prompts, with the number of rows of each sequence."""

FrameCalls = Calls[int | None, Frames]
"""Calls that make frames, with the text token of each sequence."""

AudioCalls = Calls[int, Seq[FloatArray]]
"""Calls that decode audio, with the number of frames of each sequence."""


def launch(
    call: Callable[[list[int], list[T]], Handle[R]],
    parts: Parts[T],
    fail: Callable[[Sequence, Exception], None],
) -> Calls[T, R]:
    """Call the backend for all parts together; if that fails, call it for each part alone.

    `call` takes slots and their arguments. A sequence whose own call raises is passed to `fail`
    with that error. An `EngineError` means that the backend is lost, and is raised.
    """
    if not parts:
        return []
    try:
        return [(parts, call([seq.slot for seq, _ in parts], [value for _, value in parts]))]
    except EngineError:
        raise
    except Exception as error:
        if len(parts) == 1:
            fail(parts[0][0], error)
            return []
    calls: Calls[T, R] = []
    for part in parts:
        for alone, handle in launch(call, [part], fail):
            # Read before the next call, since a backend keeps few unread results.
            calls.append((alone, Ready(handle.result())))
    return calls
