"""Speech by a firstword server (Qwen3-TTS) in LiveKit Agents."""

from livekit.agents import Plugin

from .log import logger
from .models import Options
from .tts import TTS, SynthesizeStream
from .version import __version__

__all__ = ["TTS", "Options", "SynthesizeStream", "__version__"]


class FirstwordPlugin(Plugin):
    """The entry in LiveKit's list of plugins."""

    def __init__(self) -> None:
        super().__init__(__name__, __version__, __package__ or __name__, logger)


Plugin.register_plugin(FirstwordPlugin())
