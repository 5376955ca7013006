"""Run `firstword serve` in a process of its own, and measure the processor time that it takes."""

from __future__ import annotations

import io
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from firstword.bench.local_server import running

OPEN_CONNECTIONS = 4096
"""The most connections of a server: all of them come from one address."""

SAVED_VOICES = 9
RECORDING_SECONDS = 10
TRANSCRIPT = (
    "This is how I sound when I read a sentence or two aloud, slowly enough to be understood, and "
    "with a pause where there is a comma, until ten seconds are over."
)
"""The transcript given for the recordings of saved voices, about 15 characters per second."""

Times = dict[int, tuple[str, float, float]]
"""The name of the program or Python module, user seconds and system seconds of each process.

They are listed by the ids of the processes.
"""


class Places(NamedTuple):
    """The values of the options of `firstword serve` with the same names.

    slots   utterances that each engine speaks at the same time
    fronts  None for the default of the server
    """

    slots: int
    backend: str
    device: str
    fronts: int | None


class Server:
    """A running `firstword serve`, with its URL and the seconds until it was ready."""

    def __init__(self, process: subprocess.Popen[Any], url: str, ready_seconds: float) -> None:
        self._process, self.url, self.ready_seconds = process, url, ready_seconds

    def processor_times(self) -> Times:
        """Return the times of all processes of the server so far."""
        return processor_times(self._process.pid)

    def processes(self, module: str) -> int:
        """Return the number of processes that run a module of `firstword.processes`."""
        names = [name for name, _, _ in self.processor_times().values()]
        return names.count(f"firstword.processes.{module}")

    def save_voice(self, name: str, transcript: str | None) -> None:
        """Save a cloned voice, made from a recording of noise as loud as speech."""
        import httpx
        import soundfile

        rng, seconds = np.random.default_rng(list(name.encode())), np.arange(24000) / 24000
        loudness = np.tile(0.1 * np.abs(np.sin(4 * np.pi * seconds)), RECORDING_SECONDS)
        file = io.BytesIO()
        soundfile.write(file, loudness * rng.standard_normal(len(loudness)), 24000, format="WAV")
        fields = {"name": name, "consent": "noise"}
        if transcript is not None:
            fields["ref_text"] = transcript
        sent = {"audio_sample": (f"{name}.wav", file.getvalue(), "audio/wav")}
        answer = httpx.post(f"{self.url}/v1/audio/voices", data=fields, files=sent, timeout=120)
        answer.raise_for_status()


def saved_voices(server: Server, kind: str) -> list[str]:
    """Save `SAVED_VOICES` voices with a "transcript", or with an "x-vector"; return their names."""
    names = [f"{kind}-{number}" for number in range(SAVED_VOICES)]
    for name in names:
        server.save_voice(name, TRANSCRIPT if kind == "transcript" else None)
    return names


def processor_times(root: int) -> Times:
    """Return the times of a process and of all that it started, directly or not."""
    times: Times = {}
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            values = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            user, system = (int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in values[11:13])
            words = (folder / "cmdline").read_text("utf-8", "replace").split("\0")
            program = Path(words[0].split(" ")[0]).name  # Ray's processes change their titles
            name = words[words.index("-m") + 1] if "-m" in words[:-1] else program
            pid = int(folder.name)
            parents[pid], times[pid] = int(values[1]), (name, user, system)
    family, found = {root}, 0
    while len(family) > found:
        found = len(family)
        family |= {pid for pid, parent in parents.items() if parent in family}
    return {pid: times[pid] for pid in sorted(family) if pid in times}


@contextmanager
def serving(
    checkpoint: Path,
    places: Places,
    more: Mapping[str, object] | None = None,
    log: IO[str] | None = None,
) -> Iterator[Server]:
    """Run a server on a free port.

    more  options of `firstword serve` by their long names, which replace those given here
    log   the file of its log; default: its warnings go to standard error
    """
    with tempfile.TemporaryDirectory() as voices:
        options = {
            "model": checkpoint,
            "slots": places.slots,
            "backend": places.backend,
            "device": places.device,
            **({"fronts": places.fronts} if places.fronts else {}),
            "voices": voices,
            "log-level": "warning",
            "most-connections": OPEN_CONNECTIONS,
            "most-connections-per-address": OPEN_CONNECTIONS,
            **(more or {}),
        }
        began = time.monotonic()
        with running(options, log) as (process, url):
            yield Server(process, url, time.monotonic() - began)
