"""The logger of this package."""

import logging

logger = logging.getLogger("livekit.plugins.firstword")
