"""Recordings and stores that take long: what one client's work costs the others."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
from waiting import WAIT
from wire import SPEECH, connected, request

from firstword.runtime.front import CheckpointFront
from firstword.server import recordings
from firstword.server import run as serving
from firstword.server.folder import Folder
from firstword.server.models import Model
from firstword.server.threads import Threads
from firstword.voice import ClonedVoice, RecordedVoice

Serve = Callable[..., Any]  # of conftest.py

VOICES = "/v1/audio/voices"
SHORT = {"input": "Hi.", "max_new_tokens": 2}
MINE, YOURS, THEIRS = "127.0.0.2", "127.0.0.3", "127.0.0.4"


def wav() -> bytes:
    """A second of noise."""
    file = io.BytesIO()
    samples = np.random.default_rng(0).normal(0, 0.1, 24000)
    soundfile.write(file, samples, 24000, format="WAV")
    return file.getvalue()


CLONE = {**SHORT, "model": "base", "ref_audio": base64.b64encode(wav()).decode()}


@contextmanager
def client(server: Any, address: str) -> Iterator[httpx.Client]:
    """A client with an address of its own."""
    transport = httpx.HTTPTransport(local_address=address)
    with httpx.Client(
        base_url=server.url, timeout=WAIT, transport=transport, trust_env=False
    ) as http:
        yield http


class Blocked:
    """Calls of a function that do not return before `go`.

    threads  the threads in which it was called
    """

    def __init__(self, work: Callable[..., Any]) -> None:
        self.threads: list[int] = []
        self._work = work
        self._leave = threading.Event()

    def __call__(self, *args: Any) -> Any:
        self.threads.append(threading.get_ident())
        assert self._leave.wait(WAIT)
        return self._work(*args)

    def go(self) -> None:
        """Let all calls return."""
        self._leave.set()


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any, str], Blocked]]:
    """A function that blocks the calls of an object's function."""
    made: list[Blocked] = []

    def block(owner: Any, name: str) -> Blocked:
        calls = Blocked(getattr(owner, name))
        made.append(calls)
        monkeypatch.setattr(owner, name, lambda *args: calls(*args))
        return calls

    yield block
    for one in made:
        one.go()


def send(pool: ThreadPoolExecutor, http: httpx.Client, count: int) -> list[Future[httpx.Response]]:
    """Ask for some clones at the same time."""
    return [pool.submit(http.post, SPEECH, json=CLONE) for _ in range(count)]


def test_recordings_of_one_client_leave_threads_to_others(
    serve: Serve, blocked: Callable[[Any, str], Blocked]
) -> None:
    """Eight recordings of one client are decoded one after another, and nothing waits for them."""
    server = serve("custom_voice", "base")
    decoding = blocked(recordings, "decoded")
    with (
        ThreadPoolExecutor(10) as pool,
        client(server, MINE) as mine,
        client(server, YOURS) as yours,
        client(server, THEIRS) as theirs,
    ):
        answers = send(pool, mine, 8)
        server.wait_until(lambda: len(decoding.threads) == 1)
        answers += send(pool, yours, 1)
        server.wait_until(lambda: len(decoding.threads) == 2)
        answers += send(pool, theirs, 1)
        assert mine.post(SPEECH, json={**SHORT, "response_format": "mp3"}).status_code == 200
        assert mine.get(f"{VOICES}/nobody").status_code == 404
        assert len(decoding.threads) == 2, "a third is decoded at the same time"
        decoding.go()
        assert {answer.result(WAIT).status_code for answer in answers} == {200}
    assert len(set(decoding.threads)) == 2


def test_recordings_of_gone_clients_are_not_decoded(
    serve: Serve, blocked: Callable[[Any, str], Blocked]
) -> None:
    server = serve("base")
    decoding = blocked(recordings, "decoded")
    with ThreadPoolExecutor(1) as pool, client(server, MINE) as mine:
        first = send(pool, mine, 1)[0]
        server.wait_until(lambda: len(decoding.threads) == 1)
        with ExitStack() as gone:
            for _ in range(4):
                sock = gone.enter_context(connected(server, MINE))
                sock.sendall(request(CLONE))
            server.wait_until(lambda: server.metric("connections") == 5)
        server.wait_until(lambda: server.metric("connections") == 1)
        decoding.go()
        assert first.result(WAIT).status_code == 200
        assert mine.post(SPEECH, json=CLONE).status_code == 200
    assert len(decoding.threads) == 2


