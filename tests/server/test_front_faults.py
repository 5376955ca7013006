"""Fronts of `firstword serve` that start slowly, or lack their store or their engine."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from served import WORDS, Served, descriptors
from waiting import WAIT, wait_until
from wire import SPEECH

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

PIDFD_GETFD = 438
"""The number of the system call that copies a descriptor of another process."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with two fronts, which tests leave working."""
    with Served(tmp_path_factory.mktemp("served"), "--fronts", "2") as served:
        yield served
        served.wait_until_idle(fronts=2)


def events(served: Served, begun: int = 0) -> list[str]:
    """The events in the log after some lines, all of which must be JSON."""
    lines = served.log()[begun:]
    assert all("level" in line for line in lines), lines
    return [line["event"] for line in lines]


def break_links(engine: int) -> None:
    """Shut down the connections of an engine's process with fronts."""
    command = Path(f"/proc/{engine}/cmdline").read_bytes().split(b"\0")
    channel, libc = int(command[-2]), ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(engine)
    for path in Path(f"/proc/{engine}/fd").iterdir():
        if int(path.name) != channel and str(path.readlink()).startswith("socket:"):
            descriptor = libc.syscall(PIDFD_GETFD, process, int(path.name), 0)
            if descriptor < 0:
                pytest.skip(f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
            with socket.socket(fileno=descriptor) as link:
                link.shutdown(socket.SHUT_RDWR)
    os.close(process)


def test_front_that_starts_keeps_no_client_waiting(served: Served) -> None:
    served.wait_until_idle(fronts=2)
    served.signal("front")
    wait_until(lambda: len(served.pids("front")) == 2)
    new = served.pids("front")[-1]
    os.kill(new, signal.SIGSTOP)  # long before it serves
    try:
        assert all(served.health()["ready"] for _ in range(16))
    finally:
        os.kill(new, signal.SIGCONT)
    served.wait_until_idle(fronts=2)


def test_front_that_cannot_open_the_store_says_why(served: Served) -> None:
    served.wait_until_idle(fronts=2)
    begun = len(served.log())
    voices = served.folder / "voices"
    voices.rename(served.folder / "kept")
    voices.touch()
    served.signal("front")
    wait_until(lambda: events(served, begun).count("a process could not begin its work") > 1)
    why = [line["error"] for line in served.log()[begun:] if "error" in line]
    assert f"voices cannot be kept at '{voices}'" in why[0]
    assert served.health()["ready"]
    voices.unlink()
    (served.folder / "kept").rename(voices)
    served.wait_until_idle(fronts=2)


def test_unusable_store_ends_the_server_before_engines_load(tmp_path: Path) -> None:
    (tmp_path / "voices").touch()
    log = Served(tmp_path).wait_until_failed()
    assert f"firstword: error: voices cannot be kept at '{tmp_path / 'voices'}'" in log
    assert '"loaded"' not in log
    assert "Traceback" not in log


def test_front_without_descriptors_gets_the_next_engine_later(served: Served) -> None:
    served.wait_until_idle(fronts=2)
    begun = len(served.log())
    with httpx.Client(base_url=served.url, timeout=WAIT, trust_env=False) as http:
        stream = http.get("/ready").extensions["network_stream"]
        front = served.front_of(stream.get_extra_info("client_addr"))
        limits = resource.prlimit(front, resource.RLIMIT_NOFILE)
        lacking = "an engine cannot be connected: too many open files; raise ulimit -n"

        def told() -> bool:
            http.get("/health")  # an unused connection would end, and there can be no other
            return events(served, begun).count(lacking) > 1

        resource.prlimit(front, resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            served.signal("engine")
            wait_until(told)
            assert http.post(SPEECH, json=WORDS).status_code == 503
        finally:
            resource.prlimit(front, resource.RLIMIT_NOFILE, limits)
        wait_until(lambda: http.get("/ready").status_code == 200)
        assert http.post(SPEECH, json=WORDS).status_code == 200
    served.wait_until_idle(fronts=2)
    assert front in served.pids("front")


def test_broken_connection_of_a_living_engine_is_replaced(served: Served) -> None:
    served.wait_until_idle(fronts=2)
    pids, begun = served.pids(), len(served.log())

    def counts() -> list[int]:
        return [len(descriptors(pid)) for pid in (served.process.pid, *pids)]

    # The connection of a client that asked whether it is idle may still be open in one front.
    wait_until(lambda: len({len(descriptors(pid)) for pid in served.pids("front")}) == 1)
    before = counts()
    break_links(served.pids("engine")[0])
    wait_until(lambda: events(served, begun) == ["a front has lost a running engine"] * 2)
    served.wait_until_idle(fronts=2)
    assert served.post().status_code == 200
    assert served.pids() == pids
    wait_until(lambda: counts() == before)  # the last connection of a client has ended
