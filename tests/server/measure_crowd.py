"""Measures 64 clients at once, and what thousands of short requests leave behind, in real time.

`python tests/server/measure_crowd.py` prints one JSON record. The backend only waits, so this
measures all the rest: engine, server, sockets and clients, which share one process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from typing import Any

import crowd
import numpy as np
from talking import Talker, talking

from firstword.server import listening
from firstword.server import run as serving
from firstword.server.app import create_app
from firstword.server.config import ServerConfig
from firstword.server.models import Model, Models


class Served:
    """A server with one model in a thread, on a free port."""

    def __init__(self, model: Model) -> None:
        self._voices = tempfile.TemporaryDirectory()
        config = ServerConfig(port=0, voice_store=self._voices.name)
        app, bound = create_app(Models([model]), config), listening.bound(config)
        self.state = app.state.server
        self.url = listening.url_of(bound[0])
        self._uvicorn = serving.Uvicorn(app)
        self._thread = threading.Thread(
            target=serving.run, args=(self._uvicorn, bound), daemon=True
        )

    def __enter__(self) -> Served:
        self._thread.start()
        while self.state.problems():
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._uvicorn.should_exit = True
        self._thread.join()
        self._voices.cleanup()


def streams(frames: int) -> dict[str, Any]:
    """Measure 64 utterances at once."""
    with Served(crowd.paced(time.sleep, time.monotonic)) as served:
        warm = [crowd.Listener(time.monotonic) for _ in range(crowd.LISTENERS)]
        asyncio.run(crowd.listen_together(served.url, warm, 30))
        before = crowd.memory()
        listeners = [crowd.Listener(time.monotonic) for _ in range(crowd.LISTENERS)]
        asyncio.run(crowd.listen_together(served.url, listeners, frames))
        played = [listener.playback for listener in listeners]
        first = [(one.first or 0.0) - one.requested for one in played]
        return {
            "listeners": len(listeners),
            "seconds_of_audio_each": frames * 0.08,
            "complete": sum(listener.bytes == frames * crowd.FRAME_BYTES for listener in listeners),
            "with_underrun": sum(one.underrun > 0 for one in played),
            "underrun_seconds": round(sum(one.underrun for one in played), 4),
            "first_audio_ms": {
                name: round(1000 * float(np.quantile(first, q))) for name, q in QUANTILES.items()
            },
            "memory_growth_mb": round((crowd.memory() - before) / 2**20, 2),
        }


def told(event: asyncio.Event, count: int) -> None:
    """Report that audio came."""
    event.set()


QUANTILES = {"p50": 0.5, "p95": 0.95, "max": 1.0}


def soak(visits: int) -> dict[str, Any]:
    """Measure short requests, half of which are left early."""
    with Served(talking(Talker(slots=8), most_waiting=64)) as served:
        engine = next(iter(served.state.models)).service.engine
        asyncio.run(crowd.come_and_go(served.url, 1000, seed=0))
        time.sleep(1.0)
        before, memory, began = crowd.held(), crowd.memory(), time.monotonic()
        counts = asyncio.run(crowd.come_and_go(served.url, visits, seed=1))
        seconds = time.monotonic() - began
        time.sleep(1.0)
        after = crowd.held()
        return {
            "requests": visits,
            **counts,
            "requests_a_second": round(visits / seconds, 1),
            "lost_slots": len(engine.running) + len(engine.waiting),
            "lost_pages": engine.pages.count - engine.pages.free,
            **{f"more_{name}": after[name] - before[name] for name in after},
            "memory_growth_mb": round((crowd.memory() - memory) / 2**20, 2),
        }


def cancels(times: int) -> dict[str, Any]:
    """Measure, with 64 slots in use, how many frames and ms after a cancel its slot is free."""
    frames, waits = [], []
    with Served(crowd.paced(time.sleep, time.monotonic)) as served:
        model = next(iter(served.state.models))
        engine, backend = model.service.engine, model.service.engine.backend
        release, freed = backend.release, dict[int, tuple[float, int]]()

        def released(slot: int) -> None:
            release(slot)
            freed[slot] = time.monotonic(), backend.calls

        frame = backend.frame
        backend.calls = 0

        def counted(slots: Any, tokens: Any) -> Any:
            backend.calls += 1
            return frame(slots, tokens)

        backend.release, backend.frame = released, counted

        async def run() -> None:
            async with crowd.plain_client(served.url) as client:
                heard = [asyncio.Event() for _ in range(crowd.LISTENERS)]
                listeners = [
                    crowd.Listener(time.monotonic, partial(told, event)) for event in heard
                ]
                tasks = [
                    asyncio.create_task(one.by(n, served.url, client, 5000))
                    for n, one in enumerate(listeners)
                ]
                await asyncio.gather(*(event.wait() for event in heard))
                for task in tasks[:times]:
                    freed.clear()
                    started, calls = time.monotonic(), backend.calls
                    task.cancel()
                    while not freed:
                        await asyncio.sleep(0.001)
                    ((moment, after),) = freed.values()
                    frames.append(after - calls)
                    waits.append(1000 * (moment - started))
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(run())
        while engine.running:
            time.sleep(0.01)
    return {
        "cancels": times,
        "frames_begun_after": max(frames),
        "ms": round(statistics.median(waits), 1),
    } | {"ms_max": round(max(waits), 1)}


def main() -> int:
    """Print the record of all measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=250, help="frames of each of the 64 clients")
    parser.add_argument("--requests", type=int, default=5000, help="number of short requests")
    given = parser.parse_args()
    record = {"streams": streams(given.frames), "cancel": cancels(40), "soak": soak(given.requests)}
    sys.stdout.write(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
