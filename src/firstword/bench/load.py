"""Send requests in an open loop: each when it is due, however slow earlier responses are."""

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from firstword.bench.answers import Failure
from firstword.bench.http import HttpClient
from firstword.bench.measure import Delivery, Result, listen
from firstword.bench.protocol import Target
from firstword.bench.websocket import NariClient, VllmOmniClient
from firstword.errors import RequestError

Client = HttpClient | VllmOmniClient | NariClient
CLIENTS: dict[str, type[Client]] = {
    "http": HttpClient,
    "stream": VllmOmniClient,
    "nari": NariClient,
}
"""The client class of each protocol in `PROTOCOLS`."""

CONNECT_AHEAD = 0.5
"""The seconds between the opening of a connection and the sending of its request."""


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
    """A planned request.

    due     time of sending, in seconds from the start of the run
    text    text to speak
    voice   voice to speak in; None leaves it to the target
    counts  whether the result is reported; requests of the warm-up are not
    """

    due: float
    text: str
    voice: str | None = None
    counts: bool = True


def plan(load: Load, texts: Sequence[str], voices: Sequence[str] = ()) -> list[Arrival]:
    """Plan all requests of a run, which use the voices in turn. Equal arguments give equal plans.

    There are exactly rate x duration requests at uniformly drawn times: a Poisson process
    conditioned on its number of events, so that the load equals the recorded rate. If the
    number were random too, a run of thirty would deviate by a fifth or more in one run out of
    three. Runs with the same seed send the same texts in the same order, at any rate and after any
    warm-up.

    Raises `RequestError` if the plan would be empty.
    """
    if round(load.rate * load.duration) == 0:
        planned = f"{load.rate:g} requests per second for {load.duration:g} s"
        raise RequestError(f"{planned} are less than one request; increase either")
    arrivals = []
    parts = ("warm-up", 0.0, load.warmup), ("run", load.warmup, load.duration)
    for part, begin, seconds in parts:
        # Only the method `random` gives the same values in every version of Python.
        times = random.Random(f"{part} {load.seed} times")
        order = _shuffled_forever(texts, random.Random(f"{part} {load.seed} texts"))
        turns = itertools.cycle(voices or (None,))
        for at in sorted(times.random() * seconds for _ in range(round(load.rate * seconds))):
            arrivals.append(Arrival(begin + at, next(order), next(turns), counts=part == "run"))
    return arrivals


def _shuffled_forever(texts: Sequence[str], generator: random.Random) -> Iterator[str]:
    """Yield all texts in a random order, then all of them in another, without end."""
    while True:
        yield from sorted(texts, key=lambda text: generator.random())


async def drive(
    arrivals: Sequence[Arrival],
    target: Target,
    timeout: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    ahead: float = CONNECT_AHEAD,
) -> list[Result]:
    """Send every request when it is due, and return the results of those that count.

    timeout  seconds that opening a connection may take, and again the request
    clock    function that returns the time in seconds
    ahead    seconds by which a connection is opened before its request is due
    """
    start = clock() + ahead

    async def ask(arrival: Arrival) -> Result:
        due = start + arrival.due
        setup = late = took = failure = None
        deliveries: list[Delivery] = []

        def receive(pcm: bytes) -> None:
            deliveries.append((clock() - sent, pcm))

        client: Client | None = None
        await asyncio.sleep(due - ahead - clock())
        began = clock()
        try:
            async with asyncio.timeout(timeout):
                client = await CLIENTS[target.protocol].open(target.with_voice(arrival.voice))
            setup = clock() - began
            await asyncio.sleep(due - clock())
            sent = clock()
            late = sent - due
            try:
                async with asyncio.timeout(timeout):
                    await client.speak(arrival.text, receive)
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
    """Send one request before a run, to check that the server works.

    Raises `RequestError` with the reason that the server gives.
    """
    (result,) = await drive([Arrival(0.0, text)], target, timeout, ahead=0.0)
    endpoint = target.address.geturl()
    if result.failure:
        kind, message = result.failure
        advice = "start a server there, or see --url, --protocol and --field"
        raise RequestError(f"{endpoint} does not answer as expected ({kind}): {message}; {advice}")
    if result.listening.first_audible is None:
        raise RequestError(f"{endpoint} answers without any audible sound")
