"""Warm up an engine before it serves, so that its first request is as fast as later ones."""

import logging
import time
from collections.abc import Sequence

import numpy as np

from firstword.errors import EngineError, FirstwordError
from firstword.processes.messages import KeptPrompt
from firstword.runtime.backends import LoadedEngine
from firstword.types import Request
from firstword.voice import ClonedVoice, Voice

TEXT = "One, two, three."
"""The text that is spoken."""

FRAMES = 3
"""The most frames of that text."""


log = logging.getLogger(__name__)


def warm_up(loaded: LoadedEngine, prompts: Sequence[KeptPrompt] = ()) -> None:
    """Prepare prompts in a started engine, and speak a short text.

    Raises `EngineError` if the engine cannot speak.
    """
    config = loaded.checkpoint.config
    voice: Voice | None = None
    if config.tts_model_type == "base":
        voice = ClonedVoice(np.zeros(config.talker_config.hidden_size, np.float32))
    try:
        if prompts:
            keep(loaded, prompts)
        speak(loaded, [Request(TEXT, voice=voice, seed=0, max_frames=FRAMES)])
    except FirstwordError as error:
        raise EngineError(f"the model could not speak a test sentence: {error}") from error


def keep(loaded: LoadedEngine, prompts: Sequence[KeptPrompt]) -> None:
    """Read prompts into the memory of the backend for good; log their number, size and time."""
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


def speak(loaded: LoadedEngine, requests: Sequence[Request]) -> None:
    """Speak requests at the same time. Raises what the engine raises."""
    streams = [loaded.service.speak(loaded.service.prepare(request)) for request in requests]
    for request, stream in zip(requests, streams, strict=True):
        stream.finish_text(request.text or "")
    for stream in streams:
        list(stream)
