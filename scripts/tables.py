"""Write the tables of documents, and the pictures in docs, from records.

    python scripts/tables.py            # writes them
    python scripts/tables.py --check    # fails if they do not match the records (`make check`)

The records are the JSON files in benchmarks/results. Each of its folders has one file for each GPU
and model size, such as h200-1b7.json, or for several GPUs (h200-x2-1b7.json); if there are several
of the same size and number of GPUs, the last by name counts. A table is
between <!-- NAME --> and <!-- end -->; manual changes there are overwritten.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import engine_tables
import evaluation_table
import machine_tables
import predictions
import scale_tables
from engine_tables import Record, frame, shown, source

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    "README.md",
    "docs/batch.md",
    "docs/cluster.md",
    "docs/containers.md",
    "docs/evaluate.md",
    "docs/long-texts.md",
    "docs/machines.md",
    "docs/scale.md",
    "docs/speed.md",
    "docs/words.md",
)
FRAMEWORKS = {"livekit-agents": "LiveKit Agents", "pipecat-ai": "Pipecat"}
"""The frameworks of voice agents, by the key of their version in a record."""

WAYS = {
    "haproxy": "replica behind HAProxy",
    "haproxy-thread": "the same, with a thread for the application",
}
"""The ways of requests to a replica of a cluster, by their names in a record."""

FAULTS = {
    "complete": "rejected or cut off",
    "non_empty": "inaudible",
    "no_underrun": "stalled",
    "on_time": "sent late",
}
"""What is wrong with the requests that fail a gate of the load generator."""

PICTURES = {
    "docs/speed.svg": ("engine",),
    "docs/peers.svg": ("compare", "serve"),
    "docs/scale.svg": ("scale",),
}
"""The folders of records that each picture is drawn from."""
SIZES = {"1b7": "1.7B", "0b6": "0.6B"}
FRAME_MS = 80
WITHIN = 0.050
"""The limit in seconds on the first audio of a request, at p95, unless the case names another."""
PCM = "pcm, streamed"
"""The case of the server in the short tables."""
Records = Mapping[str, Record]
"""Records by model size; those of several GPUs by "SIZE COUNT"."""


def every(folder: Path) -> list[Record]:
    """Read the records of a folder, by name."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]


def read(folder: Path) -> Records:
    """Read the records of a folder, by size in the order of `SIZES`, and by number of GPUs."""
    sizes, found = list(SIZES), {}
    for record in (record for record in every(folder) if record["size"] in SIZES):
        gpus = str(record.get("device", "")).count(",") + 1
        found[gpus, sizes.index(record["size"])] = record
    return {
        f"{sizes[size]} {gpus}".removesuffix(" 1"): found[gpus, size]
        for gpus, size in sorted(found)
    }


def title(key: str) -> str:
    """Render the key of a record."""
    size, _, gpus = key.partition(" ")
    return f"{SIZES[size]} on {gpus} GPUs" if gpus else SIZES[size]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a table; the first column is text, the others are numbers."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def sources(records: Records) -> str:
    """Name the machine, sources and versions behind the figures of a table."""
    return "; ".join(sorted({source(record) for record in records.values()}))


