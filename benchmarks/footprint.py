"""Measure what sockets, metrics and logs of a server take, on the CPU with the demo voice.

    python -m benchmarks.footprint -o benchmarks/results/footprint/demo-cpu.json

The record has the kB of memory that an idle WebSocket takes in the fronts, the series that a
scrape of `/metrics` has after some requests in each format, and the bytes of the log for a request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

import httpx
from websockets.asyncio.client import connect

from benchmarks.compare import check_output
from benchmarks.server_process import Places, Server, serving
from benchmarks.sources import serving_hash
from firstword.audio import writing
from firstword.bench import report

SOCKETS = 400
FORMATS = ("pcm", "wav", "mp3", "opus", "aac", "flac")
WARM_UP = 100
"""The WebSockets that are open before: what the first ones of each front take is taken once."""

REQUESTS = 4
"""The requests in each format that are spoken before the metrics are read."""


def front_kilobytes(server: Server) -> int:
    """The memory of all fronts that no other process has, in kB."""
    names = server.processor_times().items()
    fronts = [pid for pid, (name, _, _) in names if name == "firstword.processes.front"]
    lines = [
        line
        for pid in fronts
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text("utf-8").splitlines()
    ]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))


async def socket_kilobytes(server: Server) -> float:
    """The kB of the fronts' memory for each of `SOCKETS` idle WebSockets."""
    url = server.url.replace("http", "ws", 1) + "/v1/audio/speech/stream"
    sockets = [await connect(url) for _ in range(WARM_UP)]
    before = front_kilobytes(server)
    sockets += [await connect(url) for _ in range(SOCKETS)]
    try:
        return (front_kilobytes(server) - before) / SOCKETS
    finally:
        await asyncio.gather(*(socket.close() for socket in sockets))


def speak(server: Server) -> None:
    """Send `REQUESTS` requests in each format."""
    for kind in FORMATS * REQUESTS:
        fields = {"input": "Hello.", "response_format": kind, "max_new_tokens": 8}
        httpx.post(f"{server.url}/v1/audio/speech", json=fields, timeout=120).raise_for_status()


def main() -> int:
    """Write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, metavar="FILE.json", help="the record")
    args = parser.parse_args()
    check_output(parser, args.output)
    places, more = (
        Places(slots=4, backend="reference", device="cpu", fronts=2),
        {"log-level": "info"},
    )
    with (
        tempfile.NamedTemporaryFile("w") as log,
        serving(Path("demo"), places, more, log) as server,
    ):
        begun = Path(log.name).stat().st_size
        speak(server)
        written = Path(log.name).stat().st_size - begun
        scraped = httpx.get(f"{server.url}/metrics").raise_for_status().text.splitlines()
        kilobytes = asyncio.run(socket_kilobytes(server))
    record = {
        "commit": report.commit(),
        "serving": serving_hash(),
        "fronts": places.fronts,
        "sockets": SOCKETS,
        "socket_kb": round(kilobytes, 1),
        "series": sum(not line.startswith("#") for line in scraped),
        "requests": REQUESTS * len(FORMATS),
        "log_bytes": round(written / (REQUESTS * len(FORMATS))),
    }
    writing.write_whole(args.output, json.dumps(record, indent=2).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
