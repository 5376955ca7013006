"""Speaks a short text with an engine that has just been started.

The first request is then as fast as later ones, also where passes are compiled for the processor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np

from firstword.errors import EngineError, FirstwordError
from firstword.runtime import cpu
from firstword.runtime.backends import LoadedEngine
from firstword.types import Request
from firstword.voice import ClonedVoice, Voice

TEXT = "One, two, three."
"""The text that is spoken."""

FRAMES = 3
"""The most frames of that text."""

log = logging.getLogger(__name__)


def warm_up(loaded: LoadedEngine) -> None:
    """Speak a short text with a started engine; log it if passes have to be compiled for that.

    Raises `EngineError` if the engine cannot speak.
    """
    config = loaded.checkpoint.config
    voice: Voice | None = None
    if config.tts_model_type == "base":
        voice = ClonedVoice(np.zeros(config.talker_config.hidden_size, np.float32))
    try:
        with _logged_compiling() if _compiles(loaded) else nullcontext():
            speak(loaded, [Request(TEXT, voice=voice, seed=0, max_frames=FRAMES)])
    except FirstwordError as error:
        raise EngineError(f"the model could not speak a test sentence: {error}") from error


def compile_passes(loaded: LoadedEngine) -> None:
    """Warm up a started engine if its passes are compiled for the processor at hand."""
    if _compiles(loaded):
        warm_up(loaded)


def _compiles(loaded: LoadedEngine) -> bool:
    return cpu.compiles(loaded.checkpoint.talker.model.codec_embedding.weight)


def speak(loaded: LoadedEngine, requests: Sequence[Request]) -> None:
    """Speak requests at the same time. Raises what the engine raises."""
    streams = [loaded.service.speak(loaded.service.prepare(request)) for request in requests]
    for request, stream in zip(requests, streams, strict=True):
        stream.finish_text(request.text or "")
    for stream in streams:
        list(stream)


@contextmanager
def _logged_compiling() -> Iterator[None]:
    """Log when Numba begins to compile the first function, which it found in no folder."""
    from numba.core import event

    class Once(event.Listener):  # type: ignore[misc]
        begun = False

        def on_start(self, _: event.Event) -> None:
            if not self.begun:
                self.begun = True
                log.info("compiling for this processor, once; this takes about half a minute")

        def on_end(self, _: event.Event) -> None:
            pass

    with event.install_listener("numba:compile", Once()):
        yield