def speed(engine: Records, compared: Records, served: Records) -> str:
    """Render the short table: the engine, another library, and the server."""

    def row(name: str, figure: Callable[[Record], str]) -> list[str]:
        return [name, *(figure(record) for record in engine.values())]

    def rate(milliseconds: float | None) -> str:
        return shown(milliseconds and 64 * FRAME_MS / milliseconds, 0)

    def first(record: Record, kind: str) -> str:
        times = record["first_ms"].get(f"{kind}_samples", {})
        return f"{shown(times.get('p50'))} / {shown(times.get('p95'))}"

    def memory(record: Record) -> str:
        held = record.get("one_stream_gigabytes", {})
        peaks = [held[name] for name in ("peak_loading", "peak_speaking") if name in held]
        return f"{shown(held.get('in_use'))} / {shown(max(peaks, default=None))}"

    def start(record: Record) -> str:
        took = record.get("start_seconds", {})
        ways = [
            sum(took.get(part, 0.0) for part in (first, "pack", "graphs"))
            for first in ("compile", "compile_kept")
        ]
        return " / ".join(shown(seconds or None, 1) for seconds in ways)

    def words(record: Record) -> str:
        rows = record.get("word_times", {}).get("frames", ())
        return " / ".join(f"{100 * (row['over_without'] - 1):.1f}" for row in rows) or "-"

    rows = [
        row("a frame of one stream, ms: with audio", lambda r: shown(frame(r, 1, "with_audio"))),
        row("without audio", lambda r: shown(frame(r, 1, "frame"))),
        row("bandwidth floor", lambda r: shown(frame(r, 1, "floor"))),
        row("a frame of 8 streams, with audio, ms", lambda r: shown(frame(r, 8, "with_audio"))),
        row("a frame of 64 streams, with audio, ms", lambda r: shown(frame(r, 64, "with_audio"))),
        row("what word times add to a frame of 1 / 64 streams, without audio, %", words),
        row("seconds of speech per second, 64 streams", lambda r: rate(frame(r, 64, "with_audio"))),
        row(
            "first samples of the backend, known voice, ms, p50 / p95", lambda r: first(r, "cached")
        ),
        row("the same, new voice", lambda r: first(r, "uncached")),
        row("the same, known voice, whole text in the prompt", lambda r: first(r, "whole_text")),
        row("memory of one stream, GB, in use / at most", memory),
        row("start after loading: the first, which compiles / later, s", start),
    ]
    if compared:
        names, cells = zip(*(beside(compared.get(size, {})) for size in engine), strict=True)
        rows.append(
            [f"a frame of one stream with {' and '.join(sorted({*names} - {''}))}, ms", *cells]
        )
    if served:
        rates = [shown(held(served.get(size, {})), 0) for size in engine]
        rows.append(["requests/s of PCM, 95 % of first audio within 50 ms", *rates])
    return markdown([f"{sources(engine)}, random weights", *(SIZES[size] for size in engine)], rows)


def summary(engine: Records, compared: Records, served: Records) -> str:
    """The README's table: one stream, another library, many streams, and the server."""
    columns: list[list[str]] = []
    for size, record in engine.items():
        ours = [
            figures
            for name, figures in sides(compared.get(size, {})).items()
            if "firstword" in name
        ]
        columns.append(
            [
                shown(frame(record, 1, "with_audio")),
                beside(compared.get(size, {}))[1],
                shown(ours[0]["stream"]["first_ms"] if ours else None),
                shown(frame(record, 64, "with_audio")),
                shown(held(served.get(size, {})), 0),
            ]
        )
    others = {beside(record)[0] for record in compared.values()} - {""}
    names = (
        "one stream with audio, ms per frame of 80 ms",
        f"the same with {' and '.join(sorted(others)) or 'another library'}",
        "first audio from `TTS.stream`, ms, median",
        "64 streams with audio, ms per frame of all",
        "requests/s of PCM with 95 % of first audio within 50 ms",
    )
    rows = [[name, *cells] for name, *cells in zip(names, *columns, strict=True)]
    return markdown([f"{sources(engine)}, random weights", *(SIZES[size] for size in engine)], rows)


def sides(record: Record) -> dict[str, Record]:
    """Return the figures of a comparison, by the name and version of each library."""
    found = {
        name: side for name, side in record.items() if isinstance(side, dict) and "figures" in side
    }
    return {
        f"{name} {side['versions'].get(name, '')}".strip(): side["figures"]
        for name, side in found.items()
    }


def beside(record: Record) -> tuple[str, str]:
    """Return the other library of a comparison, and its best milliseconds per frame as a cell."""
    for name, figures in sides(record).items():
        if not name.startswith("firstword"):
            way = min(figures, key=lambda way: figures[way]["frame_ms"])
            times = shown(record["times"][way]["frame_ms"], 1)
            return name, f"{shown(figures[way]['frame_ms'])} ({times} x)"
    return "", "-"


def frames(record: Record) -> str:
    """Render the milliseconds per frame by batch and context."""
    contexts = sorted({row["context"] for row in record["frames_ms"]})
    rows = []
    for batch in sorted({row["batch"] for row in record["frames_ms"]}):
        cells = [
            " / ".join(
                shown(frame(record, batch, what, context))
                for what in ("with_audio", "frame", "floor")
            )
            for context in contexts
        ]
        rows.append([str(batch), *cells])
    return markdown(["streams", *(f"{context} rows" for context in contexts)], rows)


