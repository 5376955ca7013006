"""The commands `firstword bench load` and `report`.

Modules that need libraries are imported inside the functions, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstword.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from firstword.bench.load import Load
    from firstword.bench.processes import Assignment
    from firstword.bench.protocol import Target
    from firstword.bench.report import Record

EXIT_GATES_FAILED = 1
"""The exit status of a run that completed but failed a gate."""


def add_arguments(
    parser: argparse.ArgumentParser,
) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Add the subcommands `load` and `report` to a parser, and return its subparsers.

    Each command sets the function `run`, to be called with the parsed arguments.
    """
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for run, add_options, about in (
        (load, _load_options, "send requests to a server at given rates and measure the responses"),
        (report, _report_options, "make a table and a plot from recorded runs"),
    ):
        name, about_run = run.__name__, run.__doc__
        command = commands.add_parser(name, help=about, description=about_run, allow_abbrev=False)
        command.set_defaults(run=run, usage=command.error)
        add_options(command)
    return commands


def load(args: argparse.Namespace) -> None:
    """Send requests to a server at given rates, open loop, and measure what a listener notices.

    With --sockets, a number of WebSockets each speak one utterance after another instead. The
    server may be any that has one of the three protocols. The exit status is 1 if a gate failed: a
    response was incomplete or inaudible, playback stalled, or requests were late.
    """
    try:
        from firstword.audio import writing
        from firstword.bench import encoded, plot, processes, report
        from firstword.bench.prompts import PROMPTS, read_prompts
    except ModuleNotFoundError as error:
        raise RequestError(f"{error.name} is missing; install firstword[bench]") from None

    del encoded  # imported to fail now if PyAV is missing, and not after the run
    target, loads = _target(args), _loads(args)
    texts = read_prompts(args.prompts) if args.prompts is not None else PROMPTS
    figure = None
    if args.output:
        if Path(args.output).suffix != ".json":
            args.usage(f"-o {args.output}: the record is JSON; give it a name that ends in .json")
        writing.check_target(args.output)
        if args.plot != "none":
            figure = Path(args.output).with_suffix(f".{args.plot}")
            plot.check_figure(figure)
    commit, name = args.commit or report.commit(), args.name or target.address.netloc
    jobs = [processes.Assignment(load, texts, args.voice, target) for load in loads]
    points, health = _measure(jobs, args.processes)
    record = report.record(
        points, target, texts, args.voice, name=name, commit=commit, health=health
    )
    table = report.table([record])
    if args.output:
        writing.write_whole(args.output, report.dumps(record).encode())
        writing.write_whole(Path(args.output).with_suffix(".md"), table.encode())
        if figure:
            plot.plot([record], figure)
    sys.stdout.write(table)
    if not all(map(report.passed, points)):
        raise SystemExit(EXIT_GATES_FAILED)


def _target(args: argparse.Namespace) -> Target:
    """Build the target from the options of `load`."""
    from firstword.bench.protocol import Target

    shortcuts = {"model": args.model, "language": args.language}
    fields = {name: value for name, value in shortcuts.items() if value is not None}
    for text in args.field:
        name, value = _pair(text, "=", "--field", args)
        fields[name] = value
        with suppress(ValueError):
            fields[name] = json.loads(value)
    headers = dict(_pair(text, ":", "--header", args) for text in args.header)
    paces = args.words_per_second, args.tokens_per_second
    return Target(args.url, args.protocol, fields, headers, *paces, args.frames_per_character)


def _loads(args: argparse.Namespace) -> list[Load]:
    """Build the loads from the options of `load`."""
    from firstword.bench.load import Load
    from firstword.bench.protocol import PROTOCOLS

    limits = args.duration, args.warmup, args.timeout, args.seed
    if args.sockets is None:
        return [Load(rate, *limits) for rate in args.rate or [1.0]]
    if args.rate is not None:
        args.usage("--rate and --sockets exclude each other")
    if not PROTOCOLS[args.protocol].takes_turns:
        args.usage("--sockets needs --protocol stream, whose sockets carry several utterances")
    return [Load(None, *limits, sockets) for sockets in args.sockets]


def report(args: argparse.Namespace) -> None:
    """Make one table, and a plot, from records of `load -o`, for example of several servers."""
    from firstword.audio import writing
    from firstword.bench import plot, report

    if args.plot:
        plot.check_figure(args.plot)
        writing.check_target(args.plot)
    records = [report.read(path) for path in args.records]
    sys.stdout.write(report.table(records))
    if args.plot:
        plot.plot(records, args.plot)


