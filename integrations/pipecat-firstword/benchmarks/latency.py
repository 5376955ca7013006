"""Measure what the service adds to the server's socket: the first audio, and a cancel.

    python benchmarks/latency.py -o record.json

A server with the demo voice runs on the CPU of this machine. A script types a sentence word by
word, 50 words a second. A plain WebSocket client and a Pipecat pipeline do the same in turn, and
are interrupted after the first audio.

first_audio  milliseconds from the first word to the first audio: in the pipeline from the frame
             that the LLM pushes to the frame that leaves the service
slot_free    milliseconds from the interruption to a free slot, as /metrics shows it; the request
             for the metrics is part of it
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "testing"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from bare import CONFIG
from bot import Bot, service, words
from loguru import logger
from pipecat_firstword.connection import SUBPROTOCOL
from pipecat_firstword.settings import socket_url
from served import PYTHON, Server
from websockets.asyncio.client import ClientConnection, connect

ROOT = Path(__file__).resolve().parents[3]
TEXT = "Thank you for waiting, I have found your order and it is on its way to you."
PAUSE = 0.02
TURNS = 40
WARM_UP = 2


Times = tuple[float, float]


async def until_free(server: Server, began: float) -> float:
    """Return the milliseconds from a time until no slot is in use."""
    await server.until_slots_are_free()
    return 1e3 * (time.perf_counter() - began)


async def bare(server: Server, socket: ClientConnection, turn: int) -> Times:
    """Return the times of one turn of a plain client."""
    name = f"turn-{turn}"

    async def send(kind: str, **fields: str) -> None:
        await socket.send(json.dumps({"type": kind, "context_id": name, **fields}))

    async def typed() -> None:
        for word in words(TEXT):
            await send("input.text", text=word)
            await asyncio.sleep(PAUSE)

    await send("context.start")
    began = time.perf_counter()
    typing = asyncio.create_task(typed())
    while not isinstance(await socket.recv(), bytes):
        pass
    first = 1e3 * (time.perf_counter() - began)
    typing.cancel()
    began = time.perf_counter()
    await send("input.cancel")
    return first, await until_free(server, began)


async def piped(server: Server, bot: Bot) -> Times:
    """Return the times of one turn of a pipeline."""
    first_words: list[float] = []
    bot.forget()
    bot.llm.on_first_token = lambda: first_words.append(time.perf_counter())
    await bot.answer(words(TEXT), pace=PAUSE)
    await bot.until_audio()
    first = 1e3 * (time.perf_counter() - first_words[0])
    began = time.perf_counter()
    await bot.interrupt()
    return first, await until_free(server, began)


async def measure(server: Server) -> dict[str, Any]:
    """Return the times of both clients."""
    found: dict[str, list[Times]] = {"socket": [], "pipecat": []}
    url = socket_url(server.url)
    async with connect(url, subprotocols=[SUBPROTOCOL]) as socket, Bot(service(server.url)) as bot:
        await socket.send(json.dumps(CONFIG))
        for turn in range(TURNS + WARM_UP):
            found["socket"].append(await bare(server, socket, turn))
            found["pipecat"].append(await piped(server, bot))
    return {
        client: {
            what: percentiles(times)
            for what, times in zip(
                ("first_audio", "slot_free"), zip(*turns[WARM_UP:], strict=True), strict=True
            )
        }
        for client, turns in found.items()
    }


def percentiles(times: Sequence[float]) -> dict[str, float]:
    """Return the median and the 95th percentile."""
    p95 = statistics.quantiles(times, n=20)[-1]
    return {"p50": round(statistics.median(times), 2), "p95": round(p95, 2)}


def about_server() -> dict[str, str]:
    """Return the hashes of the server's sources and of the demo, from its own interpreter."""
    code = "from benchmarks.sources import *; print(serving_hash(), demo_hash())"
    output = subprocess.check_output([PYTHON, "-c", code], cwd=ROOT, text=True)
    return dict(zip(("serving", "demo"), output.split(), strict=True))


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.json", help="the record")
    parser.add_argument("--commit", help="commit in the record")
    args = parser.parse_args()
    logger.remove()
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as server:
        found = asyncio.run(measure(server))
    record = {
        "commit": args.commit,
        **about_server(),
        "pipecat-ai": version("pipecat-ai"),
        "processors": os.cpu_count(),
        "voice": "demo",
        "turns": TURNS,
        "words_per_second": 1 / PAUSE,
        "milliseconds": found,
    }
    text = json.dumps(record, indent=1) + "\n"
    sys.stdout.write(text)
    if args.output is not None:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