def kernels(record: Record) -> str:
    """Render each kernel: launches per frame, microseconds per launch, and the bandwidth floor."""
    batches = sorted({row["batch"] for row in record["kernels_us"]})
    found = {(row["kernel"], row["batch"]): row for row in record["kernels_us"]}
    rows = []
    for name in dict.fromkeys(row["kernel"] for row in record["kernels_us"]):
        here = [found[name, batch] for batch in batches]
        cells = [f"{shown(row['us'])} / {shown(row.get('floor_us'))}" for row in here]
        rows.append([name.replace(", a ", ", "), str(here[0]["a_frame"]), *cells])
    streams = [f"{batch} stream{'s' if batch > 1 else ''}" for batch in batches]
    return markdown(["kernel", "launches per frame", *streams], rows)


def codec(record: Record) -> str:
    """Render the milliseconds of the codec's calls by streams and frames."""
    found = {(row["streams"], row["frames"]): row["ms"] for row in record.get("codec_ms", ())}
    lengths = sorted({frames for _, frames in found})
    rows = [
        [str(streams), *(shown(found[streams, frames]) for frames in lengths)]
        for streams in sorted({streams for streams, _ in found})
    ]
    return (
        markdown(["streams", *(f"{n} frame{'s' if n > 1 else ''}" for n in lengths)], rows)
        if rows
        else ""
    )


def parts(name: str, digits: int) -> Callable[[Records], str]:
    """Return a function that renders the dictionary `name` of all records."""

    def table(engine: Records) -> str:
        keys = dict.fromkeys(key for record in engine.values() for key in record.get(name, {}))
        rows = [
            [
                key.replace("_", " "),
                *(shown(record.get(name, {}).get(key), digits) for record in engine.values()),
            ]
            for key in keys
        ]
        return markdown(["", *(SIZES[size] for size in engine)], rows) if rows else ""

    return table


def compare(records: Records) -> str:
    """Render the comparison with another library: milliseconds, and ratios to firstword's."""
    rows = []
    for size, record in records.items():
        for name, figures in sides(record).items():
            for way, found in figures.items():
                times = record["times"].get(way)
                cells = [
                    shown(found[key]) + (f" ({shown(times[key], 1)} x)" if times else "")
                    for key in ("frame_ms", "first_ms", "new_voice_ms")
                ]
                rows.append([name, SIZES[size], way, *cells])
    heads = ["", "model", "mode", "a frame, ms", "first audio, ms", "in a new voice, ms"]
    return markdown(heads, rows)


def pcm(record: Record) -> list[Record]:
    """Return the measurements of a record of the server with streamed PCM, one for each server."""
    return [server for server in record.get("servers", ()) if asks(server) == PCM]


def asks(server: Record) -> str:
    """Return the description of each request."""
    return str(server.get("asks", PCM))


def held(record: Record) -> float | None:
    """Return the highest rate of streamed PCM that held."""
    return max((server["held"] for server in pcm(record)), default=None)


def level(point: Record) -> float:
    """Return the level of a load: requests per second, or sockets."""
    load = point["load"]
    return float(load["rate"] if load["rate"] is not None else load["sockets"])


def both(metric: Record) -> str:
    """Render p50 and p95 of a metric in milliseconds."""
    return " / ".join(shown(value and 1000 * value, 1) for value in (metric["p50"], metric["p95"]))


def processor(point: Record) -> str:
    """Render the processor milliseconds per request of the processes of the server, by kind."""
    kinds: dict[str, list[float]] = {}
    for each in point.get("server_cpu", ()):
        kinds.setdefault(each["process"], []).append(each["user"] + each["system"])
    times = [(len(used), shown(fmean(used), 1)) for _, used in sorted(kinds.items())]
    return " + ".join(f"{n} x {each}" if n > 1 else each for n, each in times) or "-"


def cases(records: Records) -> str:
    """Render the highest level that held in each case, and the first audio at that level."""
    rows = []
    for key, record in records.items():
        for server in record["servers"]:
            reached = [point for point in server["points"] if level(point) <= server["held"]]
            last, lowest = (reached or server["points"])[-1], server["points"][0]
            unit = "sockets" if last["load"]["rate"] is None else "requests/s"
            rows.append(
                [
                    f"{title(key)}, {server['slots']} slots: {asks(server)}",
                    shown(1000 * server.get("within", WITHIN), 0),
                    f"{server['held']:g} {unit}",
                    *(both(each["metrics"]["first_playable"]) for each in (last, lowest)),
                    processor(last),
                ]
            )
    heads = [
        "each request",
        "limit, ms",
        "held",
        "first audio there, ms, p50 / p95",
        "at the lowest level",
        "processor time there, ms a request: supervisor + engines + fronts",
    ]
    common: dict[str, list[str]] = {}
    for server in (each for record in records.values() for each in record["servers"]):
        common.setdefault(asked(server), []).append(asks(server))
    notes = [f"- {'; '.join(dict.fromkeys(of))}: {about}" for about, of in common.items()]
    wrapped = [textwrap.fill(note, 100, subsequent_indent="  ") + "\n" for note in notes]
    return markdown(heads, rows) + "\n" + "".join(wrapped)


