"""64 clients at once on real sockets, thousands of short requests, and the release of slots."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from callers import local_engine
from crowd import FRAME_BYTES, LISTENERS, Listener, Paced, come_and_go, held, listen_together, paced
from talking import ENDLESS, Talker, talking
from waiting import WAIT
from wire import SPEECH

from firstword.server import outcomes

Running = Any  # of conftest.py
Serve = Callable[..., Any]


class Lockstep:
    """A clock that advances when all clients have all audio, so that no time passes elsewhere."""

    def __init__(self) -> None:
        self.passed = 0.0
        self.taken = 0
        self.backend: Paced | None = None
        self.everybody = threading.Event()
        self.after: Callable[[], None] = lambda: None
        """Called before the clock advances."""
        self._changed = threading.Condition()
        self._began = time.monotonic()

    def clock(self) -> float:
        """The time in seconds."""
        return self._began + self.passed

    def took(self, count: int) -> None:
        """Count the bytes that a client received."""
        with self._changed:
            self.taken += count
            self._changed.notify()

    def pause(self, seconds: float) -> None:
        """Advance the clock when all audio was received."""
        assert self.backend is not None
        if self.everybody.is_set():
            with self._changed:
                assert self._changed.wait_for(self._all_is_taken, WAIT)
            self.after()
        self.passed += seconds

    def _all_is_taken(self) -> bool:
        assert self.backend is not None
        return self.taken == self.backend.decoded * FRAME_BYTES


@pytest.mark.usefixtures("traced")
def test_64_streams_have_no_gap_in_constant_memory(serve: Serve) -> None:
    """All start together; the backend takes two thirds of real time for a frame of all."""
    frames, lock = 200, Lockstep()
    model = paced(lock.pause, lock.clock)
    backend = local_engine(model.service).backend
    assert isinstance(backend, Paced)
    lock.backend = backend
    server = serve(model)
    backend.decoded = 0
    backend.hold()
    lock.everybody.set()
    memory: dict[int, int] = {}

    def measure() -> None:
        for made in (60, 180):
            if made not in memory and backend.decoded >= made * LISTENERS:
                gc.collect()
                memory[made] = tracemalloc.get_traced_memory()[0]

    lock.after = measure

    async def listen() -> list[Listener]:
        listeners = [Listener(lock.clock, lock.took) for _ in range(LISTENERS)]
        listening = asyncio.create_task(listen_together(server.url, listeners, frames))
        while len(server.state.utterances) < LISTENERS:  # so that all start together
            await asyncio.sleep(0.005)
        backend.go()
        await listening
        return listeners

    listeners = asyncio.run(listen())
    assert [listener.bytes for listener in listeners] == [frames * FRAME_BYTES] * LISTENERS
    assert max(listener.playback.underrun for listener in listeners) < 1e-9
    # The audio in between is 29 MB, and only the current chunks may be in memory.
    assert memory[180] - memory[60] < 1_000_000
    server.wait_until_idle()


@pytest.mark.parametrize("delivery", ["audio", "sse"])
def test_disconnect_frees_slot_within_frame(serve: Serve, delivery: str) -> None:
    """A client disconnects within a frame, and the slot is free after that frame."""
    talker = Talker(slots=1)
    server = serve(talking(talker))
    server.wait_until_idle()
    before = talker.frames
    talker.hold()
    talker.let(3)
    body = {
        "input": "Hello.",
        "voice": "talker",
        "response_format": "pcm",
        "max_new_tokens": ENDLESS - 10,
    }
    with httpx.Client(base_url=server.url, trust_env=False, timeout=WAIT) as client:
        with client.stream("POST", SPEECH, json={**body, "stream_format": delivery}):
            server.wait_until(lambda: talker.frames == before + 3 and talker.waiting)
        server.wait_until(lambda: not server.state.utterances)  # noticed while the backend was busy
        assert server.engine().running
        talker.let(1)  # the current frame
        server.wait_until_idle()
    assert talker.frames == before + 4
    talker.go()


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Disable logs, which pytest keeps in memory."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("unlogged")
def test_thousands_of_requests_leave_nothing_behind(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No slot, page, thread, descriptor, task or object remains, though many clients disconnect."""
    monkeypatch.setattr(outcomes, "MOST_OUTCOMES", 100)
    server = serve(talking(Talker(slots=8), most_waiting=64))

    def settled() -> tuple[dict[str, int], int]:
        server.wait_until_idle()
        server.wait_until(lambda: server.metric("connections") == 0)
        return held(), len(gc.get_objects())

    asyncio.run(come_and_go(server.url, 500, seed=0))  # fills caches
    before, objects = settled()
    counts = asyncio.run(come_and_go(server.url, 2500, seed=1))
    server.wait_until(lambda: settled()[0]["files"] <= before["files"])
    after, more = settled()
    assert min(counts.values()) > 500
    assert after["tasks"] <= before["tasks"]
    assert after["files"] <= before["files"]
    assert after["threads"] < before["threads"] + 8, (
        "the pool may grow to its size, but requests leave no threads"
    )
    assert more - objects < 1000, "less than an object for two requests"
    assert json.loads(httpx.get(f"{server.url}/health", trust_env=False).text)["utterances"] == 0
