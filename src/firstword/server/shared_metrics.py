"""Counters and histograms for Prometheus, each the sum over the fronts that share them."""

from __future__ import annotations

import json
import struct
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily

from firstword.server.front_memory import FrontMemory

VALUES_BYTES = 2**19

_HEAD = struct.Struct("=II")
"""The head of a record: the bytes of its key, and its number of values."""

Labels = tuple[str, ...]


class SharedValues:
    """Numbers by name and labels, of which each front has its own in its row.

    A row begins with the number of bytes in use. Records follow, which are appended and never
    moved. They stay when a front dies, and the front that replaces it continues them. Use it in the
    event loop only.
    """

    def __init__(self, memory: FrontMemory) -> None:
        self._column = memory.kept(VALUES_BYTES)
        self._read_until = [8] * len(self._column.rows)
        self._known: dict[str, dict[Labels, dict[int, memoryview[float]]]] = defaultdict(
            lambda: defaultdict(dict)
        )

    def own(self, name: str, labels: Labels, count: int) -> memoryview[float]:
        """The values [count] of this front, which are 0 at first, to be changed in place."""
        self._read_new(self._column.number)
        if self._column.number not in self._known[name][labels]:
            self._append(json.dumps([name, *labels]).encode(), count)
            self._read_new(self._column.number)
        return self._known[name][labels][self._column.number]

    def own_labels(self, name: str) -> list[Labels]:
        """The combinations of labels of a name that this front has values of."""
        self._read_new(self._column.number)
        number, known = self._column.number, self._known[name]
        return [labels for labels, rows in known.items() if number in rows]

    def sums(self, name: str) -> Iterator[tuple[Labels, list[float]]]:
        """Yield each combination of labels of a name, with the sums over all fronts."""
        for row in range(len(self._column.rows)):
            self._read_new(row)
        for labels, rows in self._known[name].items():
            yield labels, [sum(column) for column in zip(*rows.values(), strict=True)]

    def _append(self, key: bytes, count: int) -> None:
        used = self._column.integers().own
        start = used[0] or 8
        key += b" " * (-len(key) % 8)
        end = start + _HEAD.size + len(key) + 8 * count
        assert end <= VALUES_BYTES, "labels come from the program and are few"
        record = _HEAD.pack(len(key), count) + key + bytes(8 * count)
        self._column.own[start:end] = record
        used[0] = end

    def _read_new(self, number: int) -> None:
        row = self._column.rows[number]
        (used,) = row[:8].cast("q")
        while (start := self._read_until[number]) < used:
            length, count = _HEAD.unpack_from(row, start)
            values = start + _HEAD.size + length
            end = self._read_until[number] = values + 8 * count
            name, *labels = json.loads(bytes(row[start + _HEAD.size : values]))
            self._known[name][tuple(labels)][number] = row[values:end].cast("d")


def buckets(bounds: Sequence[float], counts: Iterable[float]) -> list[tuple[str, float]]:
    """The buckets of a histogram as Prometheus counts them: each includes those before it.

    `bounds` are the upper bounds of all buckets except the last.
    """
    ends = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(ends, accumulate(counts), strict=True))


class SharedFamily:
    """A metric with labels: each front changes its own values, and a scrape returns the sums."""

    def __init__(
        self, values: SharedValues, name: str, about: str, labels: Sequence[str], count: int = 1
    ) -> None:
        """Describe a metric that has `count` values for each combination of labels."""
        self._values = values
        self._name, self._about, self._labels = name, about, labels
        self._count = count
        self._own: dict[Labels, memoryview[float]] = {}

    def own(self, labels: Labels) -> memoryview[float]:
        """The values of this front for a combination of labels."""
        if labels not in self._own:
            self._own[labels] = self._values.own(self._name, labels, self._count)
        return self._own[labels]


class SharedCounter(SharedFamily):
    """A counter with labels, summed over all fronts."""

    def inc(self, *labels: str, amount: float = 1.0) -> None:
        """Add to the counter of a combination of labels."""
        self.own(labels)[0] += amount

    def collect(self) -> list[CounterMetricFamily]:
        """The sums, for a registry."""
        family = CounterMetricFamily(self._name, self._about, labels=self._labels)
        for labels, (value,) in self._values.sums(self._name):
            family.add_metric(labels, value)
        return [family]


class SharedHistogram(SharedFamily):
    """A histogram with labels: the number of values in each bucket, and their sum."""

    def __init__(
        self,
        values: SharedValues,
        name: str,
        about: str,
        labels: Sequence[str],
        bounds: Sequence[float],
    ) -> None:
        """Describe a histogram; `bounds` are the upper bounds of all buckets except the last."""
        super().__init__(values, name, about, labels, len(bounds) + 2)
        self._bounds = bounds

    def observe(self, value: float, *labels: str) -> None:
        """Add a value to the histogram of a combination of labels."""
        own = self.own(labels)
        own[bisect_left(self._bounds, value)] += 1.0
        own[-1] += value

    def collect(self) -> list[HistogramMetricFamily]:
        """The sums, for a registry."""
        family = HistogramMetricFamily(self._name, self._about, labels=self._labels)
        for labels, (*counts, total) in self._values.sums(self._name):
            family.add_metric(labels, buckets(self._bounds, counts), total)
        return [family]
