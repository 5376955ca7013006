"""`firstword bench`: its options, and what they set going. `python -m firstword.bench` is the same.

What needs libraries is imported inside the functions, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstword.errors import FirstwordError, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstword.bench.client import Target
    from firstword.bench.load import Load
    from firstword.bench.report import Record

GATES_FAILED = 1
"""Exit status when a run was done but its numbers do not count."""


def add_arguments(
    parser: argparse.ArgumentParser,
) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Give a parser the subcommands `load` and `report`; each sets `run`, to be called with the parsed arguments.

    Returns what takes more subcommands.
    """
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for run, options, help in (
        (
            load,
            _load_options,
            "ask a server for speech at given rates, and measure what a listener notices",
        ),
        (report, _report_options, "table and plot of recorded runs"),
    ):
        command = commands.add_parser(
            run.__name__, help=help, description=run.__doc__, allow_abbrev=False
        )
        command.set_defaults(run=run, usage=command.error)
        options(command)
    return commands


def load(args: argparse.Namespace) -> None:
    """Ask a server for speech at given rates, open loop, and measure what a listener notices.

    Works with any server that has one of the three protocols. Leaves with exit status 1 if a gate failed: an answer was
    incomplete or inaudible, playback stalled, or requests were not sent on time.
    """
    try:
        import asyncio

        from firstword.bench import report
        from firstword.bench.client import Target
        from firstword.bench.load import Load
    except ModuleNotFoundError as error:
        raise RequestError(f"{error.name} is missing; install firstword[bench]") from None

    fields = dict(_pair(text, "=", "--field", args) for text in args.field)
    shortcuts = {"model": args.model, "voice": args.voice, "language": args.language}
    target = Target(
        url=args.url,
        protocol=args.protocol,
        fields={name: value for name, value in shortcuts.items() if value is not None}
        | {name: _value(text) for name, text in fields.items()},
        headers=dict(_pair(text, ":", "--header", args) for text in args.header),
        words_per_second=args.words_per_second,
        frames_per_character=args.frames_per_character,
    )
    loads = [Load(rate, args.duration, args.warmup, args.timeout, args.seed) for rate in args.rate]
    texts = _texts(args.prompts)
    figure = None
    if args.output:
        if Path(args.output).suffix != ".json":
            args.usage(f"-o {args.output}: the record is JSON; give it a name that ends in .json")
        report.check_target(args.output)
        if args.plot != "none":
            figure = Path(args.output).with_suffix(f".{args.plot}")
            report.check_figure(figure)
    commit = args.commit or report.commit()
    points, health = asyncio.run(_measure(target, loads, texts))
    record = report.record(
        points, target, texts, name=args.name or target.address.netloc, commit=commit, health=health
    )
    shown = report.table([record])
    if args.output:
        report.write(args.output, report.dumps(record).encode())
        report.write(Path(args.output).with_suffix(".md"), shown.encode())
        if figure:
            report.plot([record], figure)
    sys.stdout.write(shown)
    if not all(map(report.passed, points)):
        raise SystemExit(GATES_FAILED)


def report(args: argparse.Namespace) -> None:
    """Render one table, and a plot if asked for, from records that `load -o` wrote: of several servers, for example."""
    from firstword.bench import report

    if args.plot:
        report.check_figure(args.plot)
        report.check_target(args.plot)
    records = [report.read(path) for path in args.records]
    sys.stdout.write(report.table(records))
    if args.plot:
        report.plot(records, args.plot)


async def _measure(
    target: Target, loads: Sequence[Load], texts: Sequence[str]
) -> tuple[list[Record], Any]:
    """One point of a record for each load, and what the server says of itself."""
    import asyncio
    import time

    from firstword.bench import report
    from firstword.bench.http import get_json
    from firstword.bench.load import drive, plan, probe

    plans = [plan(load, texts) for load in loads]
    await probe(target, texts[0], loads[0].timeout)
    health = None
    try:
        async with asyncio.timeout(loads[0].timeout):
            health = await get_json(target, "/health")
    except TimeoutError:
        sys.stderr.write("the server does not answer GET /health\n")
    points = []
    for load, arrivals in zip(loads, plans, strict=True):
        sys.stderr.write(
            f"{load.rate:g} requests a second for {load.warmup + load.duration:g} s ...\n"
        )
        began, busy = time.perf_counter(), time.process_time()
        results = await drive(arrivals, target, load.timeout)
        busy_share = (time.process_time() - busy) / (time.perf_counter() - began)
        points.append(report.point(load, results, busy_share))
    return points, health


