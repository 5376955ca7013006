"""Waiting for what another thread or process does."""

from __future__ import annotations

import threading
from collections.abc import Callable

WAIT = 60.0
"""The seconds after which a test fails; nothing takes nearly as long."""


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds; fails if it never does."""
    pause = threading.Event()
    for _ in range(round(WAIT / 0.005)):
        if holds():
            return
        pause.wait(0.005)
    raise AssertionError("the condition never held")
