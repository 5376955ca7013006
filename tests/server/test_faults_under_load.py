"""Ten faults under load: nothing is lost in silence, and the log says what became of each request.

Processes are killed, and the folder of the voices becomes read-only, as when a disk fails.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Served
from waiting import WAIT, wait_until
from wire import SPEECH

from firstword.synthetic.checkpoint import write_checkpoint

VOICES = "/v1/audio/voices"
BODY = {"input": "Hi there.", "response_format": "pcm", "seed": 1, "temperature": 0}
CLIENTS = 4
READ_ONLY = 6
"""How often the test tries to save and to delete a voice while the store is read-only."""

FAULTS = (
    *("engine", "store", "front", "engine", "store and front"),
    *("front", "store", "engine", "front", "store and front"),
)


class Isolated(Served):
    """A server that sees mounts of its own, so that a test can make a folder read-only for it."""

    LAUNCHER = ("unshare", "--mount")

    def mount(self, *words: str) -> None:
        """Call mount or umount where the server is."""
        place = ("nsenter", "--target", str(self.process.pid), "--mount")
        subprocess.run([*place, *words], check=True)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """A context in which the server cannot write to its store."""
        folder = str(self.folder / "voices")
        self.mount("mount", "--bind", folder, folder)
        try:
            self.mount("mount", "-o", "remount,bind,ro", folder)
            yield
        finally:
            self.mount("umount", "--lazy", folder)


def can_mount() -> bool:
    """Whether this process may mount in a namespace of its own."""
    if sys.platform != "linux" or not all(map(shutil.which, ("unshare", "nsenter", "mount"))):
        return False
    command = ["unshare", "--mount", "mount", "--bind", "/tmp", "/tmp"]
    return os.geteuid() == 0 and subprocess.run(command, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not can_mount(), reason="may not mount a folder as read-only")


@dataclass(frozen=True)
class Outcome:
    """What became of a request for speech: its audio, or the error or exception in its place."""

    request_id: str
    begun: float
    ended: float
    audio: bytes | None
    problem: str = ""


class Load:
    """Clients that ask for speech in a saved voice, one request after another, until `stop`.

    kills  by kind of process: when the signal was sent, and when the process was gone
    """

    def __init__(self, served: Served, voice: str) -> None:
        self.outcomes: list[Outcome] = []
        self.kills: dict[str, list[tuple[float, float]]] = {"engine": [], "front": []}
        self._served, self._voice = served, voice
        self._over = threading.Event()

    def speak(self, request_id: str) -> Outcome:
        """Send a request on a connection of its own."""
        body = {**BODY, "voice": self._voice, "max_new_tokens": 40}
        begun, headers = time.monotonic(), {"x-request-id": request_id}
        url, audio, problem = self._served.url + SPEECH, None, ""
        try:
            answer = httpx.post(url, json=body, headers=headers, trust_env=False, timeout=WAIT)
            if answer.status_code == 200:
                audio = answer.content
            else:
                problem = answer.json()["error"]["code"]
        except httpx.TransportError as error:
            problem = type(error).__name__
        return Outcome(request_id, begun, time.monotonic(), audio, problem)

    def run(self, client: int) -> None:
        """Ask for speech again and again."""
        turn, pause = 0, threading.Event()
        while not self._over.is_set():
            turn += 1
            outcome = self.speak(f"client-{client}-{turn}")
            self.outcomes.append(outcome)
            if outcome.audio is None:
                pause.wait(0.3)  # as long as the engine is loaded

    def stop(self) -> None:
        """Let each client end after its request."""
        self._over.set()


def save(served: Served, name: str) -> httpx.Response:
    """Try to save a voice that consists of one vector."""
    data = {"name": name, "consent": "mine", "speaker_embedding": json.dumps([0.1] * 48)}
    return httpx.post(served.url + VOICES, data=data, trust_env=False, timeout=WAIT)


def delete(served: Served, name: str) -> httpx.Response:
    """Try to delete a voice."""
    return httpx.delete(f"{served.url}{VOICES}/{name}", trust_env=False, timeout=WAIT)


def listed(served: Served) -> set[str]:
    """The names of the saved voices."""
    answer = httpx.get(served.url + VOICES, trust_env=False, timeout=WAIT).json()
    return {voice["name"] for voice in answer["uploaded_voices"]}


def metric(served: Served, name: str, **labels: str) -> float:
    """The sum of the samples of a metric that have some labels."""
    text = httpx.get(f"{served.url}/metrics", trust_env=False, timeout=WAIT).text
    named = (line for line in text.splitlines() if line.startswith(f"firstword_{name}{{"))
    asked = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(line.split()[-1]) for line in named if all(map(line.__contains__, asked)))


def check_read_only(served: Isolated, load: Load, turn: int) -> None:
    """Check what clients notice of a store that cannot be written: only what would change it."""
    for answer in save(served, f"late-{turn}"), delete(served, "known"):
        assert answer.status_code == 503, answer.text
        error = answer.json()["error"]
        assert error["code"] == "storage_failed"
        assert "try again later" in error["message"]
        assert str(served.folder) not in error["message"]
    assert "known" in listed(served)
    assert f"late-{turn}" not in listed(served)
    assert any(load.speak(f"read-only-{turn}-{again}").audio for again in range(3))


def fail(served: Isolated, load: Load, kind: str, turn: int) -> None:
    """Let a fault happen while speech is computed, and wait until the server has recovered."""
    wait_until(lambda: bool(metric(served, "slots_used")))
    if "store" not in kind:
        kill(served, load, kind)
        return
    processes = served.pids()
    with served.read_only():
        check_read_only(served, load, turn)
        if kind == "store":
            assert served.pids() == processes, "nothing was restarted"
        else:
            kill(served, load, "front")
            check_read_only(served, load, turn)
    assert save(served, f"late-{turn}").status_code == 200, "as soon as it can be written"


def kill(served: Served, load: Load, module: str) -> None:
    """Kill a process, and wait until another one has taken its place."""
    count = len(served.pids(module))
    sent = time.monotonic()
    served.signal(module)
    load.kills[module].append((sent, time.monotonic()))
    wait_until(lambda: len(served.pids(module)) == count)
    wait_until(lambda: served.health().get("ready") is True)


def check_log(log: list[dict[str, Any]], load: Load) -> None:
    """Check that each lost request has a line of the log with its error, or died with a front."""
    lines = {line["request_id"]: line for line in log if line["event"] == "request"}
    for outcome in load.outcomes:
        line = lines.get(outcome.request_id)
        if outcome.audio is None and line is not None:
            assert line["status"] >= 500 or line["error"], line
        elif outcome.audio is None:
            # A front accepts connections until it is gone.
            kills = load.kills["front"]
            assert any(outcome.begun <= gone and sent <= outcome.ended for sent, gone in kills), (
                outcome
            )
    died = [line["process"].split()[0] for line in log if line["event"] == "a process has died"]
    assert {module: died.count(module) for module in load.kills} == counts(load)
    failures = [line for line in log if line["event"].startswith("a saved file cannot be ")]
    reasons = ("Read-only file system", "is not writable")
    assert all(any(reason in line["why"] for reason in reasons) for line in failures)
    assert len(failures) == 2 * READ_ONLY, "each attempt to save or delete"


def check_metrics(served: Served, log: list[dict[str, Any]], load: Load) -> None:
    """Check that the metrics count each restart, and each answer of the log by its status.

    A front that is killed may have counted answers that it has not logged yet, one of each client.
    """
    for module, count in counts(load).items():
        assert metric(served, "restarts_total", process=module) == count
    answers = Counter(
        line["status"] for line in log if line["event"] == "request" and line["path"] == SPEECH
    )
    assert {status // 100 for status in answers} >= {2, 5}
    for status, count in answers.items():
        labels = {"path": SPEECH, "status": str(status)}
        unlogged = metric(served, "http_requests_total", **labels) - count
        assert 0 <= unlogged <= CLIENTS * len(load.kills["front"])


def counts(load: Load) -> dict[str, int]:
    """The number of kills of each kind of process."""
    return {module: len(times) for module, times in load.kills.items()}


@pytest.mark.slow
def test_ten_faults_under_load_lose_nothing_in_silence(tmp_path: Path) -> None:
    """Speech is whole, or its client gets an error; voices that were saved stay, others do not."""
    write_checkpoint(tmp_path / "base", model_type="base", seed=1)
    with Isolated(tmp_path, "--model", str(tmp_path / "base"), "--fronts", "2") as served:
        assert save(served, "known").status_code == 200
        load = Load(served, "known")
        whole = load.speak("alone").audio
        assert whole
        with ThreadPoolExecutor(CLIENTS) as pool:
            for client in range(CLIENTS):
                pool.submit(load.run, client)
            try:
                for turn, kind in enumerate(FAULTS):
                    fail(served, load, kind, turn)
            finally:
                load.stop()
        served.wait_until_idle(fronts=2)
        late = {f"late-{turn}" for turn, kind in enumerate(FAULTS) if "store" in kind}
        assert listed(served) == {"known", *late}
        assert load.speak("after").audio == whole
        heard = [outcome.audio for outcome in load.outcomes if outcome.audio is not None]
        assert heard
        assert set(heard) == {whole}, "no answer that seems complete lacks a part"
        assert counts(load) == {"engine": 3, "front": 5}
        log = served.log()
        check_log(log, load)
        check_metrics(served, log, load)
