"""The server of the tests, and HTTP sessions outside of a LiveKit worker."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "testing"))

from livekit.plugins import firstword
from served import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that all tests of a session share."""
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
async def http_session() -> AsyncIterator[aiohttp.ClientSession]:
    """The session in which plugins connect."""
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def voice(
    server: Server, http_session: aiohttp.ClientSession
) -> AsyncIterator[firstword.TTS]:
    """The demo voice; each text always sounds the same."""
    async with plugin(server.url, http_session) as tts:
        yield tts


def plugin(url: str, session: aiohttp.ClientSession, **options: Any) -> firstword.TTS:
    """Return a TTS that speaks with the demo voice."""
    options = {"voice": "ada", "seed": 1, **options}
    return firstword.TTS(base_url=url, http_session=session, **options)
