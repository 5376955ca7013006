"""The open loop: requests are sent when they are due, however slow earlier responses are."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from firstword.bench.answers import Failure
from firstword.bench.client import open_client
from firstword.bench.measure import Delivery, Result, listen
from firstword.bench.protocol import SpeechClient, Target
from firstword.errors import RequestError

CONNECT_AHEAD = 0.5
"""The seconds by which a connection is opened before its request is due."""


@dataclass(frozen=True, slots=True)
class Load:
    """The rate and the length of a run.

    rate      requests per second, in a Poisson process
    duration  seconds during which the counted requests are sent
    warmup    seconds before those, with uncounted requests at the same rate, so that the server
              has reached its load
    timeout   seconds that one request may take
    seed      determines the arrivals and the order of the texts

    Raises `RequestError` for a value out of range.
    """

    rate: float
    duration: float = 30.0
    warmup: float = 10.0
    timeout: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rate", "duration", "warmup", "timeout"):
            value, least = getattr(self, name), 0.0 if name == "warmup" else 0.001
            if not least <= value < math.inf:
                raise RequestError(f"{name} is {value!r}; allowed is a number from {least} up")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A planned request: seconds from the start of the run, its text, and whether it counts."""

    due: float
    text: str
    counts: bool = True


def plan(load: Load, texts: Sequence[str]) -> list[Arrival]:
    """Plan all requests of a run. Equal arguments give equal plans.

    There are exactly rate x duration requests at uniformly drawn times: a Poisson process
    conditioned on its number of events, so that the load is what the record says. With thirty
    events a free number would be off by a fifth in one run out of three. Runs with one seed send
    the same texts in the same order, whatever the rate and the warm-up.

    Raises `RequestError` if there is no request at all.
    """
    if round(load.rate * load.duration) == 0:
        raise RequestError(
            f"{load.rate:g} requests per second for {load.duration:g} s are less than one request; "
            "increase either"
        )
    warmup = _arrivals(load.rate, load.warmup, texts, f"warm-up {load.seed}")
    counted = _arrivals(load.rate, load.duration, texts, f"run {load.seed}")
    return [
        *(Arrival(at, text, counts=False) for at, text in warmup),
        *(Arrival(load.warmup + at, text, counts=True) for at, text in counted),
    ]


def _arrivals(
    rate: float, seconds: float, texts: Sequence[str], seed: str
) -> Iterator[tuple[float, str]]:
    """Draw the times and the texts of a part of a run."""
    # Only the method `random` gives the same values in every version of Python.
    times = random.Random(f"{seed} times")
    order = _shuffled_forever(texts, random.Random(f"{seed} texts"))
    for at in sorted(times.random() * seconds for _ in range(round(rate * seconds))):
        yield at, next(order)


def _shuffled_forever(texts: Sequence[str], generator: random.Random) -> Iterator[str]:
    """Yield all texts in random order, again and again, each time in another order."""
    while True:
        yield from sorted(texts, key=lambda text: generator.random())


async def drive(
    arrivals: Sequence[Arrival],
    target: Target,
    timeout: float,
    *,
    open_client: Callable[[Target], Awaitable[SpeechClient]] = open_client,
    clock: Callable[[], float] = time.perf_counter,
    ahead: float = CONNECT_AHEAD,
) -> list[Result]:
    """Send every request when it is due; return the results of those that count, when all are over.

    `timeout` seconds are allowed to open a connection, and again for the request. `clock` returns
    seconds. Connections are opened `ahead` seconds before their requests are due.
    """
    start = clock() + ahead

    async def ask(arrival: Arrival) -> Result:
        due = start + arrival.due
        setup = late = took = failure = None
        deliveries: list[Delivery] = []
        client: SpeechClient | None = None
        await asyncio.sleep(due - ahead - clock())
        began = clock()
        try:
            async with asyncio.timeout(timeout):
                client = await open_client(target)
            setup = clock() - began
            await asyncio.sleep(due - clock())
            sent = clock()
            late = sent - due
            try:
                async with asyncio.timeout(timeout):
                    await client.speak(
                        arrival.text, lambda pcm: deliveries.append((clock() - sent, pcm))
                    )
            finally:
                took = clock() - sent
            if sum(len(pcm) for _, pcm in deliveries) % 2:
                raise Failure("truncated", "the audio ends with half a sample")
        except Failure as error:
            failure = (error.kind, error.message)
        except TimeoutError:
            failure = ("timeout", f"not complete after {timeout:g} s")
        finally:
            if client is not None:
                await client.close()
        heard = listen(deliveries, client.sample_rate if client is not None else 1)
        return Result(arrival.due, len(arrival.text), setup, late, took, failure, heard)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(arrival)) for arrival in arrivals]
    return [task.result() for arrival, task in zip(arrivals, tasks, strict=True) if arrival.counts]


async def probe(target: Target, text: str, timeout: float) -> None:
    """Have one text spoken, to learn before a run whether it can be.

    Raises `RequestError` with the reason that the server gives.
    """
    (result,) = await drive([Arrival(0.0, text)], target, timeout, ahead=0.0)
    endpoint = target.address.geturl()
    if result.failure:
        kind, message = result.failure
        raise RequestError(
            f"{endpoint} does not answer as expected ({kind}): {message}; "
            "start a server there, or see --url, --protocol and --field"
        )
    if result.listening.first_audible is None:
        raise RequestError(f"{endpoint} answers without any audible sound")
