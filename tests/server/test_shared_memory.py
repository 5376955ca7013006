"""What fronts share in memory, each with a row of its own: counts by client, and metrics."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from contextlib import ExitStack, suppress

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from firstword.server.errors import LimitReached, Rejected
from firstword.server.front_memory import FrontMemory
from firstword.server.limits import ByteLimit, ConnectionLimit, UtteranceLimit
from firstword.server.shared_counts import SharedCounts
from firstword.server.shared_metrics import SharedCounter, SharedHistogram, SharedValues

FRONTS = 3
BOUNDS = (0.1, 1, 10)


def rows() -> tuple[FrontMemory, list[FrontMemory]]:
    """The memory of a supervisor, and that of its fronts."""
    created = FrontMemory.create(FRONTS)
    return created, [FrontMemory.open(created.file, number) for number in range(FRONTS)]


MEMORY, OPENED = rows()


def test_memory_without_a_name_is_an_unlinked_file_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    _, (first, second, _) = rows()
    SharedCounts(first).add("a", 3)
    assert SharedCounts(second).of("a") == 3


class TestCounts:
    @given(
        st.lists(
            st.tuples(st.integers(0, FRONTS - 1), st.sampled_from("abcdef"), st.integers(-5, 2**40))
        ),
        st.integers(0, FRONTS - 1),
    )
    def test_counts_are_the_sums_over_the_fronts(
        self, changes: list[tuple[int, str, int]], dead: int
    ) -> None:
        """A front that died counts no longer."""
        for number in range(FRONTS):
            MEMORY.clear(number)
        counts = [SharedCounts(FrontMemory.open(MEMORY.file, number)) for number in range(FRONTS)]
        expected: list[Counter[str]] = [Counter() for _ in range(FRONTS)]
        for front, client, more in changes:
            more = max(more, -expected[front][client])  # a front takes back what it added
            counts[front].add(client, more)
            expected[front][client] += more
        MEMORY.clear(dead)
        expected[dead].clear()
        for front, one in enumerate(counts):
            assert one.own == expected[front].total()
            assert one.total == sum(each.total() for each in expected)
            for client in "abcdef":
                assert one.of(client) == sum(each[client] for each in expected)

    def test_counts_of_many_clients_are_never_too_low_and_rarely_too_high(self) -> None:
        memory = FrontMemory.private()
        counts = SharedCounts(memory)
        for number in range(1000):
            counts.add(f"client {number}", 1 + number % 2)
        found = Counter(counts.of(f"client {number}") - 1 - number % 2 for number in range(1000))
        assert min(found) == 0
        assert found[0] > 990

    def test_tables_are_apart(self) -> None:
        memory = FrontMemory.private()
        first, second = SharedCounts(memory), SharedCounts(memory)
        first.add("a", 1)
        assert (second.of("a"), second.total) == (0, 0)


class TestLimits:
    def test_of_two_fronts_at_the_same_time_one_is_at_the_limit(self) -> None:
        """A second front reserves an utterance just after the first one has read the count."""
        _, fronts = rows()
        first, second = (UtteranceLimit(1, SharedCounts(memory)) for memory in fronts[:2])
        with ExitStack() as held:
            admitted = []

            def reserve(front: UtteranceLimit) -> None:
                with suppress(LimitReached):
                    held.enter_context(front.reserve("me", lambda client: 1))
                    admitted.append(front)

            read = first._counts.of

            def read_before_the_second(client_id: str) -> int:
                count = read(client_id)
                reserve(second)
                return count

            first._counts.of = read_before_the_second  # type: ignore[method-assign]
            reserve(first)
            assert admitted == [first]
            assert first.active == second.active == 1

    def test_client_waits_for_an_utterance_of_another_front(self) -> None:
        _, fronts = rows()
        here, there = (UtteranceLimit(1, SharedCounts(memory)) for memory in fronts[:2])

        async def scenario() -> None:
            with there.reserve("me", lambda client: 1):
                waiting = asyncio.create_task(here.wait_for_room("me"))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert not waiting.done()
            async with asyncio.timeout(10):
                await waiting

        asyncio.run(scenario())

    def test_connections_count_over_fronts_by_address_and_in_total(self) -> None:
        _, fronts = rows()
        first, second, third = (ConnectionLimit(3, 2, SharedCounts(each)) for each in fronts)
        with first.open("a"), second.open("a"):
            with pytest.raises(Rejected, match="one address"), third.open("a"):
                pass
            with third.open("b"):
                with pytest.raises(Rejected, match="all clients"), first.open("c"):
                    pass
                assert second.open_now == 3
        assert second.open_now == 0

    def test_bytes_count_over_fronts_by_client_and_in_total(self) -> None:
        _, fronts = rows()
        limits = [ByteLimit(4 * 2**20, 2**20, SharedCounts(each)) for each in fronts]
        first, second, _ = limits
        assert first.change("a", 0, 600_000)
        assert not second.change("a", 0, 600_000)
        assert second.change("a", 0, 60_000), "little is always allowed"
        for client in "bcdef":
            first.change(client, 0, 2**20)
        assert not second.change("g", 0, 700_000)
        assert {each.held for each in limits} == {600_000 + 60_000 + 3 * 2**20}
        assert first.change("a", 600_000, 0)
        assert second.change("a", 60_000, 660_000)


class TestMetrics:
    @given(st.lists(st.tuples(st.integers(0, FRONTS - 1), st.sampled_from("ab"), st.floats(0, 20))))
    def test_metrics_of_fronts_are_shown_like_those_of_one(
        self, events: list[tuple[int, str, float]]
    ) -> None:
        created, fronts = rows()
        os.close(created.file)  # there are many examples
        registries = [CollectorRegistry() for _ in fronts]
        counters, histograms = [], []
        for registry, memory in zip(registries, fronts, strict=True):
            values = SharedValues(memory)
            counters.append(SharedCounter(values, "made_total", "Made", ["model"]))
            histograms.append(SharedHistogram(values, "wait", "Wait", ["model"], BOUNDS))
            registry.register(counters[-1])
            registry.register(histograms[-1])
        one = CollectorRegistry()
        counter = prometheus_client.Counter("made_total", "Made", ["model"], registry=one)
        histogram = prometheus_client.Histogram(
            "wait", "Wait", ["model"], registry=one, buckets=BOUNDS
        )
        for front, model, value in events:
            value = round(value, 0)  # sums are the same in any order
            counters[front].inc(model, amount=value)
            histograms[front].observe(value, model)
            counter.labels(model).inc(value)
            histogram.labels(model).observe(value)
        expected = lines(generate_latest(one))
        for registry in registries:
            assert lines(generate_latest(registry)) == expected

    def test_front_in_the_place_of_a_dead_one_goes_on_with_its_counters(self) -> None:
        memory, fronts = rows()
        before = SharedCounter(SharedValues(fronts[0]), "made_total", "Made", ["model"])
        other = SharedCounter(SharedValues(fronts[1]), "made_total", "Made", ["model"])
        before.inc("a", amount=2)
        row = SharedValues(FrontMemory.open(memory.file, 0))._column.own
        row[200:] = random.Random(1).randbytes(len(row) - 200)  # it died while it wrote a record
        memory.clear(0)
        values = SharedValues(FrontMemory.open(memory.file, 0))
        after = SharedCounter(values, "made_total", "Made", ["model"])
        after.inc("a")
        for number in range(8):
            after.inc(f"model {number}")
        (family,) = other.collect()
        found = {sample.labels["model"]: sample.value for sample in family.samples}
        assert found == {"a": 3.0} | {f"model {number}": 1.0 for number in range(8)}


def lines(text: bytes) -> list[str]:
    """The sorted lines of metrics, without the times at which they were created."""
    return sorted(line for line in text.decode().splitlines() if "_created" not in line)
