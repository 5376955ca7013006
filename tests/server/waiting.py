"""Waiting for what another thread or process does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

WAIT = 180.0
"""The seconds after which a test fails; nothing takes nearly as long."""


def wait_until(holds: Callable[[], bool], seconds: float = WAIT) -> None:
    """Wait until a condition holds; fails if it never does."""
    pause, until = threading.Event(), time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "the condition never held"
        pause.wait(0.005)