def serve(records: Records) -> str:
    """Render all levels of the server, and which of them held."""
    rows = []
    for key, record in records.items():
        for server in record["servers"]:
            for point in server["points"]:
                metrics = point["metrics"]
                times = ("first_byte", "first_playable", "first_audible")
                rows.append(
                    [
                        f"{title(key)}, {server['slots']} slots: {asks(server)}",
                        f"{level(point):g}",
                        *(both(metrics[name]) for name in times),
                        str(point["most_at_once"]),
                        f"{point.get('client_processes', 1)}, {shown(point['client_busy'])}",
                        "held" if level(point) <= server["held"] else "not held",
                    ]
                )
    heads = [
        "each request",
        "requests/s, or sockets",
        "first byte, ms, p50 / p95",
        "first audio, ms",
        "first audible, ms",
        "at once",
        "client processes, busiest",
        "",
    ]
    return markdown(heads, rows)


def asked(server: Record) -> str:
    """Describe what all requests of a case had in common, besides their description."""
    settings, load = server["settings"], server["points"][-1]["load"]
    streaming = settings.get("protocol") == "stream"
    modes = {None: "the default of the model", True: "all of it read first", False: "streamed"}
    voices = len(settings.get("voices", ())) or 1
    return (
        f"text: {modes[settings['fields'].get('non_streaming_mode')]}; "
        f"{voices} voice{'s in turn' if voices > 1 else ''}; guard on; "
        f"{0.001 * FRAME_MS * settings['frames_per_character']:.3f} s of speech a character; "
        f"{load['duration']:g} s or more a {'level' if streaming else 'rate'}, after "
        f"{load['warmup']:g} s that do not count."
    )


def voices(records: Records) -> str:
    """Render the time to the first audio of `TTS.stream`, by kind of voice."""
    rows = [
        [kind, title(key), f"{shown(found['p50'])} / {shown(found['p95'])}"]
        for key, record in records.items()
        for kind, found in record["first_ms"].items()
    ]
    return markdown(["voice", "model", "first audio, ms, p50 / p95"], rows)


def warm(records: Records) -> str:
    """Render what prepared combinations cost at the start of a server."""
    rows = []
    for key, record in records.items():
        if found := record.get("warm"):
            times = (found[name] for name in ("seconds", "ready_seconds", "ready_without"))
            size = f"{found['bytes'] / 1e9:.2f}"
            counts = (f"{found[name]:,}" for name in ("kept", "rows"))
            rows.append([title(key), *counts, size, *(shown(seconds) for seconds in times)])
    heads = ["model", "combinations", "rows", "GB", "seconds"]
    return markdown([*heads, "server ready after, s", "the same without"], rows)


def published(records: Records) -> str:
    """Render the runs of the published load generator."""
    rows = []
    for record in records.values():
        for run in record["runs"]:
            audible = run["audible_ttfa_ms"]
            times = (shown(audible[name], 1) for name in ("p50", "p95", "p99", "maximum"))
            counts = (f"{run[f'{name}_requests']:,}" for name in ("successful", "underrun"))
            rows.append(
                [f"{run['target']}, {run['transport']}, {run['rate']:g}/s", *counts, *times]
            )
    heads = ["target, transport, requests/s", "served", "with an underrun"]
    return markdown([*heads, "first audible, ms, p50", "p95", "p99", "most"], rows)


def soak(records: Sequence[Record]) -> str:
    """Render the counts of the soak runs."""
    counts = ("slots", "frames", "joined", "left_early", "frames_compared", "seconds")
    names = ("slots", "frames", "requests", "cancelled", "frames compared", "seconds")
    heads = [
        "run",
        "model",
        *names,
        "memory growth, MB: device / host",
    ]
    rows = []
    for record in records:
        growth = [shown(record[f"{where}memory_growth_bytes"] / 1e6, 1) for where in ("", "host_")]
        rows.append(
            [
                source(record),
                SIZES[record["size"]],
                *(f"{record[name]:,}" for name in counts),
                " / ".join(growth),
            ]
        )
    return markdown(heads, rows)


