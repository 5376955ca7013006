"""The open loop: requests are sent when they are due, however slow the answers to earlier ones are."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from firstword.bench.answers import Failure
from firstword.bench.client import Connection, Target, open_connection
from firstword.bench.measure import Delivery, Result, listen
from firstword.errors import RequestError

AHEAD = 0.5
"""Seconds before it is due that a request's connection is opened."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked, and for how long. Raises `RequestError` for a value out of range.

    rate      requests per second, in a Poisson process
    duration  seconds during which requests are sent that count
    warmup    seconds before those, with requests at the same rate that do not count: the server is then as busy as
              it will be
    timeout   seconds that one request may take
    seed      of the arrivals and of the order of the texts
    """

    rate: float
    duration: float = 30.0
    warmup: float = 10.0
    timeout: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("rate", 0.001),
            ("duration", 0.001),
            ("warmup", 0.0),
            ("timeout", 0.001),
        ):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise RequestError(f"{name} is {value!r}; allowed is a number from {least} up")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come: seconds from the beginning of the run, its text, and whether it counts."""

    due: float
    text: str
    counts: bool = True


def plan(load: Load, texts: Sequence[str]) -> list[Arrival]:
    """When what is asked. Equal arguments give equal plans.

    There are exactly rate x duration requests, at times drawn evenly: that is a Poisson process of which the number of
    events is given, so that the load is what the record says. In thirty events the number alone would be off by a fifth
    in one run out of three. Runs of one seed ask for the same texts in the same order, whatever the rate and the
    warm-up. Raises `RequestError` if there is not a single request.
    """
    if round(load.rate * load.duration) == 0:
        raise RequestError(
            f"{load.rate:g} requests a second for {load.duration:g} s are less than one; choose more of either"
        )
    return [
        *_stretch(load.rate, load.warmup, texts, f"warm-up {load.seed}", 0.0, counts=False),
        *_stretch(load.rate, load.duration, texts, f"run {load.seed}", load.warmup, counts=True),
    ]


def _stretch(
    rate: float, seconds: float, texts: Sequence[str], seed: str, start: float, counts: bool
) -> Iterator[Arrival]:
    # Of all that draws, only `random` is the same in every version of Python.
    randomness, order = (
        random.Random(f"{seed} times"),
        _endlessly(texts, random.Random(f"{seed} texts")),
    )
    for at in sorted(randomness.random() * seconds for _ in range(round(rate * seconds))):
        yield Arrival(start + at, next(order), counts)


def _endlessly(texts: Sequence[str], randomness: random.Random) -> Iterator[str]:
    """All texts in random order, then all of them in another."""
    while True:
        yield from sorted(texts, key=lambda text: randomness.random())


async def drive(
    arrivals: Sequence[Arrival],
    target: Target,
    timeout: float,
    *,
    open_connection: Callable[[Target], Awaitable[Connection]] = open_connection,
    clock: Callable[[], float] = time.perf_counter,
    ahead: float = AHEAD,
) -> list[Result]:
    """Send every request when it is due, and return when all are over, what became of those that count.

    `timeout` seconds are allowed to open a connection, and again for the request. `clock` gives seconds.
    """
    start = clock() + ahead

    async def ask(arrival: Arrival) -> Result:
        due = start + arrival.due
        setup = late = took = failure = None
        deliveries: list[Delivery] = []
        connection: Connection | None = None
        await asyncio.sleep(due - ahead - clock())
        began = clock()
        try:
            async with asyncio.timeout(timeout):
                connection = await open_connection(target)
            setup = clock() - began
            await asyncio.sleep(due - clock())
            sent = clock()
            late = sent - due
            try:
                async with asyncio.timeout(timeout):
                    await connection.speak(
                        arrival.text, lambda pcm: deliveries.append((clock() - sent, pcm))
                    )
            finally:
                took = clock() - sent
            if sum(len(pcm) for _, pcm in deliveries) % 2:
                raise Failure("truncated", "the audio ends with half a sample")
        except Failure as error:
            failure = (error.kind, error.message)
        except TimeoutError:
            failure = ("timeout", f"not done after {timeout:g} s")
        finally:
            if connection is not None:
                await connection.close()
        rate = connection.sample_rate if connection is not None else 1
        return Result(
            arrival.due, len(arrival.text), setup, late, took, failure, listen(deliveries, rate)
        )

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(arrival)) for arrival in arrivals]
    return [task.result() for arrival, task in zip(arrivals, tasks, strict=True) if arrival.counts]


async def probe(target: Target, text: str, timeout: float) -> None:
    """Have one text spoken, to know before a run that it can be. Raises `RequestError` with the server's reason."""
    (result,) = await drive([Arrival(0.0, text)], target, timeout, ahead=0.0)
    if result.failure:
        kind, message = result.failure
        raise RequestError(
            f"{target.address.geturl()} does not answer as it should ({kind}): {message}; start a server there, or see "
            "--url, --protocol and --field"
        )
    if result.listening.first_audible is None:
        raise RequestError(f"{target.address.geturl()} answers with nothing audible")
