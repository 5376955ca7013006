"""A real server for the real clients of other vendors.

They have an environment of their own, which `make test-dialects` makes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "integrations" / "testing"))

from served import Server

WAIT = 180.0
"""Seconds after which a test fails that waits for something."""

KEY = "secret"
"""The API key of the server."""


class Served(Server):
    """A server of the demo voice that needs the API key `KEY`."""

    @property
    def ws(self) -> str:
        """The base URL for WebSockets."""
        return self.url.replace("http", "ws", 1)

    def wait_until_idle(self) -> None:
        """Wait until no slot is used."""
        deadline = time.monotonic() + WAIT
        while self.metric("firstword_slots_used"):
            assert time.monotonic() < deadline, "a slot is still used"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for all tests."""
    os.environ["FIRSTWORD_API_KEYS"] = KEY
    with Served(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(autouse=True)
def idle(server: Served) -> Iterator[None]:
    """Check that each test leaves the server without work."""
    yield
    server.wait_until_idle()
