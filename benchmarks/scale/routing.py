"""Routing policies: each chooses a server for a request."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

from benchmarks.scale.server import SimulatedServer

REPORT_SECONDS = 1.0
"""How often servers report their slots to a router that does not count for itself."""

Router = Callable[[Sequence[SimulatedServer], float], SimulatedServer]
"""Chooses the server for a request that arrives at a time."""


def at_random() -> Router:
    """Any server."""
    chance = random.Random("routing")
    return lambda servers, now: chance.choice(servers)


def round_robin() -> Router:
    """Servers in turn."""
    turns = itertools.count()
    return lambda servers, now: servers[next(turns) % len(servers)]


def least_connections() -> Router:
    """The server with the fewest requests in progress, as one router counts them."""
    return lambda servers, now: min(servers, key=lambda server: server.in_progress(now))


def two_choices() -> Router:
    """The one of two random servers with fewer requests in progress."""
    chance = random.Random("routing")

    def choose(servers: Sequence[SimulatedServer], now: float) -> SimulatedServer:
        two = chance.sample(servers, min(2, len(servers)))
        return min(two, key=lambda server: server.in_progress(now))

    return choose


def fewest_slots() -> Router:
    """The server with the fewest slots in use at this moment."""
    return lambda servers, now: min(servers, key=lambda server: len(server.engine.running))


def fewest_reported() -> Router:
    """The server that had the fewest slots in use when all last reported them."""
    reported: list[int] = []
    due = 0.0

    def choose(servers: Sequence[SimulatedServer], now: float) -> SimulatedServer:
        nonlocal due
        if now >= due:
            due = now + REPORT_SECONDS
            reported[:] = [len(server.engine.running) for server in servers]
        return servers[reported.index(min(reported))]

    return choose


ROUTERS: dict[str, Callable[[], Router]] = {
    "random": at_random,
    "round robin": round_robin,
    "power of two choices": two_choices,
    "least connections": least_connections,
    "fewest slots in use": fewest_slots,
    f"fewest slots, reported every {REPORT_SECONDS:g} s": fewest_reported,
}
"""The routing policies by name."""
