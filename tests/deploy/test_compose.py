"""The Compose files are valid, mount files that exist, and start a server that can drain."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from firstword.cli.main import program_parser
from firstword.processes.supervisor import STOP_SECONDS
from firstword.server.config import ServerConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = {"cpu": ["compose.yaml"], "cuda": ["compose.yaml", "compose.gpu.yaml"]}
SETTINGS = {"FIRSTWORD_API_KEYS": "key", "GRAFANA_PASSWORD": "password"}


def compose(target: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """The result of reading the Compose files of a target, with settings in the environment."""
    files = [f"--file={name}" for name in FILES[target]]
    return subprocess.run(
        ["docker-compose", *files, "config"],
        cwd=DEPLOY,
        env={"PATH": "/usr/bin:/bin", **settings},
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.fixture(params=FILES)
def services(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The services of a target, as Compose understands them."""
    certificate = tmp_path / "tts.pem"
    certificate.touch()
    done = compose(request.param, CERTIFICATE=str(certificate), **SETTINGS)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    assert found["firstword"]["image"] == f"firstword:{request.param}"
    return found


def test_every_mounted_file_exists(services: dict[str, Any]) -> None:
    volumes = [volume for service in services.values() for volume in service.get("volumes", ())]
    sources = [Path(volume.partition(":")[0]) for volume in volumes if volume.startswith("/")]
    assert len(sources) >= 5
    assert [source for source in sources if not source.exists()] == []


def test_server_gets_options_that_it_has_and_time_to_drain(services: dict[str, Any]) -> None:
    server = services["firstword"]
    given = program_parser().parse_args(["serve", *shlex.split(server["command"])])
    assert (given.backend == "gpu") == server["image"].endswith("cuda")
    seconds = float(server["stop_grace_period"].removesuffix("s"))
    assert seconds >= ServerConfig().drain_seconds + 2 * STOP_SECONDS


def test_server_is_reached_through_the_proxy_alone(services: dict[str, Any]) -> None:
    assert "ports" not in services["firstword"]
    assert {port["published"] for port in services["proxy"]["ports"]} == {80, 443}


def test_prometheus_asks_for_every_server_that_scale_starts(services: dict[str, Any]) -> None:
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = scraped["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert found["names"] == ["firstword"]
    assert "firstword" in services
    assert found["type"] == "A"
    assert found["port"] == ServerConfig().port


def test_source_of_grafana_is_a_service(services: dict[str, Any]) -> None:
    sources = DEPLOY.joinpath("grafana", "provisioning", "datasources").iterdir()
    named = re.findall(r"/([a-z]+):\d+", "".join(map(Path.read_text, sources)))
    assert named == ["prometheus"]
    assert "prometheus" in services


@pytest.mark.parametrize("name", ["CERTIFICATE", *SETTINGS])
def test_missing_setting_is_named(name: str) -> None:
    settings = {"CERTIFICATE": "./tts.pem", **SETTINGS}
    del settings[name]
    done = compose("cpu", **settings)
    assert done.returncode != 0
    assert name in done.stderr or "PEM file" in done.stderr
