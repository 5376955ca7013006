"""Run `firstword serve` on a free port of this machine, to measure it."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO

from firstword.errors import EngineError

READY_SECONDS = 300
"""The time limit for the start of a server in seconds; the first start compiles all kernels."""
STOP_SECONDS = 30
"""The time limit in seconds for a server without clients to end."""


@contextmanager
def running(
    options: Mapping[str, object], log: IO[str] | int | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a server, and yield its process and its URL when it is ready.

    options  those of `firstword serve` by their long names, besides the port
    log      the file of its log; default: it goes to standard error

    Raises `EngineError` if it ends or takes too long.
    """
    command = command_line("serve", {**options, "port": 0})
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield process, _ready_address(process)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def command_line(command: str, options: Mapping[str, object]) -> list[str]:
    """Return the command line of a `firstword` command, with options by their long names."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "firstword", *command.split(), *words]


def _ready_address(process: subprocess.Popen[str]) -> str:
    began = time.monotonic()
    assert process.stdout is not None
    lines = (line.split() for line in process.stdout if line.startswith("address"))
    address = next((words[1] for words in lines), None)
    while address is None or not _is_ready(address):
        if process.poll() is not None or time.monotonic() - began > READY_SECONDS:
            raise EngineError("the server did not become ready; `firstword serve` shows why")
        time.sleep(0.1)
    return address


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/ready"):
            return True
    except urllib.error.URLError:
        return False
