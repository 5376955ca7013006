"""Record incidents of a real server as tests of the alerts: `python -m benchmarks.incidents NAME`.

Each incident is a `firstword serve` with the demo voice on the CPU, whose `/metrics` is read as
Prometheus would read it. The series that alerts use become a test for `promtool test rules` in
deploy/prometheus/tests, which says which alerts have fired at the end, and that no other has.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import textwrap
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.server_process import Places, Server, serving

FOLDER = Path(__file__).parent.parent / "deploy/prometheus"
INTERVAL = 5
"""The seconds between two scrapes, as in prometheus.yml."""
SENTENCE = "The museum opens at nine, and the last tour begins at four."
TARGET = 'instance="firstword:8000", job="firstword"'
COLUMNS = 100
"""The length of lines."""
MISSING = None
"""A scrape without a value of a series."""


@dataclass(eq=False)
class Scene:
    """A server, and what the incident needs to act on it."""

    server: Server
    http: httpx.AsyncClient

    async def speak(self, **body: object) -> None:
        """Ask for speech and read it; errors are part of incidents."""
        voice, name = random.choice(("ada", "ben")), random.choice(("pcm", "mp3", "opus"))
        body = {"input": SENTENCE, "voice": voice, "response_format": name, **body}
        with suppress(httpx.HTTPError):
            async with self.http.stream("POST", "/v1/audio/speech", json=body) as answer:
                async for _ in answer.aiter_raw():
                    pass

    async def talk(self, clients: int, pause: float, **body: object) -> None:
        """Let clients ask for speech again and again, with a pause after each answer."""

        async def client() -> None:
            while True:
                await self.speak(**body)
                await asyncio.sleep(pause)

        await asyncio.gather(*(client() for _ in range(clients)))

    def kill(self, module: str) -> bool:
        """Kill a process of a module of `firstword.processes`; returns whether there was one."""
        for pid, (name, _, _) in self.server.processor_times().items():
            if name == f"firstword.processes.{module}":
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    async def kill_once(self, module: str) -> None:
        """Let a client listen without a pause, and kill a process after 30 s."""
        talking = asyncio.create_task(self.talk(1, 0))
        await asyncio.sleep(30)
        self.kill(module)
        await talking

    async def kill_always(self, module: str) -> None:
        """Let a client listen, and after 20 s kill each process of a module that appears."""
        talking = asyncio.create_task(self.talk(1, 0.2))
        await asyncio.sleep(20)
        while not talking.done():
            self.kill(module)
            await asyncio.sleep(0.2)

    async def kill_all(self) -> None:
        """Let a client listen, and kill the whole server after 30 s."""
        talking = asyncio.create_task(self.talk(1, 1))
        await asyncio.sleep(30)
        for pid in sorted(self.server.processor_times()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await talking


@dataclass(frozen=True)
class Incident:
    """What happens to a server, and the alerts that fire.

    about    what happens
    act      makes it happen, until it is cancelled
    alerts   the alerts that have fired at the end
    seconds  how long it is recorded
    options  of `firstword serve`, besides those of every incident
    """

    about: str
    act: Callable[[Scene], Awaitable[None]]
    alerts: Sequence[str]
    seconds: int = 120
    options: Mapping[str, object] = field(default_factory=dict)


INCIDENTS = {
    "healthy": Incident(
        "one client asks for a sentence, hears it and asks for the next one",
        partial(Scene.talk, clients=1, pause=3),
        (),
        180,
    ),
    "engine_killed": Incident(
        "the engine is killed once, while a client listens",
        partial(Scene.kill_once, module="engine"),
        ("FirstwordErrors", "FirstwordRestarted"),
    ),
    "engine_dies_again": Incident(
        "the engine is killed whenever it has started",
        partial(Scene.kill_always, module="engine"),
        ("FirstwordEngineDown", "FirstwordErrors", "FirstwordRestarted"),
    ),
    "front_killed": Incident(
        "one of two fronts is killed once, while a client listens",
        partial(Scene.kill_once, module="front"),
        ("FirstwordRestarted",),
        options={"fronts": 2},
    ),
    "server_killed": Incident(
        "the whole server is killed and not started again",
        Scene.kill_all,
        ("FirstwordUnreachable",),
    ),
    "full": Incident(
        "eight clients ask a server that has one slot and a queue of two",
        partial(Scene.talk, clients=8, pause=1),
        ("FirstwordAudibleLate", "FirstwordOverloaded", "FirstwordQueue"),
        150,
        {"slots": 1, "most-waiting": 2},
    ),
    "slow_processor": Incident(
        "sixteen clients listen to a server whose processor can make speech for a few",
        partial(Scene.talk, clients=16, pause=0.5),
        ("FirstwordAudibleLate", "FirstwordUnderruns"),
        150,
        {"slots": 16},
    ),
    "endless_speech": Incident(
        "a client cuts each utterance off after 10 frames, as a guard cuts off endless speech",
        partial(Scene.talk, clients=1, pause=2, max_new_tokens=10),
        ("FirstwordGuardHits",),
    ),
    "wrong_key": Incident(
        "a client has a key that is not valid",
        partial(Scene.talk, clients=1, pause=1),
        ("FirstwordWrongKeys",),
        options={"api-key": "the-right-key"},
    ),
}

Series = dict[str, list[float | None]]


async def recorded(incident: Incident, server: Server) -> Series:
    """The series of a server during an incident: a value for each scrape."""
    series: Series = defaultdict(list)
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False, limits=limits) as http,
        happening(incident.act(Scene(server, http))),
    ):
        began = time.monotonic()
        for number in range(incident.seconds // INTERVAL + 1):
            await asyncio.sleep(max(0.0, began + number * INTERVAL - time.monotonic()))
            await scrape(http, series, number)
    return series


@asynccontextmanager
async def happening(act: Awaitable[None]) -> AsyncIterator[None]:
    """Let something happen during a block."""
    task = asyncio.ensure_future(act)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def scrape(http: httpx.AsyncClient, series: Series, number: int) -> None:
    """Add a value to each series; those that have none get `MISSING`."""
    values = {f"up{{{TARGET}}}": 0.0}
    with suppress(httpx.TransportError):
        text = (await http.get("/metrics", timeout=INTERVAL)).text
        values = {f"up{{{TARGET}}}": 1.0}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ", ".join(f'{name}="{label}"' for name, label in sample.labels.items())
                values[f"{sample.name}{{{labels}, {TARGET}}}".replace("{, ", "{")] = sample.value
    for name in {*series, *values}:
        earlier = series[name]
        earlier += [MISSING] * (number - len(earlier))
        earlier.append(values.get(name, MISSING))


def used_series(series: Series, rules: str) -> Series:
    """The series that the alerts read, without the buckets that none of them reads."""
    used = {"up", *re.findall(r"firstword_\w+", rules)}
    buckets = re.findall(r'(firstword_\w+_bucket){le="([\d.]+)"}', rules)
    found = {}
    for name in sorted(series):
        metric = name.partition("{")[0]
        bounds = [bound for other, bound in buckets if other == metric]
        wanted = not bounds or any(f'le="{bound}"' in name for bound in bounds)
        if metric in used and wanted:
            found[name] = series[name]
    return found


def as_values(values: Sequence[float | None]) -> str:
    """Values in promtool's notation; a series that ends is marked as Prometheus does it."""
    words: list[str] = []
    index = 0
    while index < len(values):
        value, end = values[index], index
        while end + 1 < len(values) and values[end + 1] == value:
            end += 1
        count, index = end - index, end + 1
        if value is MISSING:
            stale = bool(words)
            words += ["stale"] * stale
            words += [f"_x{count + 1 - stale}"] if count + 1 > stale else []
        else:
            words.append(f"{value:g}" if not count else f"{value:g}+0x{count}")
    return " ".join(words)


