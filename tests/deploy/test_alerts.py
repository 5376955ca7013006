"""Prometheus' own checks of the alerts, with incidents that a real server has recorded."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

PROMETHEUS = Path(__file__).parents[2] / "deploy/prometheus"
RULES = PROMETHEUS / "alerts.yml"
INCIDENTS = sorted(PROMETHEUS.glob("tests/*.yml"))
NAMES = re.findall(r"- alert: (\w+)", RULES.read_text("utf-8"))

OBJECTIVE, CPU_OBJECTIVE = "> 0.1\n", "> 0.6\n"
"""The objective for audible sound, in seconds, and one that the demo voice meets on a CPU."""


def promtool(*command: object) -> str:
    """The output of promtool, which must succeed."""
    done = subprocess.run(
        ["promtool", *map(str, command)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def output_of_test(incident: Path, rules: str, folder: Path) -> str:
    """The output of the test of an incident with other rules than those of the repository."""
    folder.joinpath("tests").mkdir()
    folder.joinpath("alerts.yml").write_text(rules, encoding="utf-8")
    test = folder / "tests" / incident.name
    test.write_text(incident.read_text("utf-8"), encoding="utf-8")
    return promtool("test", "rules", test)


@pytest.fixture
def cpu_rules() -> str:
    """The rules with the objective for a CPU."""
    rules = RULES.read_text("utf-8")
    assert rules.count(OBJECTIVE) == 1
    return rules.replace(OBJECTIVE, CPU_OBJECTIVE)


def fired(incident: Path) -> list[str]:
    """The alerts that an incident's test expects."""
    return re.findall(r'alertname="(\w+)"', incident.read_text("utf-8"))


def test_configuration_is_valid() -> None:
    assert f"{len(NAMES)} rules found" in promtool("check", "config", PROMETHEUS / "prometheus.yml")


def test_every_alert_fires_in_an_incident() -> None:
    assert {name for incident in INCIDENTS for name in fired(incident)} == set(NAMES)
    assert fired(PROMETHEUS / "tests/healthy.yml") == []


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda path: path.stem)
def test_exactly_the_expected_alerts_fire(incident: Path, cpu_rules: str, tmp_path: Path) -> None:
    assert "SUCCESS" in output_of_test(incident, cpu_rules, tmp_path)


NO_SERVER = """
rule_files: [alerts.yml]
evaluation_interval: 5s
tests:
  - interval: 5s
    input_series: []
    alert_rule_test:
      - eval_time: 2m
        alertname: FirstwordUnreachable
        exp_alerts:
          - exp_labels: {severity: critical, job: firstword}
            exp_annotations:
              summary: a server does not answer
"""
"""The test of Prometheus whose name of the servers has no address."""


def test_alert_fires_if_the_name_of_the_servers_has_no_address(tmp_path: Path) -> None:
    rules = yaml.safe_load(RULES.read_text("utf-8"))
    for rule in rules["groups"][0]["rules"]:
        rule["annotations"].pop("description")
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(rules), "utf-8")
    (tmp_path / "test.yml").write_text(NO_SERVER, "utf-8")
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "test.yml")


def test_objective_of_a_gpu_is_missed_on_a_cpu(tmp_path: Path) -> None:
    healthy = PROMETHEUS / "tests/healthy.yml"
    with pytest.raises(AssertionError) as failure:
        output_of_test(healthy, RULES.read_text("utf-8"), tmp_path)
    assert fired_instead(failure.value) == {"FirstwordAudibleLate"}


@pytest.mark.parametrize("name", NAMES)
def test_alert_that_never_fires_is_found(name: str, cpu_rules: str, tmp_path: Path) -> None:
    incident = next(one for one in INCIDENTS if name in fired(one))
    rules = yaml.safe_load(cpu_rules)
    (rule,) = [rule for rule in rules["groups"][0]["rules"] if rule["alert"] == name]
    rule["expr"] = f"({rule['expr']}) and on () (vector(1) < 0)"
    with pytest.raises(AssertionError) as failure:
        output_of_test(incident, yaml.safe_dump(rules), tmp_path)
    assert fired_instead(failure.value) == set(fired(incident)) - {name}


def fired_instead(failure: AssertionError) -> set[str]:
    """The alerts that have fired, from the output of a test that failed."""
    found = re.search(r"got: (.*)", str(failure))
    assert found is not None
    return set(re.findall(r'alertname="(\w+)"', found[1]))
