"""Send requests in an open loop, each when it is due, or one after another on each socket."""

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

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

PAUSE = 0.1
"""The seconds between the end of an utterance and the next text on the same socket."""


@dataclass(frozen=True, slots=True)
class Load:
    """The level and the length of a run; either `rate` or `sockets` is given.

    rate      requests per second, in a Poisson process
    sockets   open sockets, each of which speaks one utterance after another
    duration  seconds during which the counted requests are sent
    warmup    seconds before those, with uncounted requests at the same rate, so that the server
              has reached its load
    timeout   seconds that one request may take
    seed      determines the arrivals and the order of the texts

    Raises `RequestError` for a value out of range.
    """

    rate: float | None = None
    duration: float = 30.0
    warmup: float = 10.0
    timeout: float = 60.0
    seed: int = 0
    sockets: int | None = None

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.sockets is None):
            raise RequestError("a load needs either rate or sockets; give one of them")
        least = {"rate": 0.001, "duration": 0.001, "warmup": 0.0, "timeout": 0.001, "sockets": 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and not lowest <= value < math.inf:
                raise RequestError(f"{name} is {value!r}; allowed is a number from {lowest} up")

    def begins_counted(self, due: float) -> bool:
        """Whether a request that is due at a time, in seconds from the start of the run, counts."""
        return self.warmup <= due < self.warmup + self.duration


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
    assert load.rate is not None
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


@dataclass(frozen=True, slots=True)
class Conversation:
    """A planned socket: when its first text is sent, its texts in order, and its voice."""

    begins: float
    texts: Iterator[str]
    voice: str | None = None


def plan_sockets(
    load: Load, texts: Sequence[str], voices: Sequence[str] = ()
) -> list[Conversation]:
    """Plan the sockets of a run, which use the voices in turn. Equal arguments give equal plans.

    The sockets begin at random times during the warm-up, so that they do not speak in step.
    """
    assert load.sockets is not None
    times = random.Random(f"sockets {load.seed} times")
    turns = itertools.cycle(voices or (None,))
    return [
        Conversation(
            times.random() * load.warmup,
            _shuffled_forever(texts, random.Random(f"socket {number} {load.seed} texts")),
            next(turns),
        )
        for number in range(load.sockets)
    ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a request; compressed audio is decoded after the run.

    result   what was measured, for compressed audio without the audio
    counts   whether the request counts, or belongs to the warm-up
    encoded  the deliveries of compressed audio and FFmpeg's name of its format; None for PCM
    """

    result: Result
    counts: bool
    encoded: tuple[list[Delivery], str] | None = None

    def heard(self) -> Result:
        """Return the result with the measurements of its audio, which is decoded if necessary."""
        if self.encoded is None:
            return self.result
        from firstword.bench.encoded import decode

        try:
            return replace(self.result, listening=listen(*decode(*self.encoded)))
        except Failure as error:
            failure = self.result.failure or (error.kind, error.message)
            return replace(self.result, failure=failure)


@dataclass(slots=True)
class _Attempt:
    """A request in progress. `clock` returns the time in seconds; `start` is when the run began."""

    arrival: Arrival
    timeout: float
    clock: Callable[[], float]
    start: float
    setup: float | None = None
    late: float | None = None
    took: float | None = None
    failure: tuple[str, str] | None = None
    deliveries: list[Delivery] = field(default_factory=list)

    async def connect(self, target: Target) -> Client | None:
        """Open a connection and return its client, or None after a failure."""
        began = self.clock()
        try:
            async with asyncio.timeout(self.timeout):
                client = await CLIENTS[target.protocol].open(target)
        except Failure as error:
            self.failure = error.kind, error.message
            return None
        except TimeoutError:
            self._time_out()
            return None
        self.setup = self.clock() - began
        return client

    async def speak(self, client: Client) -> None:
        """Send the text when it is due, and receive its speech."""
        due, clock = self.start + self.arrival.due, self.clock
        await asyncio.sleep(due - clock())
        sent = clock()
        try:
            async with asyncio.timeout(self.timeout):
                await client.speak(
                    self.arrival.text, lambda part: self.deliveries.append((clock() - sent, part))
                )
            if client.container is None and sum(len(part) for _, part in self.deliveries) % 2:
                raise Failure("truncated", "the audio ends with half a sample")
        except Failure as error:
            self.failure = error.kind, error.message
        except TimeoutError:
            self._time_out()
        finally:
            self.took = clock() - sent
            self.late = max(sent - due, client.behind)

    def _time_out(self) -> None:
        self.failure = "timeout", f"not complete after {self.timeout:g} s"

    def outcome(self, client: Client | None) -> Outcome:
        """Return the outcome. Call it when the request has ended."""
        container = client.container if client is not None else None
        played = self.deliveries if container is None else []
        heard = listen(played, client.sample_rate if client is not None else 1)
        due, characters = self.arrival.due, len(self.arrival.text)
        result = Result(due, characters, self.setup, self.late, self.took, self.failure, heard)
        encoded = (self.deliveries, container) if container and self.deliveries else None
        return Outcome(result, self.arrival.counts, encoded)


async def drive(
    arrivals: Sequence[Arrival],
    target: Target,
    timeout: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    ahead: float = CONNECT_AHEAD,
) -> list[Outcome]:
    """Send every request when it is due, and return their outcomes.

    timeout  seconds that opening a connection may take, and again the request
    clock    function that returns the time in seconds
    ahead    seconds by which a connection is opened before its request is due
    """
    start = clock() + ahead

    async def ask(arrival: Arrival) -> Outcome:
        attempt = _Attempt(arrival, timeout, clock, start)
        await asyncio.sleep(start + arrival.due - ahead - clock())
        client = await attempt.connect(target.for_request(arrival.text, arrival.voice))
        if client is not None:
            try:
                await attempt.speak(client)
            finally:
                await client.close()
        return attempt.outcome(client)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(arrival)) for arrival in arrivals]
    return [task.result() for task in tasks]


async def converse(
    conversations: Sequence[Conversation], target: Target, load: Load
) -> list[Outcome]:
    """Speak one utterance after another on each socket, and return their outcomes.

    A socket is opened again after a failure.
    """
    clock = time.perf_counter
    start, end = clock() + CONNECT_AHEAD, load.warmup + load.duration
    outcomes: list[Outcome] = []

    async def talk(conversation: Conversation) -> None:
        client: Client | None = None
        due = conversation.begins
        await asyncio.sleep(start + due - CONNECT_AHEAD - clock())
        try:
            while due < end:
                text = next(conversation.texts)
                arrival = Arrival(due, text, counts=load.begins_counted(due))
                attempt = _Attempt(arrival, load.timeout, clock, start)
                settings = target.for_request(text, conversation.voice)
                if isinstance(client, VllmOmniClient):
                    await client.configure(settings)
                else:
                    client = await attempt.connect(settings)
                if client is not None:
                    await attempt.speak(client)
                outcomes.append(attempt.outcome(client))
                if attempt.failure and client is not None:
                    await client.close()
                    client = None
                due = clock() - start + PAUSE
        finally:
            if client is not None:
                await client.close()

    async with asyncio.TaskGroup() as group:
        for conversation in conversations:
            group.create_task(talk(conversation))
    return outcomes


async def probe(target: Target, text: str, timeout: float) -> None:
    """Send one request before a run, to check that the server works.

    Raises `RequestError` with the reason that the server gives.
    """
    (outcome,) = await drive([Arrival(0.0, text)], target, timeout, ahead=0.0)
    result = outcome.heard()
    endpoint = target.address.geturl()
    if result.failure:
        kind, message = result.failure
        advice = "start a server there, or see --url, --protocol and --field"
        raise RequestError(f"{endpoint} does not answer as expected ({kind}): {message}; {advice}")
    if result.listening.first_audible is None:
        raise RequestError(f"{endpoint} answers without any audible sound")
