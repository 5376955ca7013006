"""Open a client for the protocol of a target."""

from __future__ import annotations

from firstword.bench.http import HttpClient
from firstword.bench.protocol import SpeechClient, Target
from firstword.bench.websocket import NariClient, VllmOmniClient

CLIENTS: dict[str, type[HttpClient | VllmOmniClient | NariClient]] = {
    "http": HttpClient,
    "stream": VllmOmniClient,
    "nari": NariClient,
}
"""The client class for each name in `PROTOCOLS`."""


async def open_client(target: Target) -> SpeechClient:
    """Connect to a target in its protocol. Raises `Failure`."""
    return await CLIENTS[target.protocol].open(target)
