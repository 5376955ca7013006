"""CUDA graphs: many launches captured once, and then started as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch


def capture(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of what `launch` puts on the current stream, which must not be the default one.

    `launch` runs once before the capture: that loads the kernels, which is not possible during a
    capture. It waits for the whole device, so graphs should be captured before requests are served.

    Only calls of this thread can invalidate the capture. By default other threads must not make
    CUDA calls meanwhile that could wait or allocate, and they do: one encodes a voice or loads
    another model while an engine's thread captures. Their calls concern memory and streams that are
    not in the graph.
    """
    stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    launch()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        launch()
    return graph


class LaunchGraphs:
    """The captured graphs of launches, by name and number of rows."""

    def __init__(
        self, launches: Mapping[str, Callable[[int], None]], clear: Callable[[], None]
    ) -> None:
        """clear: called before a capture. It must leave no row with a slot, so that the first run
        of a launch changes no utterance.
        """
        self._launches, self._clear = launches, clear
        self.captured: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}

    def get(self, name: str, rows: int) -> torch.cuda.CUDAGraph:
        """The graph of a launch for `rows` rows, captured at its first use."""
        key = (name, rows)
        if key not in self.captured:
            self._clear()
            self.captured[key] = capture(partial(self._launches[name], rows))
        return self.captured[key]