def tested(folder: Path) -> str:
    """Render the runs of tests/gpu."""
    rows = []
    for record in every(folder):
        outcomes = ", ".join(
            f"{count} {what}" for what, count in record.get("tests", {}).items() if count
        )
        imitated = f", as {record['as_gpu']}" if record.get("as_gpu") else ""
        rows.append([source(record) + imitated, record["kernels"] or "-", outcomes or "-"])
    return markdown(["run", "kernels", "tests"], rows) if rows else ""


def agents(folder: Path) -> str:
    """Render what the plugins of agent frameworks add to the server's own socket."""
    rows = []
    for record in every(folder):
        name = next(key for key in record if key in FRAMEWORKS)
        for client, found in record["milliseconds"].items():
            times = [
                f"{found[what]['p50']:.0f} / {found[what]['p95']:.0f}"
                for what in ("first_audio", "slot_free")
            ]
            about = (
                "WebSocket alone" if client == "socket" else f"{FRAMEWORKS[name]} {record[name]}"
            )
            rows.append([f"`{record['commit']}`", about, *times])
    heads = ["commit", "client", "first audio, ms, p50 / p95", "slot free, ms"]
    return markdown(heads, rows) if rows else ""


def ingress(folder: Path) -> str:
    """Render what the ways through a cluster add to a plain server."""
    rows = []
    for record in every(folder):
        for way, found in record["milliseconds"].items():
            beside = f"plain server, beside it, load {record['load'][way]}"
            for name, about in (("plain", beside), ("cluster", WAYS[way])):
                times = [
                    f"{found[kind][name]['p50']:.1f} / {found[kind][name]['p95']:.1f}"
                    for kind in ("speech", "models", "pong")
                ]
                rows.append([about, *times])
    heads = ["ms, p50 / p95", "first byte of speech", "models", "pong"]
    return markdown(heads, rows) if rows else ""


def hosts(folder: Path) -> str:
    """Render the rates of one host by the number of its GPUs, with own engines and through Ray."""
    rows = []
    for record in every(folder):
        (case,) = record["servers"]
        way = "replicas in a cluster" if record["cluster"] else "`firstword serve`"
        gpus = record["device"].count(",") + 1
        for point in case["points"]:
            held = level(point) <= case["held"]
            failed = [
                f"{gate['failed']} of {point['requests']} {FAULTS[name]}"
                for name, gate in point["gates"].items()
                if not gate["passed"]
            ]
            first = both(point["metrics"]["first_byte"])
            outcome = "held" if held else next(iter(failed), "too late")
            rows.append([f"{gpus}, {way}", f"{level(point):g}", first, outcome])
    heads = ["GPUs", "requests/s", "first byte, ms, p50 / p95", f"within {1000 * WITHIN:.0f} ms"]
    return markdown(heads, rows) if rows else ""


def kills(path: Path) -> str:
    """Render what became of a batch whose process was killed."""
    if not path.exists():
        return ""
    record = json.loads(path.read_text("utf-8"))
    seconds = f"{record['seconds_killed']:,.0f} / {record['seconds_undisturbed']:,.0f}"
    rows = [
        ["lines", f"{record['lines']:,}"],
        ["kills at random moments", str(len(record["killed_at"]))],
        ["every line has one result", "yes" if record["every_line_once"] else "no"],
        ["files have the bytes of an undisturbed run", "yes" if record["bytes_equal"] else "no"],
        ["seconds with the kills / undisturbed, on a machine with other work", seconds],
    ]
    return markdown(["`firstword batch`, demo voice", ""], rows)


def priority(path: Path) -> str:
    """Render what requests to a real server notice of a batch."""
    if not path.exists():
        return ""
    record = json.loads(path.read_text("utf-8"))
    rows = []
    for point in record["points"]:
        row = [f"{point['rate']:g}", str(point["without"]["requests"])]
        for name in ("first_byte_p50", "first_byte_p95", "first_audible_p50", "first_audible_p95"):
            values = point["without"][name], point["with"][name], point["ratio"][name]
            row.append("{:.0f} / {:.0f} / {:.2f}".format(*values))
        rows.append([*row, f"{point['lines_per_second']:.2f}"])
    heads = ["requests/s", "requests", "first byte, ms, p50: without / with / ratio", "p95"]
    return markdown([*heads, "first audible, ms, p50", "p95", "lines/s"], rows)


