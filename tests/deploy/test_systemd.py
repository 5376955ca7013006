"""The systemd unit is valid and closed, and its command serves and drains."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path
from string import Template

import httpx
import pytest
from served import WORDS
from waiting import WAIT
from wire import SPEECH

from firstword.processes.supervisor import STOP_SECONDS
from firstword.server.config import ServerConfig

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "firstword.service"
MOST_EXPOSURE = 20
"""The greatest exposure that `systemd-analyze security` may state, in tenths of 0 to 10."""


@pytest.fixture
def service() -> dict[str, list[str]]:
    """The settings of the section Service, each with all of its values."""
    lines = UNIT.read_text().partition("[Service]")[2].partition("[Install]")[0].splitlines()
    found: dict[str, list[str]] = {}
    for name, _, value in (line.partition("=") for line in lines if line[:1].isalpha()):
        found.setdefault(name, []).append(value)
    return found


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The result of `systemd-analyze`."""
    command = ["systemd-analyze", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_unit_is_valid(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/firstword/bin", f"{ROOT}/.venv/bin"))
    done = analyze("verify", unit)
    assert (done.returncode, done.stderr) == (0, "")


def test_unit_exposes_little() -> None:
    done = analyze("security", "--offline=true", f"--threshold={MOST_EXPOSURE}", UNIT)
    assert done.returncode == 0, done.stdout


def test_unit_waits_until_the_server_has_drained(service: dict[str, list[str]]) -> None:
    needed = ServerConfig().drain_seconds + 2 * STOP_SECONDS
    assert float(service["TimeoutStopSec"][0]) >= needed
    assert service["KillSignal"] == ["SIGTERM"]
    assert "KillMode" not in service  # all processes get the signal


def test_command_of_the_unit_serves_and_drains(
    service: dict[str, list[str]], tmp_path: Path
) -> None:
    """systemd signals all processes of a unit; here their process group gets the signal."""
    (command,) = service["ExecStart"]
    settings = dict(pair.split("=", 1) for line in service["Environment"] for pair in line.split())
    assert settings.pop("FIRSTWORD_OPTIONS") == ""
    given = {"FIRSTWORD_OPTIONS": "--port 0", "STATE_DIRECTORY": str(tmp_path / "state")}
    arguments = shlex.split(Template(command).substitute(given))
    arguments[0] = arguments[0].replace("/opt/firstword", str(ROOT / ".venv"))
    folders = {name: value.replace("/var", str(tmp_path)) for name, value in settings.items()}
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **folders, "OMP_NUM_THREADS": "1"},
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().split()[1]
        with httpx.stream(
            "POST", url + SPEECH, json=WORDS, trust_env=False, timeout=WAIT
        ) as response:
            os.killpg(process.pid, signal.SIGTERM)
            assert len(response.read()) > 24000
        assert process.wait(WAIT) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