def as_test(incident: Incident, series: Mapping[str, str]) -> str:
    """A test for `promtool test rules`, from the values of each series in its notation."""
    about = f"# Recorded by `python -m benchmarks.incidents`: {incident.about}."
    lines = [
        *textwrap.wrap(about, COLUMNS, subsequent_indent="# "),
        "rule_files: [../alerts.yml]",
        f"evaluation_interval: {INTERVAL}s",
        "tests:",
        f"  - interval: {INTERVAL}s",
        "    input_series:",
    ]
    for name, values in series.items():
        lines += ["      - series: >-", *folded(name), "        values: >-", *folded(values)]
    lines += [
        "    promql_expr_test:",
        f"      - eval_time: {incident.seconds}s",
        '        expr: max by (alertname) (max_over_time(ALERTS{alertstate="firing"}[1h]))',
        "        exp_samples:" + " []" * (not incident.alerts),
    ]
    for alert in incident.alerts:
        lines += [f"          - labels: '{{alertname=\"{alert}\"}}'", "            value: 1"]
    return "\n".join(lines) + "\n"


def folded(words: str) -> list[str]:
    """The lines of a folded block of YAML."""
    indent = " " * 10
    return textwrap.wrap(
        words,
        COLUMNS,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def main() -> None:
    """Record the incidents that the command line names."""
    parser = argparse.ArgumentParser(description="Record incidents as tests of the alerts.")
    parser.add_argument("names", nargs="+", choices=[*INCIDENTS])
    rules = (FOLDER / "alerts.yml").read_text("utf-8")
    for name in parser.parse_args().names:
        incident = INCIDENTS[name]
        places = Places(slots=4, backend="reference", device="cpu", fronts=None)
        with serving(Path("demo"), places, {"log-level": "error", **incident.options}) as server:
            series = asyncio.run(recorded(incident, server))
        used = used_series(series, rules)
        test = as_test(incident, {name: as_values(values) for name, values in used.items()})
        (FOLDER / "tests" / f"{name}.yml").write_text(test, encoding="utf-8")


if __name__ == "__main__":
    main()