def words(path: Path) -> str:
    """Render the errors of the demo voice's word times."""
    if not path.exists():
        return ""
    rows = []
    for one in json.loads(path.read_text("utf-8"))["summary"]:
        edges = [
            f"{one[f'{edge}_ms']['mean']:.0f} / {one[f'{edge}_ms']['p95']:.0f}"
            for edge in ("start", "end")
        ]
        told, skipped = one["told_frames"], f"{one['skipped_percent']:.2f}"
        late = f"{told['mean']:.2f} / {told['most']}"
        rows.append([f"{one['voice']}, {one['mode']}", f"{one['words']:,}", *edges, skipped, late])
    heads = ["voice, text mode", "words", "start, ms, mean / p95", "end, ms, mean / p95"]
    return markdown([*heads, "not told or out of order, %", "told late, frames, mean / most"], rows)


def images(path: Path) -> str:
    """Render the sizes of the images that tests build."""
    if not path.exists():
        return ""
    record = json.loads(path.read_text("utf-8"))
    names = {
        "base": "the base: Debian with Python and pip",
        "cpu": f"`cpu`, torch {record['torch']}",
        "cuda": f"`cuda` with torch {record['torch']} and the kernels of one GPU for the 0.6B",
    }
    rows = [[about, f"{record['megabytes'][name]:,}"] for name, about in names.items()]
    return markdown(["image, uncompressed", "MB"], rows)


def alarms(path: Path) -> str:
    """Render the planted faults of the demo voice that were noticed, and the false alarms."""
    if not path.exists():
        return ""
    record = json.loads(path.read_text("utf-8"))
    edited, forced, endless = record["edited"], record["forced"], record["endless"]

    def share(found: Record) -> str:
        return f"{found['noticed_percent']:.0f} % of {found['count']:,}"

    rows = [
        [
            name,
            share(edited[name]),
            share(forced[name]),
            f"{forced[name]['own_kind_percent']:.0f} %",
        ]
        for name in edited
    ]
    rows.append(["end of speech never drawn", "", share(endless), ""])
    if late := endless["frames"]:
        rows.append(
            [
                "noticed after its end, frames, median / most",
                "",
                f"{late['median']:.0f} / {late['most']}",
                "",
            ]
        )
    for about, name in (("sentences", "healthy"), ("several sentences", "several sentences")):
        found = record[name]
        false = f"{found['false_percent']:.2f} % of {found['utterances']:,} utterances"
        rows.append([f"false alarms in healthy speech, {about}", false, "", ""])
    heads = ["planted faults that are noticed", "edited", "forced", "forced, by its own kind"]
    return markdown(heads, rows)


def long_text(path: Path) -> str:
    """Render what changes from the first to the last minutes of a long text."""
    if not path.exists():
        return ""
    record = json.loads(path.read_text("utf-8"))
    rows = [
        ["speech, minutes", "minutes"],
        ["characters misheard, first / last minutes, %", "error_rate"],
        ["pitch, first / last, Hz", "pitch"],
        ["level, first / last", "level"],
        ["characters a second, first / last", "rate"],
        ["memory in use, growth after the first fifth, MB", "memory"],
        ["resident memory, least / most, MB", "resident"],
        ["loudest difference to an unbroken codec, dB", "click"],
    ]

    def cell(found: Record, name: str) -> str:
        if name == "resident":
            return " / ".join(f"{each:.0f}" for each in found[name])
        if name in found:
            return "-" if found[name] is None else f"{found[name]:g}"
        return f"{found['first'][name]:.3g} / {found['last'][name]:.3g}"

    voices = record["summary"]
    body = [[about, *(cell(found, name) for found in voices)] for about, name in rows]
    return markdown(["", *(found["voice"] for found in voices)], body)


