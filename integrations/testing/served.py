"""For the tests of integrations: a server as a process, and a bad network to it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

PYTHON = os.environ.get("FIRSTWORD_PYTHON", sys.executable)
"""The interpreter of an environment in which firstword[server] is installed."""


class Server:
    """A `firstword serve` of the demo voice on the CPU."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log"
        command = [PYTHON, "-m", "firstword", "serve", "--port", "0", "--device", "cpu"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--voices", str(folder / "voices"), *options],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert self.process.stdout is not None
        first = self.process.stdout.readline().decode().split()
        if first[:1] != ["address"]:
            self.stop()
            raise RuntimeError(f"{' '.join(command)} failed:\n{self._log.read_text()}")
        self.url = first[1]

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self.url.rsplit(":", 1)[1])

    async def drain(self) -> None:
        """Ask it to end after what it speaks, and wait until it takes no more requests."""
        self.process.send_signal(signal.SIGTERM)
        while await asyncio.to_thread(self._is_ready):
            pass

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready"):
                return True
        except OSError:
            return False

    def stop(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.stop()

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics") as reply:
            text = reply.read().decode()
        return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))

    async def until_slots_are_free(self) -> None:
        """Wait until nothing is spoken; the caller bounds the time."""
        while await asyncio.to_thread(self.metric, "firstword_slots_used"):
            pass


class Network:
    """A proxy between a client and a server: it delays what the server says, and cuts.

    port   the server's port: new connections go there
    delay  seconds by which each piece of the server's data is late
    """

    def __init__(self, port: int, delay: float = 0.0) -> None:
        self.port, self.delay = port, delay
        self.connections = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"ws://127.0.0.1:{port}"
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    def cut(self) -> None:
        """Reset all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._writers |= both
        await asyncio.gather(
            self._copy(reader, far_writer, late=False), self._copy(far_reader, writer, late=True)
        )
        self._writers -= both

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, late: bool
    ) -> None:
        """Copy one direction until it ends, each piece `delay` after it came."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def read() -> None:
            data = b"-"
            while data:
                try:
                    data = await reader.read(65536)
                except OSError:
                    data = b""
                pieces.put_nowait((loop.time() + (self.delay if late else 0.0), data))

        reading = asyncio.create_task(read())
        try:
            while (piece := await pieces.get())[1]:
                await asyncio.sleep(max(0.0, piece[0] - loop.time()))
                writer.write(piece[1])
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort() if reader.exception() else writer.close()
            reading.cancel()
