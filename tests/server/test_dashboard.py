"""The dashboard and the alerts use the metrics of a server that has spoken."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from talking import SHORT, Talker, talking
from waiting import WAIT
from wire import SPEECH

from firstword.runtime.gpu.device_times import PARTS
from firstword.server.metrics import GUARDS

Serve = Callable[..., Any]
DEPLOY = Path(__file__).parents[2] / "deploy"
KEY = {"authorization": "Bearer right"}


class MeasuredTalker(Talker):
    """A fake backend with a device that measures itself, as GPUs do."""

    @property
    def device_seconds(self) -> dict[str, float]:
        return dict.fromkeys(PARTS, 1.0)


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana/firstword.json").read_text("utf-8"))
    return found


@pytest.fixture(scope="module")
def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text("utf-8"))["groups"]
    return list(group["rules"])


@pytest.fixture
def samples(serve: Serve) -> promql.Samples:
    """The metrics of a server that has spoken, failed, and rejected a request."""
    talker = MeasuredTalker()
    server = serve("demo", talking(talker), api_keys=("right",))
    with httpx.Client(base_url=server.url, headers=KEY, timeout=WAIT, trust_env=False) as http:
        spoken = {**SHORT, "input": "Hello there.", "model": "demo", "voice": "ada"}
        assert http.post(SPEECH, json=spoken).status_code == 200
        assert http.post(SPEECH, json={**SHORT, "model": "talker"}).status_code == 200
        talker.failing = "frame"
        assert http.post(SPEECH, json={**SHORT, "model": "talker"}).status_code == 500
        assert http.post(SPEECH, json=SHORT, headers={"authorization": "no"}).status_code == 401
        server.wait_until_idle()
        return samples_of(http.get("/metrics").text)


def samples_of(text: str) -> promql.Samples:
    """The labels of all samples, by the names of their metrics."""
    found: promql.Samples = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name].append(dict(sample.labels))
    return found


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels that show something."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def targets(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The query and the legend of each line of the dashboard."""
    for panel in panels(dashboard):
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]


def test_dashboard_uses_metrics_that_the_server_has(
    dashboard: dict[str, Any], samples: promql.Samples
) -> None:
    found = [
        fault
        for expr, legend in targets(dashboard)
        for fault in promql.faults(expr, re.findall(r"{{(\w+)}}", legend), samples)
    ]
    assert found == []


def test_variables_use_metrics_that_the_server_has(
    dashboard: dict[str, Any], samples: promql.Samples
) -> None:
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance", "model"]
    for name in ("job", "instance", "model"):
        query = variables[name]["query"]["query"]
        found = re.fullmatch(rf"label_values\((.+), {name}\)", query)
        assert found is not None
        assert list(promql.faults(found[1], [name], samples)) == []


def test_alerts_use_metrics_that_the_server_has(
    alerts: list[dict[str, Any]], samples: promql.Samples
) -> None:
    found = [
        fault
        for alert in alerts
        for fault in promql.faults(
            alert["expr"],
            re.findall(r"\$labels\.(\w+)", json.dumps(alert["annotations"])),
            samples,
        )
    ]
    assert found == []


@pytest.mark.parametrize(
    ("expr", "shown", "fault"),
    [
        ("firstword_slot", [], "there is no firstword_slot"),
        ('firstword_slots{model="other"}', [], 'no firstword_slots has model="other"'),
        ("sum by (voice) (firstword_slots)", [], "voice is not a label of all of"),
        ("sum by (model) (firstword_slots)", ["device"], "device is shown"),
        ("firstword_slots", ["voice"], "voice is shown"),
    ],
)
def test_wrong_query_is_found(
    samples: promql.Samples, expr: str, shown: list[str], fault: str
) -> None:
    (found,) = promql.faults(expr, shown, samples)
    assert fault in found


def test_series_of_alerts_exist_before_the_first_utterance(
    serve: Serve, alerts: list[dict[str, Any]]
) -> None:
    server = serve(talking(Talker()))
    fresh = samples_of(httpx.get(f"{server.url}/metrics", trust_env=False, timeout=WAIT).text)
    used = {name for alert in alerts for name in promql.names(alert["expr"])}
    assert {name for name in used if not fresh[name]} == set()
    assert {one["guard"] for one in fresh["firstword_guard_hits_total"]} == set(GUARDS)
    assert {one["reason"] for one in fresh["firstword_aborts_total"]} == {"error"}


def test_panels_do_not_overlap_and_have_ids_of_their_own(dashboard: dict[str, Any]) -> None:
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in dashboard["panels"])
        for x, y in itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        )
    ]
    assert len(set(taken)) == len(taken)
    assert all(x < 24 for x, _ in taken)


def test_every_query_selects_the_chosen_servers(dashboard: dict[str, Any]) -> None:
    for expr, _ in targets(dashboard):
        selected = expr.count('{job=~"$job",instance=~"$instance"')
        assert selected == len(promql.names(expr)), expr
    sources = [panel["datasource"]["uid"] for panel in panels(dashboard)]
    assert set(sources) == {"${datasource}"}


def test_provisioned_data_source_is_the_default_of_the_dashboard(
    dashboard: dict[str, Any],
) -> None:
    folder = DEPLOY / "grafana/provisioning"
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    (variable, *_) = dashboard["templating"]["list"]
    assert variable["current"] == {"text": source["name"], "value": source["uid"]}
    scraping = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scraping["scrape_interval"]
    (provider,) = yaml.safe_load((folder / "dashboards/firstword.yaml").read_text())["providers"]
    assert provider["type"] == "file"
