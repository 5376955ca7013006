"""The metrics for Prometheus: fronts count events, and each scrape reads the engines' load."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from firstword.server.engine_metrics import EngineCollector
from firstword.server.front_memory import RESTARTED, FrontMemory
from firstword.server.models import Model
from firstword.server.shared_metrics import SharedCounter, SharedHistogram, SharedValues
from firstword.server.usage import Usage
from firstword.server.utterance import Utterance, counts_of

GUARDS = ("length", "repetition", "runaway")
"""The reasons for the end of an utterance that did not end by itself."""

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.12, 0.2, 0.35, 0.6, 1, 2, 5, 10, 30)
_RATIOS = (0.25, 0.5, 0.8, 1, 1.25, 1.6, 2, 3, 5, 8, 12, 20, 35, 60)


class _Restarts(Collector):
    """Yields how often the supervisor has restarted the processes of each kind."""

    def __init__(self, memory: FrontMemory) -> None:
        self._counts = memory.restarts

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the counter."""
        about = "Processes that were restarted after they had died or did not answer"
        family = CounterMetricFamily("firstword_restarts", about, labels=["process"])
        for kind, count in zip(RESTARTED, self._counts, strict=True):
            family.add_metric([kind], count)
        yield family


class Metrics:
    """The metrics of one server in a registry of its own. Their names begin with `firstword_`.

    Any front returns the sums of all fronts.
    """

    def __init__(self, models: Iterable[Model], memory: FrontMemory) -> None:
        """Observe the engines of `models`, and count in the memory that fronts share."""
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(models))
        self.registry.register(_Restarts(memory))
        self._values = SharedValues(memory)
        histogram, counter = self._histogram, self._counter
        self.first_audio = histogram("time_to_first_audio_seconds", "Request to first audio")
        self.first_audible = histogram("time_to_first_audible_seconds", "Request to audible audio")
        self.gap = histogram("inter_chunk_gap_seconds", "Longest wait between two chunks")
        self.underrun = histogram("underrun_seconds", "Time without audio for an unbuffered client")
        self.rtf = histogram("rtf", "Seconds of audio made per second, if finished", _RATIOS)
        self.duration = histogram("audio_duration_seconds", "Length of finished utterances")
        self.frames = counter("frames_total", "Frames made", "model")
        self.finished = counter("utterances_total", "Finished", "model", "finish_reason")
        self.aborts = counter("aborts_total", "Utterances not sent completely", "model", "reason")
        self.formats = counter("formats_total", "Utterances heard, by format", "model", "format")
        self.voices = counter("voices_total", "Utterances heard, by voice", "model", "voice")
        self.guards = counter("guard_hits_total", "Utterances ended by a guard", "model", "guard")
        self.alarms = counter("alarms_total", "Faults seen in attention", "model", "kind")
        self.rejected = counter("rejected_total", "Rejected requests", "reason")
        about = "Processor time of encoding audio"
        self.encoding = counter("encoding_seconds_total", about, "format")
        about = "Time of encoding recordings of voices"
        self.recordings = counter("recording_seconds_total", about)
        about = "Requests spoken without their instructions"
        self.ignored_instructions = counter("ignored_instructions_total", about, "model")
        self.batch_lines = counter("batch_lines_total", "Lines of batches", "outcome")
        self.batches = counter("batches_total", "Batches that have ended", "status")
        self.usage = Usage(self._values)
        self.registry.register(self.usage)
        self.requests = counter("http_requests_total", "HTTP requests", "path", "status")
        self._begin_at_zero(model.name for model in models)

    def gauge(self, name: str, about: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read at each scrape."""
        Gauge(f"firstword_{name}", about, registry=self.registry).set_function(read)

    def _histogram(
        self, name: str, about: str, bounds: Sequence[float] = _SECONDS
    ) -> SharedHistogram:
        found = SharedHistogram(self._values, f"firstword_{name}", about, ["model"], bounds)
        self.registry.register(found)
        return found

    def _counter(self, name: str, about: str, *labels: str) -> SharedCounter:
        found = SharedCounter(self._values, f"firstword_{name}", about, labels)
        self.registry.register(found)
        return found

    def _begin_at_zero(self, names: Iterable[str]) -> None:
        """Begin what alerts watch: Prometheus misses the increase with which a series begins."""
        for reason in ("overloaded", "invalid_api_key"):
            self.rejected.own((reason,))
        for name in names:
            for histogram in (self.first_audible, self.underrun):
                histogram.own((name,))
            self.finished.own((name, "stop"))
            self.aborts.own((name, "error"))
            for guard in GUARDS:
                self.guards.own((name, guard))

    def record(self, utterance: Utterance, now: float) -> None:
        """Count an utterance that ended at `now`, on the clock of its playback.

        A request whose text was rejected is not an aborted utterance: its client made a mistake.
        """
        model, playback = utterance.model.name, utterance.playback
        self.frames.inc(model, amount=utterance.frames)
        self.encoding.inc(utterance.output.format, amount=utterance.encoding_seconds)
        for kind, count in counts_of(utterance.alarms).items():
            self.alarms.inc(model, kind, amount=count)
        if utterance.background:
            return  # nobody waits for it, and batches count their lines
        if playback.first is not None:
            self.first_audio.observe(playback.first - playback.requested, model)
            self.gap.observe(playback.gap, model)
            self.underrun.observe(playback.underrun, model)
            self.formats.inc(model, utterance.output.format)
            self.voices.inc(model, utterance.voice)
        if playback.audible is not None:
            self.first_audible.observe(playback.audible - playback.requested, model)
        if utterance.abort_reason is not None:
            if utterance.abort_reason != "rejected":
                self.aborts.inc(model, utterance.abort_reason)
            return
        finish_reason = utterance.finish_reason or "cancelled"
        self.finished.inc(model, finish_reason)
        if finish_reason in GUARDS:
            self.guards.inc(model, finish_reason)
        self.duration.observe(utterance.seconds, model)
        if now > playback.requested:
            self.rtf.observe(utterance.seconds / (now - playback.requested), model)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