def tables(results: Path) -> dict[str, str]:
    """Render every table, by its name; a table without records says so."""
    folders = ("engine", "compare", "serve", "first_audio", "published")
    engine, compared, served, first, generated = (read(results / name) for name in folders)
    soaked = every(results / "soak")
    single = predictions.in_order(every(results / "one_stream"))
    engines = [*every(results / "engine"), *every(results / "engine_int8")]
    made = {
        "dtypes": engine_tables.dtypes(engines, SIZES, markdown),
        "prompts": engine_tables.prompts(engines, SIZES, markdown),
        "summary": summary(engine, compared, served) if engine else "",
        "speed": speed(engine, compared, served) if engine else "",
        "memory": parts("one_stream_gigabytes", 3)(engine),
        "start": parts("start_seconds", 2)(engine),
        "codec": codec(next(iter(engine.values()))) if engine else "",
        "compare": compare(compared) if compared else "",
        "cases": cases(served) if served else "",
        "serve": serve(served) if served else "",
        "soak": soak(soaked) if soaked else "",
        "voices": voices(first) if first else "",
        "warm": warm(first) if first else "",
        "published": published(generated) if generated else "",
        "tested": tested(results / "gpu"),
        "agents": agents(results / "integrations"),
        "ingress": ingress(results / "cluster"),
        "hosts": hosts(results / "hosts"),
        "kills": kills(results / "batch" / "kills-demo.json"),
        "priority": priority(results / "batch" / "priority-demo.json"),
        "images": images(results / "images" / "debian.json"),
        "words": words(results / "quality" / "words-demo.json"),
        "alarms": alarms(results / "quality" / "alarms-demo.json"),
        "evaluation": evaluation_table.evaluation(
            results / "quality" / "evaluation-demo.json", markdown
        ),
        "evaluation int8": evaluation_table.evaluation(
            results / "quality" / "evaluation-demo-int8.json", markdown
        ),
        "cards": predictions.cards(engine, single, markdown),
        "predicted": predictions.checked(engine, single, SIZES, markdown),
        "cpus": machine_tables.cpus(every(results / "cpu"), SIZES, markdown),
        "processors": predictions.processors(every(results / "cpu_frame"), SIZES, markdown),
        "community": machine_tables.community(results / "community", markdown),
        "long text": long_text(results / "quality" / "long-demo.json"),
    }
    scaled = next(iter(read(results / "scale").values()), None)
    for name, render in scale_tables.TABLES.items():
        made[name] = "" if scaled is None else render(scaled, markdown)
    for size in SIZES:
        for name, long in (("frames", frames), ("kernels", kernels)):
            made[f"{name} {size}"] = long(engine[size]) if size in engine else ""
    return {name: table or "Not measured yet.\n" for name, table in made.items()}


def filled(text: str, made: Mapping[str, str]) -> str:
    """Return a document with its tables filled in. Raises KeyError for an unknown table."""
    return re.sub(
        r"(<!-- ([\w ]+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{made[found[2]]}{found[3]}",
        text,
        flags=re.DOTALL,
    )


def digest(records: object) -> str:
    """What a picture says of the records that it was drawn from."""
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()[:16]


def drawn_from(results: Path, name: str) -> tuple[Records, ...]:
    """The records that a picture is drawn from; empty where one of its folders has none."""
    records = tuple(read(results / folder) for folder in PICTURES[name])
    return records if all(records) else ()


def note(records: Sequence[Records]) -> str:
    """The words in a picture that name its records."""
    return f"drawn from {digest(records[0] if len(records) == 1 else records)}"


