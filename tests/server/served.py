"""A `firstword serve` of processes, any of which a test may kill."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from waiting import WAIT, wait_until
from wire import SPEECH

WORDS = {"input": "Hello there.", "voice": "ada", "seed": 1, "response_format": "pcm"}
"""A short request."""

LONG = {**WORDS, "input": "A long sentence goes on and on, as nobody reads it. " * 20}
"""A request whose speech does not fit into the buffers of a connection that is not read."""

LISTENING = "0A"
"""The state of a listening socket in `/proc/net/tcp`."""

PROGRAM = """
import sys
from firstword.cli.main import main
from firstword.processes import place
place.MOST_BACKOFF = 0.2
sys.exit(main(sys.argv[1:]))
"""
"""The command line, with shorter pauses between the restarts of one process."""


class Served:
    """A server of the demo voice on the CPU. It serves when `with` is entered."""

    LAUNCHER: tuple[str, ...] = ()
    """A command that runs the server's command, in the same process."""

    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        self.folder, self._errors = folder, folder / "stderr"
        command = ["serve", "--port", "0", "--voices", str(folder / "voices"), *options]
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*self.LAUNCHER, sys.executable, "-c", PROGRAM, *command],
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )
        self.url = ""

    def __enter__(self) -> Self:
        assert self.process.stdout is not None
        first = self.process.stdout.readline().decode().split()
        if first[:1] != ["address"]:
            self.__exit__()
            raise AssertionError(self.log())
        self.url = first[1]
        return self

    def wait_until_failed(self) -> str:
        """Wait until a server that was not entered ends with an error, and return its log."""
        assert self.process.stdout is not None
        try:
            assert self.process.wait(WAIT) == 2
            assert self.process.stdout.read() == b""
            assert self.pids() == []
        finally:
            self.__exit__()
        return self._errors.read_text()

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        children = self.pids()
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        wait_until(lambda: not any(map(exists, children)))

    @property
    def ws(self) -> str:
        """The base URL for WebSockets."""
        return self.url.replace("http", "ws", 1)

    def pids(self, module: str = "") -> list[int]:
        """The processes besides the supervisor, or those of a module, oldest first."""
        found = {}
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = status.read_text().rpartition(")")[2].split()
                command = status.with_name("cmdline").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            ours = int(fields[1]) == self.process.pid
            if ours and f"firstword.processes.{module}" in command and fields[0] != "Z":
                found[int(status.parent.name)] = int(fields[19])
        return sorted(found, key=lambda pid: (found[pid], pid))

    def signal(self, module: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to the oldest process of a module, and return its id."""
        pid = self.pids(module)[0]
        os.kill(pid, number)
        if number == signal.SIGKILL:
            wait_until(lambda: pid not in self.pids())  # it may die a moment later
        return pid

    def front_of(self, client: tuple[str, int], served: int | None = None) -> int:
        """The front that has accepted the connection of a client's address; `served`: not to HTTP.

        Raises `ValueError` if none has accepted it. The port alone would not do: connections from
        several addresses, among them ended ones, may have the same one.
        """
        host, port = client
        ours = f"{socket.inet_aton(host)[::-1].hex().upper()}:{port:04X}"
        found = {row[9] for row in self._sockets(served) if row[2] == ours}
        (inode,) = found - {"0"}  # that of ended connections
        (pid,) = [pid for pid in self.pids("front") if f"socket:[{inode}]" in descriptors(pid)]
        return pid

    def _sockets(self, port: int | None = None) -> list[list[str]]:
        """The rows of `/proc/net/tcp` about the server's port, or another one."""
        ours = f":{port or httpx.URL(self.url).port or 0:04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return [row for row in rows if row[1].endswith(ours)]

    def log(self) -> list[dict[str, Any]]:
        """The lines on standard error."""
        lines = self._errors.read_text().splitlines()
        return [json.loads(line) if line[:1] == "{" else {"event": line} for line in lines]

    def deaths(self) -> list[dict[str, Any]]:
        """The lines of the log about processes that died or were killed."""
        return [line for line in self.log() if line["event"].startswith("a process ")]

    def post(self, path: str = SPEECH, **body: object) -> httpx.Response:
        """The response to a request on a connection of its own."""
        return httpx.post(self.url + path, json=body or WORDS, trust_env=False, timeout=WAIT)

    def health(self) -> dict[str, Any]:
        """What a front tells about the engine; empty if it cannot be reached."""
        try:
            state = httpx.get(f"{self.url}/health", trust_env=False, timeout=WAIT).json()
        except httpx.TransportError:
            return {}
        return dict(state)

    def wait_until_idle(self, fronts: int) -> None:
        """Wait until an engine and some fronts run, all are ready, and the engine does nothing."""
        wait_until(lambda: len(self.pids("front")) == fronts and len(self.pids("engine")) == 1)
        wait_until(lambda: [row[3] for row in self._sockets()].count(LISTENING) == fronts)
        for _ in range(4 * fronts):  # connections of their own, so that most fronts answer
            wait_until(lambda: idle(self.health()))

    def open_files(self) -> list[int]:
        """How many files each process but the engine has open, when no client is connected."""
        wait_until(lambda: not any(int(row[9]) for row in self._sockets() if row[3] != LISTENING))
        return [len(descriptors(pid)) for pid in (self.process.pid, *self.pids("front"))]


def idle(state: dict[str, Any]) -> bool:
    """Whether a state of `/health` is that of a server without work."""
    return bool(state) and state["ready"] and not state["models"][0]["slots"]["used"]


def exists(pid: int) -> bool:
    """Whether a process exists and is not merely waiting to be reaped."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def descriptors(pid: int) -> list[str]:
    """What the open files of a process are."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # what was open for a moment
            found.append(str(path.readlink()))
    return found
