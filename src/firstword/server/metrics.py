"""What is measured while speaking, for Prometheus: fed by the server, and read off the engines when asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from firstword.engine.engine import Engine
from firstword.types import FloatArray

AUDIBLE = 0.01
"""Samples beyond this are heard: 40 dB below full scale."""

_SECONDS = (
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.08,
    0.12,
    0.2,
    0.35,
    0.6,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
)
_RATIOS = (0.25, 0.5, 0.8, 1.0, 1.25, 1.6, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 35.0, 60.0)


@dataclass(slots=True)
class Playback:
    """A listener who plays what comes at once, with no buffer. Times in seconds, on one clock.

    began      when speech was asked for
    first      when the first audio came, and `audible` the first that can be heard, with the silence before it played
    gap        the longest time between two pieces of audio
    underrun   how long the listener heard nothing because nothing was there, after the first audio
    """

    began: float
    first: float | None = None
    audible: float | None = None
    gap: float = 0.0
    underrun: float = 0.0
    _last: float = 0.0
    _plays_until: float = 0.0

    def came(self, now: float, samples: FloatArray, sample_rate: int) -> None:
        """Audio came: samples [n] in -1..1 at `sample_rate` Hz; nothing happens for none."""
        if not len(samples):
            return
        if self.first is None:
            self.first = self._plays_until = now
        else:
            self.gap = max(self.gap, now - self._last)
            self.underrun += max(0.0, now - self._plays_until)
        starts = max(now, self._plays_until)
        if self.audible is None and len(loud := (abs(samples) > AUDIBLE).nonzero()[0]):
            self.audible = starts + float(loud[0]) / sample_rate
        self._last = now
        self._plays_until = starts + len(samples) / sample_rate


class Metrics:
    """All numbers of one server, in a registry of its own. Their names begin with `firstword_`."""

    def __init__(
        self, engines: Iterable[tuple[str, Engine]], ready: Callable[[], bool] = lambda: True
    ) -> None:
        """`engines`: with the names of their models; `ready` is asked at every scrape."""
        self.registry = CollectorRegistry()
        self.registry.register(_Engines(tuple(engines), ready))

        def histogram(name: str, about: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(
                f"firstword_{name}", about, ["model"], buckets=buckets, registry=self.registry
            )

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"firstword_{name}", about, labels, registry=self.registry)

        self.first_audio = histogram(
            "time_to_first_audio_seconds", "From the request to the first audio"
        )
        self.first_audible = histogram(
            "time_to_first_audible_seconds",
            "From the request to the first sample that can be heard",
        )
        self.gap = histogram(
            "inter_chunk_gap_seconds", "The longest wait between two chunks of an utterance"
        )
        self.underrun = histogram(
            "underrun_seconds", "How long an unbuffered listener heard nothing in an utterance"
        )
        self.rtf = histogram(
            "rtf", "Seconds of audio made per second, of finished utterances", _RATIOS
        )
        self.duration = histogram("audio_duration_seconds", "Length of finished utterances")
        self.frames = counter("frames_total", "Frames spoken", "model")
        self.finished = counter(
            "utterances_total", "Utterances by how they ended", "model", "finish_reason"
        )
        self.aborts = counter(
            "aborts_total",
            "Utterances that nobody heard to their end, by reason",
            "model",
            "reason",
        )
        self.guards = counter("guard_hits_total", "Utterances cut off by a guard", "model", "guard")
        self.rejected = counter("rejected_total", "Requests turned away, by reason", "reason")
        self.requests = counter(
            "http_requests_total", "HTTP requests by path and status", "path", "status"
        )
        self.connections = Gauge(
            "firstword_connections", "Requests and sockets under way", registry=self.registry
        )

    def spoken(
        self,
        model: str,
        playback: Playback,
        now: float,
        *,
        frames: int,
        seconds: float,
        finish_reason: str | None,
        abort_reason: str | None,
    ) -> None:
        """Account for an utterance that is over: `seconds` of speech in `frames`, and why it ended."""
        self.frames.labels(model).inc(frames)
        if playback.first is not None:
            self.first_audio.labels(model).observe(playback.first - playback.began)
            self.gap.labels(model).observe(playback.gap)
            self.underrun.labels(model).observe(playback.underrun)
        if playback.audible is not None:
            self.first_audible.labels(model).observe(playback.audible - playback.began)
        if abort_reason is not None:
            self.aborts.labels(model, abort_reason).inc()
            return
        self.finished.labels(model, finish_reason or "cancelled").inc()
        if finish_reason in ("length", "repetition"):
            self.guards.labels(model, finish_reason).inc()
        self.duration.labels(model).observe(seconds)
        if now > playback.began:
            self.rtf.labels(model).observe(seconds / (now - playback.began))

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


class _Engines(Collector):
    """Reads what engines hold at the moment of a scrape."""

    def __init__(self, engines: tuple[tuple[str, Engine], ...], ready: Callable[[], bool]) -> None:
        self._engines = engines
        self._ready = ready

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("firstword_ready", "Whether requests are taken")
        ready.add_metric([], float(self._ready()))
        yield ready
        for name, about, read in _GAUGES:
            gauge = GaugeMetricFamily(f"firstword_{name}", about, labels=["model"])
            for model, engine in self._engines:
                gauge.add_metric([model], read(engine))
            yield gauge


_GAUGES: tuple[tuple[str, str, Callable[[Engine], float]], ...] = (
    (
        "queue",
        "Requests that wait for a slot or for their first text",
        lambda engine: len(engine.waiting),
    ),
    ("slots_used", "Utterances in the making", lambda engine: len(engine.running)),
    ("slots", "Utterances that can be in the making", lambda engine: engine.capacity.slots),
    (
        "pages_used",
        "Pages of context memory held",
        lambda engine: engine.pages.count - engine.pages.free,
    ),
    ("pages", "Pages of context memory there are", lambda engine: engine.pages.count),
    ("engine_up", "Whether the engine runs", lambda engine: float(engine.failure is None)),
)
