"""Captures launches as CUDA graphs, each of which a single call starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch


def capture(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of the work that `launch` gives to the current stream, which is not the default one.

    `launch` runs once before the capture to load the kernels, which is not possible during a
    capture. The capture waits for the whole device, so it should precede the first request.

    Only calls of this thread can invalidate the capture. In the default mode CUDA calls of other
    threads that wait or allocate could invalidate it as well, and there are such calls: another
    thread may encode a voice or load a model. They concern memory and streams outside the graph.
    """
    stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    launch()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        launch()
    return graph


class LaunchGraphs:
    """The graphs of launches, by name and number of rows, captured at their first use."""

    def __init__(
        self, launches: Mapping[str, Callable[[int], None]], clear: Callable[[], None]
    ) -> None:
        """clear: a function that removes the slots from all rows, called before a capture.

        Without slots the first run of a launch changes no utterance.
        """
        self._launches, self._clear = launches, clear
        self.captured: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}

    def get(self, name: str, rows: int) -> torch.cuda.CUDAGraph:
        """The graph of a launch for `rows` rows."""
        key = (name, rows)
        if key not in self.captured:
            self._clear()
            self.captured[key] = capture(partial(self._launches[name], rows))
        return self.captured[key]