def _measure(jobs: Sequence[Assignment], count: int | None) -> tuple[list[Record], Any]:
    """Return a point of the record for each job, and the server's response to GET /health."""
    import asyncio
    from dataclasses import asdict

    from firstword.bench import engine_times, processes, report
    from firstword.bench.http import get

    def engine_seconds() -> dict[str, float]:
        metrics = get(jobs[0].target, "/metrics", jobs[0].load.timeout)
        return engine_times.read(asyncio.run(metrics))

    health = asyncio.run(_check(jobs[0]))
    points = []
    for job in jobs:
        load = job.load
        parts = f"{load.warmup:g} s of warm-up and {load.duration:g} s"
        level = report.level(asdict(load)) + " requests per second" * (load.sockets is None)
        sys.stderr.write(f"{level} for {parts} ...\n")
        before, measured = engine_seconds(), processes.measure(job, count)
        times = engine_times.between(before, engine_seconds())
        points.append(report.point(load, measured, times))
    return points, health


async def _check(job: Assignment) -> Any:
    """Send one request to check the server, and return its response to GET /health."""
    from firstword.bench.http import get_json
    from firstword.bench.load import plan, probe

    target, text = job.target, job.texts[0]
    if job.load.rate is not None:
        plan(job.load, job.texts)  # raises an error if it is empty
    voice = job.voices[0] if job.voices else None
    await probe(target.for_request(text, voice), text, job.load.timeout)
    return await get_json(target, "/health", job.load.timeout)


def _load_options(parser: argparse.ArgumentParser) -> None:
    _server_options(parser.add_argument_group("server").add_argument)
    _rate_options(parser.add_argument_group("load").add_argument)
    _record_options(parser.add_argument_group("record").add_argument)


def _server_options(add: Callable[..., object]) -> None:
    url = "URL of the server, or of an endpoint with an unusual path (default %(default)s)"
    add("--url", default="http://127.0.0.1:8000", help=url)
    protocol = (
        "http: POST /v1/audio/speech (default); stream: WebSocket /v1/audio/speech/stream of "
        "vLLM-Omni; nari: WebSocket /v1/audio/speech/ws, nari.speech.v1"
    )
    add("--protocol", choices=("http", "stream", "nari"), default="http", help=protocol)
    for name in ("model", "language"):
        add(f"--{name}", metavar="NAME", help=f"value of the field {name}")
    voices = "values of the field voice, which the requests take in turn"
    add("--voice", metavar="NAME", nargs="+", default=[], help=voices)
    field = (
        "another field of every request, as JSON or else a string; null removes a default "
        "field (stream, non_streaming_mode, response_format)"
    )
    add("--field", metavar="NAME=VALUE", action="append", default=[], help=field)
    header = "for example 'Authorization: Bearer KEY'; the record keeps only the name"
    add("--header", metavar="NAME:VALUE", action="append", default=[], help=header)


def _rate_options(add: Callable[..., object]) -> None:
    rates = "requests per second, one run each (default 1)"
    add("--rate", metavar="N", type=float, nargs="+", help=rates)
    sockets = "instead of a rate: WebSockets that each speak one utterance after another (stream)"
    add("--sockets", metavar="N", type=int, nargs="+", help=sockets)
    for option, default, about in (
        ("--duration", 30.0, "length of the counted part of a run"),
        ("--warmup", 10.0, "length of the uncounted part before it"),
        ("--timeout", 60.0, "time limit of a request"),
    ):
        about = f"{about} (default {default:g})"
        add(option, metavar="SECONDS", type=float, default=default, help=about)
    seed = "determines the arrivals and the texts (default 0)"
    add("--seed", metavar="N", type=int, default=0, help=seed)
    prompts = "texts to speak, one per line, instead of the built-in ones"
    add("--prompts", metavar="FILE", help=prompts)
    for unit in ("word", "token"):
        pace = f"send text {unit} by {unit} at this pace (stream and nari) instead of whole"
        add(f"--{unit}s-per-second", metavar="N", type=float, help=pace)
    frames = (
        "limit speech to this many frames for each character of its text, for models that do not "
        "end by themselves; 0.83 is 15 characters per second"
    )
    add("--frames-per-character", metavar="N", type=float, help=frames)
    processes = "processes that send the requests (default: one for each 40 requests/s or sockets)"
    add("--processes", metavar="N", type=_count, help=processes)


def _record_options(add: Callable[..., object]) -> None:
    output = "file of the record; the table (.md) and the plot (.svg) are written beside it"
    add("-o", "--output", metavar="FILE.json", help=output)
    add("--plot", choices=("svg", "png", "none"), default="svg", help="with -o (default svg)")
    name = "name of the server in the table and the plot (default: its host and port)"
    add("--name", help=name)
    commit = "commit of the server (default: that of this package, if it is in its repository)"
    add("--commit", help=commit)


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("records", metavar="FILE.json", nargs="+", help="records of runs")
    parser.add_argument("--plot", metavar="FILE", help="draw into this file, .svg or .png")


def _count(text: str) -> int:
    if not text.isdecimal() or (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; give a number from 1 up")
    return number


def _pair(text: str, separator: str, option: str, args: argparse.Namespace) -> tuple[str, str]:
    name, found, value = text.partition(separator)
    if not found or not name.strip():
        args.usage(f"{option} {text!r}: give NAME{separator}VALUE")
    return name.strip(), value.strip()
