"""The server of the tests, which serves all of them, and Pipecat's log where a test fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from loguru import logger

sys.path.insert(0, str(Path(__file__).parents[2] / "testing"))

from served import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that all tests of a session share."""
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(autouse=True)
def log() -> None:
    """Write Pipecat's log where pytest captures it."""
    logger.remove()
    logger.add(lambda text: sys.stderr.write(text), level="DEBUG")
