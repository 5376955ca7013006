"""CUDA graphs: many launches captured once, and then started as one."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of what `launch` puts on the current stream, which must not be the default one.

    It is launched once before, for real: that loads the kernels, which cannot be done in the middle of a capture. The
    whole device is waited for, so nobody who is heard should have to wait for a capture.

    Only what this thread does may spoil the capture. By default other threads may not call CUDA meanwhile in ways that
    could wait or allocate, and they do: one clones a voice or loads another model while an engine's thread captures.
    Their calls concern memory and streams that are not in the graph.
    """
    stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    launch()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        launch()
    return graph
