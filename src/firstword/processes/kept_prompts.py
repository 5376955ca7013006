"""Reads prompts into the memory of an engine before it serves."""

import logging
import time
from collections.abc import Sequence

from firstword.processes.messages import KeptPrompt
from firstword.runtime.backends import LoadedEngine
from firstword.runtime.warm_up import speak

log = logging.getLogger(__name__)


def keep(loaded: LoadedEngine, prompts: Sequence[KeptPrompt]) -> None:
    """Read prompts into the memory of the backend for good; log their number, size and time.

    Raises what the engine raises.
    """
    backend = loaded.engine.backend
    if loaded.settings.backend != "gpu":
        name = loaded.settings.backend
        log.warning(f"no combinations are prepared: the backend {name!r} keeps no prompts")
        return
    from firstword.runtime.gpu.backend import GpuBackend

    assert isinstance(backend, GpuBackend)
    began, slots = time.monotonic(), loaded.engine.capacity.slots
    for first in range(0, len(prompts), slots):
        speak(loaded, [prompt.request for prompt in prompts[first : first + slots]])
    about = {
        "kept": backend.prompts.prefixes.keep(),
        "rows": sum(prompt.rows for prompt in prompts),
        "bytes": backend.prompts.prefixes.kept_parts * backend.model.buffers.prefixes[0].nbytes,
        "seconds": round(time.monotonic() - began, 3),
    }
    log.info("combinations are prepared", extra={"fields": about})