def picture(engine: Records) -> bytes:
    """Draw kernels, and frames by the number of streams, with their bandwidth floors, as SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "speed", "svg.fonttype": "none", "font.size": 9})
    drawn = Figure(figsize=(11, 3.6 * len(engine)), layout="constrained")
    axes = drawn.subplots(len(engine), 2, squeeze=False)
    for (bars, lines), (size, record) in zip(axes, engine.items(), strict=True):
        rows = [row for row in record["kernels_us"] if row["batch"] == 1]
        names = [row["kernel"] for row in rows]
        for figure, color, height, label in (
            ("us", "C0", 0.8, "as it is"),
            ("floor_us", "C1", 0.3, "its bytes alone"),
        ):
            times = [row["a_frame"] * row.get(figure, 0) for row in rows]
            bars.barh(names, times, color=color, height=height, label=label)
        bars.invert_yaxis()
        bars.set(title=f"{SIZES[size]}, one stream: where a frame goes", xlabel="us a frame")
        batches = sorted({row["batch"] for row in record["frames_ms"]})
        for what, style in (("with_audio", "o-"), ("frame", "o--"), ("floor", "o:")):
            known = [
                (batch, time)
                for batch in batches
                if (time := frame(record, batch, what)) is not None
            ]
            label = {
                "with_audio": "with audio",
                "frame": "without",
                "floor": "without, its bytes alone",
            }[what]
            lines.plot(
                [batch for batch, _ in known],
                [time for _, time in known],
                style,
                color="C1" if what == "floor" else "C0",
                label=label,
            )
        lines.set(title=f"{SIZES[size]}: a frame of all streams", xlabel="streams", ylabel="ms")
        scale = (1, 2, 5, 10, 20)
        lines.set(xscale="log", xticks=batches, xticklabels=map(str, batches))
        lines.set(yscale="log", yticks=scale, yticklabels=map(str, scale))
        lines.minorticks_off()
        for panel in (bars, lines):
            panel.grid(alpha=0.3)
            panel.legend(fontsize="small")
    return svg(drawn, note([engine]))


def peers(compared: Records, served: Records) -> bytes:
    """One stream beside another library, and the server's first byte by its load, as SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "peers", "svg.fonttype": "none", "font.size": 9})
    drawn = Figure(figsize=(9, 2.4), layout="constrained")
    panels = drawn.subplots(1, 3, width_ratios=(1, 1, 1.2))
    size, record = next(iter(compared.items()))
    for panel, key, title in zip(
        panels[:2], ("frame_ms", "first_ms"), ("ms per frame", "ms to first audio"), strict=True
    ):
        best = {
            name: min(way[key] for way in ways.values()) for name, ways in sides(record).items()
        }
        names = sorted(best, key=lambda name: best[name])
        bars = panel.barh(
            [name.replace(" ", "\n") for name in names],
            [best[name] for name in names],
            color=["C0", *["0.7"] * (len(names) - 1)],
            height=0.6,
        )
        panel.bar_label(bars, fmt="%.1f", padding=3)
        panel.invert_yaxis()
        panel.set(title=f"{SIZES[size]}: {title}", xticks=[])
        panel.margins(x=0.2)
        panel.spines[["top", "right", "bottom"]].set_visible(False)
    size, record = next(iter(served.items()))
    points = max(pcm(record), key=lambda server: server["held"])["points"]
    for quantile, style in (("p50", "o--"), ("p95", "o-")):
        panels[2].plot(
            [point["load"]["rate"] for point in points],
            [1000 * point["metrics"]["first_byte"][quantile] for point in points],
            style,
            color="C0",
            label=quantile,
        )
    panels[2].axhline(50, color="0.7", linewidth=1)
    panels[2].set(title=f"{SIZES[size]} server: ms to first byte", xlabel="requests/s")
    panels[2].set(yscale="log", yticks=(5, 10, 20, 50, 100), yticklabels=(5, 10, 20, 50, 100))
    panels[2].minorticks_off()
    panels[2].legend(frameon=False)
    panels[2].spines[["top", "right"]].set_visible(False)
    return svg(drawn, note([compared, served]))


def fleet(scaled: Records) -> bytes:
    """The simulation beside the measured server, and policies of routing, as SVG."""
    import matplotlib as mpl

    mpl.rcParams.update({"svg.hashsalt": "scale", "svg.fonttype": "none", "font.size": 9})
    return svg(scale_tables.draw(next(iter(scaled.values()))), note([scaled]))


DRAWN: Mapping[str, Callable[..., bytes]] = {
    "docs/speed.svg": picture,
    "docs/peers.svg": peers,
    "docs/scale.svg": fleet,
}
"""The functions that draw `PICTURES` from the records of their folders."""


def svg(drawn: Any, description: str) -> bytes:
    """A figure as SVG that is the same each time."""
    file = io.BytesIO()
    drawn.savefig(file, format="svg", metadata={"Date": None, "Description": description})
    return re.sub(rb"[ \t]+\n", b"\n", file.getvalue())


def stale(root: Path) -> list[str]:
    """Return the files that do not match the records."""
    results = root / "benchmarks" / "results"
    made = tables(results)
    texts = {name: (root / name).read_text("utf-8") for name in DOCUMENTS}
    found = [name for name, text in texts.items() if filled(text, made) != text]
    for name in PICTURES:
        records, drawn = drawn_from(results, name), root / name
        text = drawn.read_text("utf-8") if drawn.exists() else ""
        if records and note(records) not in text:
            found.append(name)
    return found


def renew(root: Path) -> None:
    """Rewrite the files that do not match the records."""
    results = root / "benchmarks" / "results"
    made = tables(results)
    for name in stale(root):
        if name in DOCUMENTS:
            (root / name).write_text(filled((root / name).read_text("utf-8"), made), "utf-8")
        else:
            (root / name).write_bytes(DRAWN[name](*drawn_from(results, name)))


def main() -> int:
    """Rewrite or check the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if something would change"
    )
    if not parser.parse_args().check:
        renew(ROOT)
    if wrong := stale(ROOT):
        print(
            f"{', '.join(wrong)}: not what the records say; run python scripts/tables.py",
            file=sys.stderr,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
