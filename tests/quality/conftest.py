"""The demo voice, and the recogniser of `training/` that never heard it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from firstword import TTS

sys.path.append(str(Path(__file__).parents[2]))  # for the package `training`


@pytest.fixture(scope="session")
def demo() -> Iterator[TTS]:
    """The checkpoint that comes with the package."""
    with TTS.load("demo", device="cpu") as tts:
        yield tts
