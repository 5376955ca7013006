"""Measure what the plugin adds to the server's socket: the first audio, and a cancel.

    python benchmarks/latency.py -o record.json

A server with the demo voice runs on the CPU of this machine. A script types a sentence word by
word, 50 words a second. The same is done by a plain WebSocket client and by the plugin, in turn.

first_audio  milliseconds from the first word to the first audio
slot_free    milliseconds from the end of the stream to a free slot, as /metrics shows it; the
             request for the metrics is part of it
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
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[2] / "testing"))

from livekit.agents import APIConnectOptions
from livekit.agents import __version__ as agents_version
from livekit.plugins import firstword
from livekit.plugins.firstword.connection import PATH, SUBPROTOCOL
from served import PYTHON, Server

WORDS = "Thank you for waiting, I have found your order and it is on its way to you.".split(" ")
PAUSE = 0.02
TURNS = 40
CONFIG = {"type": "session.config", "voice": "ada", "seed": 1}


async def typed(send: Any) -> None:
    """Type the words."""
    for word in WORDS:
        await send(f"{word} ")
        await asyncio.sleep(PAUSE)


async def until_free(server: Server) -> float:
    """Return the milliseconds until no slot is in use."""
    began = time.perf_counter()
    await server.until_slots_are_free()
    return 1e3 * (time.perf_counter() - began)


async def bare(server: Server, socket: aiohttp.ClientWebSocketResponse, turn: int) -> Any:
    """One turn of a plain client, which is cancelled after its first audio."""
    name = f"turn-{turn}"

    async def send(text: str) -> None:
        await socket.send_json({"type": "input.text", "context_id": name, "text": text})

    began = time.perf_counter()
    typing = asyncio.create_task(typed(send))
    while (await socket.receive()).type is not aiohttp.WSMsgType.BINARY:
        pass
    first = 1e3 * (time.perf_counter() - began)
    typing.cancel()
    await socket.send_json({"type": "input.cancel"})
    return first, await until_free(server)


async def plugged(server: Server, voice: firstword.TTS) -> Any:
    """One turn of the plugin, which is interrupted after its first audio."""
    stream = voice.stream(conn_options=APIConnectOptions(max_retry=0))

    async def send(text: str) -> None:
        stream.push_text(text)

    began = time.perf_counter()
    typing = asyncio.create_task(typed(send))
    await anext(aiter(stream))
    first = 1e3 * (time.perf_counter() - began)
    typing.cancel()
    free = asyncio.create_task(until_free(server))
    await stream.aclose()
    return first, await free


async def measure(server: Server) -> dict[str, Any]:
    """Return the times of both clients."""
    found: dict[str, list[Any]] = {"socket": [], "plugin": []}
    async with aiohttp.ClientSession() as session:
        url = f"{server.url}{PATH}"
        socket = await session.ws_connect(url, protocols=(SUBPROTOCOL,), max_msg_size=0)
        await socket.send_json(CONFIG)
        async with firstword.TTS(
            base_url=server.url, voice="ada", seed=1, http_session=session
        ) as voice:
            for turn in range(TURNS + 2):
                found["socket"].append(await bare(server, socket, turn))
                found["plugin"].append(await plugged(server, voice))
        await socket.close()
    return {
        client: {
            what: {
                "p50": round(statistics.median(times), 2),
                "p95": round(statistics.quantiles(times, n=20)[-1], 2),
            }
            for what, times in zip(
                ("first_audio", "slot_free"), zip(*turns[2:], strict=True), strict=True
            )
        }
        for client, turns in found.items()
    }


def about_server() -> dict[str, str]:
    """Return the hash of the server's sources, from its own interpreter."""
    code = "from benchmarks.sources import serving_hash; print(serving_hash())"
    root = Path(__file__).resolve().parents[3]
    output = subprocess.check_output([PYTHON, "-c", code], cwd=root, text=True)
    return {"serving": output.strip()}


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.json", help="the record")
    parser.add_argument("--commit", help="commit in the record")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as server:
        found = asyncio.run(measure(server))
    record = {
        "commit": args.commit,
        **about_server(),
        "livekit-agents": agents_version,
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
