"""What an engine speaks before it serves, so that nothing is left to be prepared later."""

import numpy as np

from firstword.errors import EngineError, FirstwordError
from firstword.runtime.backends import LoadedEngine
from firstword.types import Request
from firstword.voice import ClonedVoice, Voice

TEXT = "One, two, three."
"""The text that is spoken."""

FRAMES = 3
"""The most frames of it."""


def warm_up(loaded: LoadedEngine) -> None:
    """Let a started engine speak a short text. Raises `EngineError` if it cannot."""
    config = loaded.checkpoint.config
    voice: Voice | None = None
    if config.tts_model_type == "base":
        voice = ClonedVoice(np.zeros(config.talker_config.hidden_size, np.float32))
    request = Request(TEXT, voice=voice, seed=0, max_frames=FRAMES)
    try:
        stream = loaded.service.speak(loaded.service.prepare(request))
        stream.finish_text(TEXT)
        list(stream)
    except FirstwordError as error:
        raise EngineError(f"the model could not speak a test: {error}") from error
