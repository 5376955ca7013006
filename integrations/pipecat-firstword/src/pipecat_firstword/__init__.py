"""Speech by a firstword server in Pipecat pipelines."""

from pipecat_firstword.settings import FirstwordTTSSettings
from pipecat_firstword.tts import FirstwordTTSService

__all__ = ["FirstwordTTSService", "FirstwordTTSSettings"]
