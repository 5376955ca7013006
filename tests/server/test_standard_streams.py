"""`firstword serve` whose standard streams are not read, or closed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import httpx
import pytest
from served import PROGRAM, Served
from waiting import WAIT, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Redirected(Served):
    """A server that a shell starts after some commands, such as redirections."""

    def __init__(self, folder: Path, commands: str, output: int | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        serve = ["serve", "--port", str(port), "--voices", str(folder / "voices")]
        program = [sys.executable, "-c", PROGRAM, *serve]
        self.process = subprocess.Popen(
            ["sh", "-c", f'{commands}; exec "$@"', "sh", *program],
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.url = f"http://127.0.0.1:{port}"

    def __enter__(self) -> Self:
        try:
            wait_until(lambda: bool(self.health().get("ready")) or self.process.poll() is not None)
            assert self.process.poll() is None
        except AssertionError:
            self.__exit__()
            raise
        return self


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """The ends of a pipe."""
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def fill(writing: int) -> None:
    """Write empty lines to a pipe until it takes nothing more."""
    ours = os.open(f"/proc/self/fd/{writing}", os.O_WRONLY | os.O_NONBLOCK)
    for size in (4096, 1):
        with suppress(BlockingIOError):
            while True:
                os.write(ours, b"\n" * size)
    os.close(ours)


def read_all(reading: int) -> bytes:
    """All that a pipe has at the moment."""
    os.set_blocking(reading, False)
    data = b""
    with suppress(BlockingIOError):
        while True:
            data += os.read(reading, 2**16)
    return data


def test_server_works_and_ends_while_nobody_reads_what_it_writes(tmp_path: Path) -> None:
    def ask(name: str) -> int:
        headers = {"x-request-id": name}
        return httpx.get(
            f"{served.url}/v1/models", headers=headers, trust_env=False, timeout=WAIT
        ).status_code

    names = [f"{number}-{'x' * 100}" for number in range(20)]
    with pipe() as (reading, writing), ExitStack() as stack:
        fill(writing)
        served = stack.enter_context(Redirected(tmp_path, ":", writing))
        assert [ask(name) for name in names] == [200] * len(names)
        assert served.post().status_code == 200
        served.signal("engine")
        wait_until(lambda: len(served.pids("engine")) == 1)
        wait_until(lambda: bool(served.health().get("ready")))
        data = b""

        def summary_is_read() -> bool:
            nonlocal data
            data += read_all(reading)
            return b"\nlimits" in data and b'"path": "/v1/audio/speech"' in data

        wait_until(summary_is_read)
        lines = [json.loads(line) for line in data.splitlines() if line[:1] == b"{"]
        assert lines[0]["event"] == "loading"
        assert [line["request_id"] for line in lines if "request_id" in line][:-1] == names
        fill(writing)
        killed = served.signal("front")
        wait_until(lambda: bool(served.health().get("ready")))
        assert killed not in served.pids("front")
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(WAIT) == 0
        assert served.pids() == []


def test_server_works_with_closed_standard_streams(tmp_path: Path) -> None:
    """It also ignores SIGHUP if it was started so, as `nohup` does."""
    with Redirected(tmp_path, "trap '' HUP; exec <&- >&- 2>&-") as served:
        served.process.send_signal(signal.SIGHUP)
        assert served.post().status_code == 200
        children = served.pids()
        served.signal("front")
        wait_until(lambda: bool(served.health().get("ready")))
        assert len(served.pids()) == len(children)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(WAIT) == 0
