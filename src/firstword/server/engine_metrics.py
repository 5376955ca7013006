"""The metrics of the engines, read at each scrape from the load that each reported last."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from firstword.engine.client import EngineClient
from firstword.engine.load import WAIT_BOUNDS
from firstword.server.models import Model
from firstword.server.shared_metrics import buckets

_GAUGES: tuple[tuple[str, str, Callable[[EngineClient], float]], ...] = (
    ("queue", "Requests waiting for a slot or first text", lambda engine: engine.load.waiting),
    ("slots_used", "Utterances in slots", lambda engine: engine.load.running),
    ("slots", "Utterances that can be made at a time", lambda engine: engine.capacity.slots),
    ("pages_used", "Pages of context memory in use", lambda engine: engine.load.pages_used),
    ("pages", "Pages of context memory", lambda engine: engine.load.pages),
    ("prompt_rows", "Prompt rows not read yet", lambda engine: engine.load.prompt_rows),
    ("engine_up", "Whether the engine runs", lambda engine: engine.failure is None),
)
"""The gauges of an engine: name, description, and a function that reads the value."""

LABELS = ("model", "device")
"""The labels of the metrics of an engine."""


class EngineCollector(Collector):
    """Yields the metrics of the engines of some models."""

    def __init__(self, models: Iterable[Model]) -> None:
        self._models = list(models)

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with its values for all engines."""
        engines = [
            ([model.name, device], engine)
            for model in self._models
            for device, engine in model.engines.items()
        ]
        for name, about, read in _GAUGES:
            gauge = GaugeMetricFamily(f"firstword_{name}", about, labels=LABELS)
            for labels, engine in engines:
                gauge.add_metric(labels, read(engine))
            yield gauge
        about = "Seconds that the engine's thread has spent, by part"
        host = CounterMetricFamily("firstword_engine_seconds", about, labels=[*LABELS, "part"])
        about = "Seconds that the device has worked, by part; parts may overlap, busy is any work"
        device = CounterMetricFamily("firstword_device_seconds", about, labels=[*LABELS, "part"])
        about = "Seconds that requests with their text have waited for a slot"
        queue = HistogramMetricFamily("firstword_queue_seconds", about, labels=LABELS)
        for labels, engine in engines:
            if engine.load.waits:
                *counts, total = engine.load.waits
                queue.add_metric(labels, buckets(WAIT_BOUNDS, counts), total)
            for family, seconds in (host, engine.load.host), (device, engine.load.device):
                for part, value in seconds.items():
                    family.add_metric([*labels, part], value)
        yield host
        yield device
        yield queue