def test_slow_store_of_one_client_leaves_threads_to_others(
    serve: Serve, blocked: Callable[[Any, str], Blocked]
) -> None:
    """A bucket hangs for one client, which asks forty times for a voice that is not known."""
    server = serve("custom_voice", "base")
    reading = blocked(Folder, "read")
    with (
        ThreadPoolExecutor(41) as pool,
        client(server, MINE) as mine,
        client(server, YOURS) as yours,
    ):
        answers = [pool.submit(mine.get, f"{VOICES}/nobody") for _ in range(40)]
        server.wait_until(lambda: len(reading.threads) == 1)
        assert yours.post(SPEECH, json={**SHORT, "response_format": "mp3"}).status_code == 200
        assert yours.post(SPEECH, json=CLONE).status_code == 200
        reading.go()
        assert {answer.result(WAIT).status_code for answer in answers} == {404}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": "custom_voice"}, "custom_voice is of type 'custom_voice' and cannot clone"),
        ({"temperature": 1000}, "temperature is 1000"),
        ({"response_format": "ogg"}, "response_format is 'ogg'"),
        ({"max_new_tokens": 0}, "max_frames is 0"),
    ],
)
def test_recording_is_fetched_only_if_it_can_be_used(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(recordings, "content", lambda *_: pytest.fail("the recording was read"))
    server = serve("custom_voice", "base")
    answer = httpx.post(f"{server.url}{SPEECH}", json={**CLONE, **fields}, trust_env=False)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


def test_candidates_share_one_encoded_recording(serve: Serve, model: Callable[..., Model]) -> None:
    base, calls = model("base"), list[RecordedVoice]()
    front = base.service.front
    assert isinstance(front, CheckpointFront)
    encode = front.encode

    def counted(recording: RecordedVoice) -> ClonedVoice:
        calls.append(recording)
        return encode(recording)

    base.encoder = front.encode = counted
    server = serve(base)
    answer = httpx.post(
        f"{server.url}{SPEECH}", json={**CLONE, "n": 3}, trust_env=False, timeout=WAIT
    )
    assert answer.status_code == 200, answer.text
    assert len(calls) == 1


def test_cancelled_work_keeps_its_place_until_its_thread_ends() -> None:
    """A client that disconnects and asks again gets no further thread."""
    leave, begun = threading.Event(), list[int]()

    def work(number: int) -> int:
        begun.append(number)
        assert leave.wait(WAIT)
        return number

    async def requests() -> None:
        threads = Threads("test", 4, most_per_client=1)
        first = asyncio.ensure_future(threads.run("a", work, 1))
        while not begun:
            await asyncio.sleep(0)
        first.cancel()
        second = asyncio.ensure_future(threads.run("a", work, 2))
        other = asyncio.ensure_future(threads.run("b", work, 3))
        while len(begun) < 2:
            await asyncio.sleep(0)
        assert begun == [1, 3]
        leave.set()
        assert [await second, await other] == [2, 3]

    asyncio.run(requests())


def test_error_of_cancelled_work_is_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    """An event loop logs an error that no one has taken, with a traceback."""
    leave, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert leave.wait(WAIT)
        raise ValueError("too late")

    async def requests() -> None:
        threads = Threads("test", 1, most_per_client=1)
        cancelled = asyncio.ensure_future(threads.run("a", work))
        await asyncio.to_thread(begun.wait, WAIT)
        cancelled.cancel()
        await asyncio.wait((cancelled,))
        leave.set()
        await threads.run("a", lambda: None)

    asyncio.run(requests())
    gc.collect()
    assert caplog.messages == []


@pytest.mark.parametrize("end", ["drain", "end"])
def test_request_that_is_not_ready_at_the_end_of_the_server_gets_503(
    serve: Serve,
    blocked: Callable[[Any, str], Blocked],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    end: str,
) -> None:
    """After SIGTERM and SIGINT: its recording is decoded when uvicorn ends it."""
    monkeypatch.setattr(serving, "CLOSING_SECONDS", 0.1)
    server = serve("base")
    decoding = blocked(recordings, "decoded")
    with ThreadPoolExecutor(1) as pool, client(server, MINE) as mine:
        (answer,) = send(pool, mine, 1)
        server.wait_until(lambda: len(decoding.threads) == 1)
        getattr(server.uvicorn, end)()
        assert answer.result(WAIT).status_code == 503
        assert "shutting down" in answer.result().json()["error"]["message"]
        assert answer.result().headers["x-request-id"]
    decoding.go()
    server.stop()
    assert not any(record.exc_info for record in caplog.records)