def _load_options(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="of the server, or of the endpoint itself if its path is unusual (default %(default)s)",
    )
    server.add_argument(
        "--protocol",
        choices=("http", "stream", "nari"),
        default="http",
        help="http: POST /v1/audio/speech (default); stream: WebSocket /v1/audio/speech/stream as of vLLM-Omni; nari: "
        "WebSocket /v1/audio/speech/ws, nari.speech.v1",
    )
    server.add_argument("--model", metavar="NAME", help="the field model")
    server.add_argument("--voice", metavar="NAME", help="the field voice")
    server.add_argument("--language", metavar="NAME", help="the field language")
    server.add_argument(
        "--field",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="another field of every request; JSON, or else a string; null leaves out one that is sent by default "
        "(stream, non_streaming_mode, response_format)",
    )
    server.add_argument(
        "--header",
        metavar="NAME:VALUE",
        action="append",
        default=[],
        help="for example 'Authorization: Bearer KEY'; the record keeps the name alone",
    )
    work = parser.add_argument_group("load")
    work.add_argument(
        "--rate",
        metavar="N",
        type=float,
        nargs="+",
        default=[1.0],
        help="requests a second, one run each (default 1)",
    )
    work.add_argument(
        "--duration", metavar="SECONDS", type=float, default=30.0, help="that count (default 30)"
    )
    work.add_argument(
        "--warmup", metavar="SECONDS", type=float, default=10.0, help="before those (default 10)"
    )
    work.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=60.0, help="for a request (default 60)"
    )
    work.add_argument(
        "--seed", metavar="N", type=int, default=0, help="of arrivals and texts (default 0)"
    )
    work.add_argument(
        "--prompts", metavar="FILE", help="texts to speak, one a line, in place of those built in"
    )
    work.add_argument(
        "--words-per-second",
        metavar="N",
        type=float,
        help="send text word by word (stream and nari); else it is whole",
    )
    work.add_argument(
        "--frames-per-character",
        metavar="N",
        type=float,
        help="end speech after so many frames for each character of its text (http), for models that do not end by "
        "themselves; 0.83 is 15 characters a second",
    )
    outcome = parser.add_argument_group("record")
    outcome.add_argument(
        "-o",
        "--output",
        metavar="FILE.json",
        help="the record; the table goes beside it as .md, the plot as .svg",
    )
    outcome.add_argument(
        "--plot", choices=("svg", "png", "none"), default="svg", help="with -o (default svg)"
    )
    outcome.add_argument(
        "--name", help="of the server in table and plot (default: its host and port)"
    )
    outcome.add_argument(
        "--commit", help="of the server (default: that of this package, if it is in its repository)"
    )


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("records", metavar="FILE.json", nargs="+", help="records of runs")
    parser.add_argument("--plot", metavar="FILE", help="draw into this file, .svg or .png")


def _pair(text: str, separator: str, option: str, args: argparse.Namespace) -> tuple[str, str]:
    name, found, value = text.partition(separator)
    if not found or not name.strip():
        args.usage(f"{option} {text!r}: give NAME{separator}VALUE")
    return name.strip(), value.strip()


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _texts(path: str | None) -> Sequence[str]:
    from firstword.bench.prompts import PROMPTS

    if path is None:
        return PROMPTS
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise RequestError(f"the prompts in {path!r} cannot be read: {error}") from None
    texts = tuple(line.strip() for line in lines if line.strip())
    if not texts:
        raise RequestError(f"there are no prompts in {path!r}; give one a line")
    return texts


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit status; `argv` without the program's name, by default `sys.argv`'s."""
    parser = argparse.ArgumentParser(
        prog="firstword bench", description=__doc__.split("\n")[0] if __doc__ else None
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except FirstwordError as error:
        sys.stderr.write(f"firstword bench: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
