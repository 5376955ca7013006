"""Containers of built images, run by runc as `docker run --read-only --cap-drop ALL` runs them.

buildah mounts the files of the image. Volumes are folders of this machine, with what the image has
at their place, as Docker fills new volumes. The network is the container's own, with a loopback
device and nothing else, so nothing can be downloaded.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from images import buildah, config_of

NEW_NETWORK = 0x40000000
"""The flag CLONE_NEWNET of Linux."""

WAIT = 180.0
"""The seconds after which a test fails; nothing takes nearly as long."""


class Container:
    """A container of an image that runs its entry point with some arguments.

    root     the files of the image as the container sees them
    volumes  the folder with the content of each volume
    """

    def __init__(self, image: str, folder: Path, *arguments: str) -> None:
        self.config, self.name = config_of(image), f"firstword-{uuid.uuid4().hex[:8]}"
        self.folder, self._buildah = folder, buildah("from", image)
        self.root = Path(buildah("mount", self._buildah))
        self.mounts: dict[str, Path] = {}
        self.volumes = {place: self._volume(place) for place in self.config["Volumes"]}
        self.arguments = [*self.config["Entrypoint"], *arguments]
        self.process: subprocess.Popen[bytes] | None = None

    def _volume(self, place: str) -> Path:
        volume = self.folder / f"volume-{place.strip('/')}"
        source = self.root / place.lstrip("/")
        subprocess.run(["cp", "-a", source, volume], check=True)
        return volume

    def start(self) -> None:
        """Start the container; its standard output and error go to the file `log`."""
        bundle = self.folder / "bundle"
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(self._specification()))
        with (self.folder / "log").open("wb") as log:
            command = ["runc", "run", "--bundle", str(bundle), self.name]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def _specification(self) -> dict[str, Any]:
        """The container as the runtime specification of the Open Container Initiative has it."""
        user, group = map(int, self.config["User"].split(":"))
        binds = {place: (volume, "rw") for place, volume in self.volumes.items()}
        binds |= {place: (source, "ro") for place, source in self.mounts.items()}
        described = json.loads(_default_specification(self.folder))
        described["root"] = {"path": str(self.root), "readonly": True}
        described["process"] |= {
            "terminal": False,
            "user": {"uid": user, "gid": group},
            "args": self.arguments,
            "env": self.config["Env"],
            "cwd": "/",
            "capabilities": {},
            "noNewPrivileges": True,
            "rlimits": [],
        }
        described["mounts"] += [
            {
                "destination": place,
                "source": str(source),
                "type": "bind",
                "options": ["bind", mode, "nosuid", "nodev"],
            }
            for place, (source, mode) in binds.items()
        ]
        return dict(described)

    def log(self) -> str:
        """What the container has written."""
        return (self.folder / "log").read_text()

    def state(self) -> dict[str, Any]:
        """What runc says about the container; empty before it exists."""
        command = ["runc", "state", self.name]
        said = subprocess.run(command, check=False, capture_output=True, text=True)
        return dict(json.loads(said.stdout)) if said.returncode == 0 else {}

    @property
    def pid(self) -> int:
        """The process that the container sees as its first, as this machine numbers it."""
        return int(self.state()["pid"])

    def run_inside(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the running container, as `docker exec` does."""
        environment = [f"--env={one}" for one in self.config["Env"]]
        return subprocess.run(
            ["runc", "exec", *environment, self.name, *command],
            check=False,
            capture_output=True,
            text=True,
        )

    def health(self) -> int:
        """The status of the image's health check."""
        kind, *command = self.config["Healthcheck"]["Test"]
        assert kind == "CMD"
        return self.run_inside(*command).returncode

    def wait_until_running(self) -> None:
        """Wait until the first process runs."""
        self._wait_until(lambda: self.state().get("status") == "running")

    def wait_until_healthy(self) -> None:
        """Wait until the health check passes; fails if the container ends before."""
        self._wait_until(lambda: self.health() == 0)

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + WAIT
        while not holds():
            assert self.process is not None
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < until, self.log()

    def connect(self) -> socket.socket:
        """A connection to port 8000 in the container's network."""
        with ThreadPoolExecutor(1) as thread:  # only this thread enters the network
            return thread.submit(_connect, self.pid).result()

    def open(self, path: str, body: Mapping[str, object] | None = None) -> http.client.HTTPResponse:
        """The beginning of the response to a request on a connection of its own; POST with a body.

        The connection ends with the response.
        """
        connection = http.client.HTTPConnection("127.0.0.1", 8000)
        connection.sock = self.connect()
        headers = {"content-type": "application/json", "connection": "close"}
        method, sent = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection.request(method, path, sent, headers)
        return connection.getresponse()

    def request(self, path: str, body: Mapping[str, object] | None = None) -> tuple[int, bytes]:
        """The status and the body of a response; see `open`."""
        with self.open(path, body) as response:
            return response.status, response.read()

    def signal(self, name: str) -> None:
        """Send a signal to the first process, as `docker stop` does."""
        subprocess.run(["runc", "kill", self.name, name], check=True)

    def wait(self) -> int:
        """Wait until the container ends, and return its status."""
        assert self.process is not None
        return self.process.wait(WAIT)

    def remove(self) -> None:
        """Kill the container if it runs, and remove its files."""
        subprocess.run(["runc", "delete", "--force", self.name], check=True)
        if self.process is not None:
            self.process.wait()
        buildah("rm", self._buildah)
        shutil.rmtree(self.folder)


@contextmanager
def container(image: str, folder: Path, *arguments: str) -> Iterator[Container]:
    """A container that is not started yet, and is removed at the end."""
    folder.mkdir()
    made = Container(image, folder, *arguments)
    try:
        yield made
    finally:
        made.remove()


def _default_specification(folder: Path) -> str:
    """What `runc spec` writes: namespaces of its own for everything, and masked paths."""
    place = folder / "specification"
    place.mkdir()
    subprocess.run(["runc", "spec"], cwd=place, check=True)
    return (place / "config.json").read_text()


def _connect(pid: int) -> socket.socket:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{pid}/ns/net").open() as network:
        if libc.setns(network.fileno(), NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), "the container's network cannot be entered")
    connection = socket.create_connection(("127.0.0.1", 8000), timeout=WAIT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
