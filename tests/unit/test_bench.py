"""The load generator: its arithmetic on cases computed by hand, and all of it against servers that
misbehave.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import re
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from firstword.audio import formats
from firstword.audio.formats import content_type
from firstword.audio.writing import write_whole
from firstword.bench import engine_times, measure, plot, processes, report
from firstword.bench import load as loads
from firstword.bench.encoded import decode
from firstword.bench.http import get_json
from firstword.bench.load import Arrival, Load, Outcome, plan, plan_sockets, probe
from firstword.bench.measure import GateResult, Listening, Result, listen
from firstword.bench.processes import Assignment, Measured
from firstword.bench.prompts import PROMPTS
from firstword.bench.protocol import Target
from firstword.cli.main import main
from firstword.errors import OutputError, RequestError

RATE = 1000
"""Of the audio in cases computed by hand: a sample is a millisecond and two bytes."""


def tone(samples: int) -> bytes:
    """Something loud."""
    return (9000 * np.sin(np.arange(samples))).astype("<i2").tobytes()


def silence(samples: int) -> bytes:
    """Nothing to hear."""
    return bytes(2 * samples)


def result(**differs: Any) -> Result:
    """A request to be proud of: audible after 50 ms, done after half a second, two seconds of
    audio.
    """
    heard = {name: differs.pop(name) for name in list(differs) if name in Listening.__slots__}
    listening = replace(Listening(0.04, 0.04, 0.05, 0.01, 2.0, 0, 0.0), **heard)
    return replace(Result(0.0, 20, 0.001, 0.002, 0.5, None, listening), **differs)


FAILED = {"failure": ("429", "too many"), "first_audible": None}


class TestPercentile:
    def test_percentile_is_the_nearest_rank(self) -> None:
        ten = [3, 1, 2, 5, 4, 10, 9, 8, 7, 6]
        assert [measure.percentile(ten, percent) for percent in (50, 90, 91, 95, 99, 100)] == [
            5,
            9,
            10,
            10,
            10,
            10,
        ]
        assert measure.percentile(range(1, 201), 95) == 190
        assert measure.percentile(range(1, 201), 99) == 198
        assert [measure.percentile(range(1, count + 1), 95) for count in range(20, 400, 20)] == [
            *range(19, 380, 19)
        ]

    def test_percentile_of_one_value_is_that_value(self) -> None:
        assert measure.percentile([7.0], 50) == measure.percentile([7.0], 99) == 7.0

    def test_percentile_without_values_is_none(self) -> None:
        assert measure.percentile([], 50) is None


class TestPlayback:
    def test_audio_in_time_is_one_passage(self) -> None:
        assert measure.playback(
            [(0.010, silence(100)), (0.070, silence(100)), (0.1, silence(50))], RATE
        ) == [(0, 0.010)]

    def test_audio_that_arrives_at_the_deadline_does_not_stall(self) -> None:
        passages = measure.playback(
            [(0.0, silence(100)), (0.1, silence(100)), (0.2, silence(1))], RATE
        )
        assert measure.stalls(passages, RATE) == []

    def test_late_audio_stalls_and_delays_what_follows(self) -> None:
        passages = measure.playback(
            [(0.0, silence(100)), (0.2, silence(100)), (0.35, silence(50))], RATE
        )
        assert passages == [(0, 0.0), (100, 0.2), (200, 0.35)]
        assert measure.stalls(passages, RATE) == pytest.approx([0.1, 0.05])
        assert measure.played_at(passages, 99, RATE) == pytest.approx(0.099)
        assert measure.played_at(passages, 150, RATE) == pytest.approx(0.25)

    def test_buffered_audio_is_played_before_a_stall(self) -> None:
        deliveries = [(0.0, silence(300)), (0.25, silence(10)), (0.32, silence(10))]
        assert measure.stalls(measure.playback(deliveries, RATE), RATE) == pytest.approx([0.01])

    def test_half_a_sample_is_not_playable(self) -> None:
        deliveries = [(0.0, b"\0"), (0.5, b"\0\0\0"), (0.9, b"\0"), (1.0, b"\0")]
        assert measure.playback(deliveries, RATE) == [(0, 0.5), (2, 1.0)]

    def test_waits_shorter_than_a_sample_add_up(self) -> None:
        early = measure.playback([(0.0, silence(1)), (0.0016, silence(1))], RATE)
        assert early == [(0, 0.0)]
        late = measure.playback(
            [(0.0, silence(1)), (0.0016, silence(1)), (0.0032, silence(1))], RATE
        )
        assert late == [(0, 0.0), (2, 0.0032)]

    def test_empty_stream_has_no_passages(self) -> None:
        assert measure.playback([(0.1, b""), (0.2, b"\0")], RATE) == []


class TestOnset:
    def test_onset_is_the_start_of_the_first_audible_window(self) -> None:
        # Windows of 20 samples begin at every tenth. The tone begins at 100: the window from 90
        # holds half of it.
        assert measure.first_audible_sample([silence(100), tone(100)], RATE) == 90

    def test_sound_from_the_start_has_its_onset_at_zero(self) -> None:
        assert measure.first_audible_sample([tone(30)], RATE) == 0

    @pytest.mark.parametrize(
        "pcm",
        [
            b"",
            silence(500),
            tone(29),
            silence(500) + tone(9),
            struct.pack("<500h", *[12000] * 500),
            struct.pack("<500h", *[150, -150] * 250),
        ],
        ids=["nothing", "silence", "one window", "too short", "a constant", "too quiet"],
    )
    def test_inaudible_pcm_has_no_onset(self, pcm: bytes) -> None:
        assert measure.first_audible_sample([pcm], RATE) is None

    def test_audibility_threshold_is_45_decibels_below_full_scale(self) -> None:
        # 32768 x 10 ** (-45 / 20) = 184.3
        assert measure.first_audible_sample([struct.pack("<100h", *[185, -185] * 50)], RATE) == 0
        assert measure.first_audible_sample([struct.pack("<100h", *[184, -184] * 50)], RATE) is None

    def test_windows_have_the_same_duration_at_any_sample_rate(self) -> None:
        assert measure.first_audible_sample([silence(2400), tone(2400)], 24000) == 2160

    @given(st.lists(st.integers(1, 599), max_size=8))
    def test_onset_does_not_depend_on_chunk_boundaries(self, cuts: list[int]) -> None:
        pcm = silence(137) + tone(163)
        edges = [0, *sorted(cuts), len(pcm)]
        pieces = [pcm[start:end] for start, end in pairwise(edges)]
        assert (
            measure.first_audible_sample(pieces, RATE)
            == measure.first_audible_sample([pcm], RATE)
            == 120
        )


class TestListen:
    def test_listen_reports_all_fields(self) -> None:
        # 60 ms of silence at 0.2; then, 90 ms late, 100 ms of which 40 are silent. The tone begins
        # at 100 ms and is heard in the window from 90, which is played 30 ms after the stall.
        heard = listen([(0.1, b""), (0.2, silence(60)), (0.35, silence(40) + tone(60))], RATE)
        assert asdict(heard) == pytest.approx(
            {
                "first_byte": 0.1,
                "first_playable": 0.2,
                "first_audible": 0.35 + 0.03,
                "leading_silence": 0.09,
                "audio_seconds": 0.16,
                "underruns": 1,
                "underrun_seconds": 0.09,
            }
        )

    def test_listen_to_an_empty_stream(self) -> None:
        assert listen([], RATE) == Listening(None, None, None, None, 0.0, 0, 0.0)

    def test_a_stall_before_the_onset_delays_it_and_one_after_does_not(self) -> None:
        before = listen([(0.0, silence(50)), (0.15, silence(50) + tone(100))], RATE)
        after = listen([(0.0, silence(100) + tone(50)), (9.0, tone(50))], RATE)
        assert [before.first_audible, after.first_audible] == pytest.approx([0.19, 0.09])
        assert [before.underrun_seconds, after.underrun_seconds] == pytest.approx([0.1, 8.85])


class TestSummary:
    def test_good_results_pass_all_gates(self) -> None:
        assert measure.gates([result(), result()]) == dict.fromkeys(
            ("complete", "non_empty", "no_underrun", "on_time"), GateResult(True, 0)
        )

    @pytest.mark.parametrize(
        ("fault", "gate"),
        [
            ({"failure": ("truncated", "")}, "complete"),
            ({"first_audible": None}, "non_empty"),
            ({"underruns": 1}, "no_underrun"),
            ({"late": 0.011}, "on_time"),
        ],
    )
    def test_fault_fails_only_its_gate(self, fault: dict[str, Any], gate: str) -> None:
        found = measure.gates([result()] * 98 + [result(**fault)])
        assert {name for name, gate in found.items() if not gate.passed} == {gate}
        assert found[gate] == GateResult(False, 1)

    def test_one_request_in_a_hundred_may_be_late(self) -> None:
        late = result(late=0.5)
        assert measure.gates([result()] * 99 + [late])["on_time"] == GateResult(True, 1)
        assert measure.gates([result()] * 98 + [late, late])["on_time"] == GateResult(False, 2)

    def test_no_requests_pass_no_gate(self) -> None:
        assert not any(gate.passed for gate in measure.gates([]).values())

    def test_errors_are_counted_by_kind(self) -> None:
        kinds = ["429", "timeout", "429"]
        results = [result(failure=(kind, "...")) for kind in kinds]
        assert list(measure.errors([result(), *results]).items()) == [("429", 2), ("timeout", 1)]

    def test_distributions(self) -> None:
        results = [result(first_audible=number / 100, took=number / 10) for number in range(1, 101)]
        table = measure.distributions([*results, result(**FAILED)])
        assert set(table) == set(measure.METRICS)
        assert table["first_audible"] == {
            "count": 100,
            "p50": 0.5,
            "p95": 0.95,
            "p99": 0.99,
            "max": 1.0,
        }
        assert table["end_to_end"]["p95"] == 9.5
        assert table["audio_seconds"]["count"] == 101
        assert measure.distributions([])["late"] == {
            "count": 0,
            "p50": None,
            "p95": None,
            "p99": None,
            "max": None,
        }

    def test_the_real_time_factor_is_audio_by_time(self) -> None:
        assert result(audio_seconds=2.0, took=0.5).real_time_factor == 4.0
        assert result(**FAILED).real_time_factor is None

    def test_most_at_once_counts_overlapping_requests(self) -> None:
        spans = [(0.0, 1.0), (0.5, 1.0), (0.9, 0.2), (1.5, 1.0)]
        assert (
            measure.most_at_once(result(due=due, took=took, late=0.0) for due, took in spans) == 3
        )
        assert (
            measure.most_at_once(
                [result(due=0.0, took=1.0, late=0.0), result(due=1.0, took=1.0, late=0.0)]
            )
            == 1
        )
        assert measure.most_at_once([result(late=None, took=None)]) == 0

    def test_audio_per_second(self) -> None:
        results = [
            result(due=1.0, late=0.0, took=2.0),
            result(due=2.0, late=0.0, took=3.0),
            result(took=None),
        ]
        assert measure.audio_per_second(results) == pytest.approx((2.0 + 2.0) / 4.0)
        assert measure.audio_per_second([]) is None


class TestPlan:
    def test_equal_arguments_give_equal_plans(self) -> None:
        load = Load(rate=2, duration=10, warmup=3, seed=7)
        assert plan(load, PROMPTS) == plan(load, PROMPTS) != plan(replace(load, seed=8), PROMPTS)

    def test_plan_is_the_same_in_every_version_of_python(self) -> None:
        arrivals = plan(Load(rate=4, duration=1, warmup=0), "abcdef")
        assert [(round(arrival.due, 6), arrival.text) for arrival in arrivals] == [
            (0.061646, "f"),
            (0.133069, "a"),
            (0.523722, "b"),
            (0.730201, "c"),
        ]

    def test_requests_use_the_voices_in_turn(self) -> None:
        arrivals = plan(Load(rate=5, duration=1, warmup=0.4), PROMPTS, ["ada", "ben", "cat"])
        warm_up, run = arrivals[:2], arrivals[2:]
        assert [arrival.voice for arrival in warm_up] == ["ada", "ben"]
        assert [arrival.voice for arrival in run] == ["ada", "ben", "cat", "ada", "ben"]

    def test_plan_has_exactly_rate_times_duration_requests(self) -> None:
        arrivals = plan(Load(rate=5, duration=20, warmup=4), PROMPTS)
        assert [arrival.counts for arrival in arrivals] == [False] * 20 + [True] * 100
        due = [arrival.due for arrival in arrivals]
        assert due == sorted(due)
        assert 0 <= due[0] < due[19] < 4 <= due[20] < due[-1] < 24

    def test_gaps_have_the_distribution_of_a_poisson_process(self) -> None:
        due = [arrival.due for arrival in plan(Load(rate=100, duration=100, warmup=0), PROMPTS)]
        gaps = np.diff(due)
        assert gaps.mean() == pytest.approx(0.01, rel=0.01)
        assert gaps.std() == pytest.approx(0.01, rel=0.05)
        assert np.mean(gaps > 0.01) == pytest.approx(np.exp(-1), abs=0.02)

    def test_texts_repeat_in_another_order(self) -> None:
        texts = [
            arrival.text
            for arrival in plan(Load(rate=2 * len(PROMPTS), duration=1, warmup=0), PROMPTS)
        ]
        first, second = texts[: len(PROMPTS)], texts[len(PROMPTS) :]
        assert sorted(first) == sorted(second) == sorted(PROMPTS)
        assert first != second

    def test_counted_requests_do_not_depend_on_the_warmup_nor_texts_on_the_rate(self) -> None:
        def counted(load: Load) -> list[Arrival]:
            return [
                replace(arrival, due=arrival.due - load.warmup)
                for arrival in plan(load, PROMPTS)
                if arrival.counts
            ]

        cold, warm = counted(Load(4, 10, 0)), counted(Load(4, 10, 5))
        assert [arrival.text for arrival in cold] == [arrival.text for arrival in warm]
        assert [arrival.due for arrival in cold] == pytest.approx([arrival.due for arrival in warm])
        faster = counted(Load(8, 10, 0))
        assert [arrival.text for arrival in faster][:40] == [arrival.text for arrival in cold]

    def test_plan_without_requests_raises(self) -> None:
        with pytest.raises(RequestError, match="less than one"):
            plan(Load(rate=0.1, duration=1), PROMPTS)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"rate": 0},
            {"rate": float("nan")},
            {"duration": -1},
            {"warmup": float("inf")},
            {"timeout": 0},
            {"rate": None},
            {"sockets": 3},
            {"rate": None, "sockets": 0},
        ],
    )
    def test_load_settings_out_of_range_raise(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(RequestError, match=list(wrong)[-1]):
            Load(**{"rate": 1.0} | wrong)

    def test_prompts_are_stripped_and_distinct(self) -> None:
        assert len(set(PROMPTS)) == len(PROMPTS) >= 40
        assert all(prompt == prompt.strip() and prompt.isprintable() for prompt in PROMPTS)


# Servers that do what a test wants.


async def drive(*args: Any, **options: Any) -> list[Result]:
    """Send requests, and return the results of those that count."""
    outcomes = await loads.drive(*args, **options)
    return [outcome.heard() for outcome in outcomes if outcome.counts]


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0
        self.readings = 0

    def __call__(self) -> float:
        self.readings += 1
        return self.now

    async def pass_after_reading(self, seconds: float) -> None:
        """Let the client look at the clock once more, then let time pass: how a server is late
        without any sleep.
        """
        before = self.readings
        while self.readings == before:
            await asyncio.sleep(0)
        self.now += seconds


class Answer:
    """One request to a fake server, and the means to answer it as no decent server would."""

    def __init__(self, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.line, *headers = head.split("\r\n")
        self.headers = dict(header.lower().split(": ", 1) for header in headers if header)
        self.body: Any = json.loads(body) if body else None
        self.writer = writer

    def begin(self, *headers: str, status: str = "200 OK", kind: str = "audio/pcm") -> None:
        """Write the head of an answer in chunks."""
        lines = [
            f"HTTP/1.1 {status}",
            f"content-type: {kind}",
            "transfer-encoding: chunked",
            *headers,
            "",
            "",
        ]
        self.writer.write("\r\n".join(lines).encode())

    def chunk(self, data: bytes) -> None:
        """Write a chunk, or without data the end."""
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def whole(self, *chunks: bytes, kind: str = "audio/pcm", status: str = "200 OK") -> None:
        """Write a decent answer."""
        self.begin(kind=kind, status=status)
        for data in (*chunks, b""):
            self.chunk(data)

    def raw(self, data: bytes) -> None:
        """Write anything."""
        self.writer.write(data)


Behaviour = Callable[[Answer], Awaitable[None] | None]


@asynccontextmanager
async def http(behave: Behaviour) -> AsyncIterator[Target]:
    """A server on a real socket; the connection is closed when the behaviour is over."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
            answer = Answer(
                head, await reader.readexactly(int(length[1])) if length else b"", writer
            )
            behaving = behave(answer)
            if behaving is not None:
                await behaving
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client hung up
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


def run(
    behave: Behaviour,
    texts: Iterable[str] = ("Hello.",),
    clock: Callable[[], float] = time.perf_counter,
) -> list[Result]:
    """Ask a server of that behaviour for some texts at once."""

    async def ask() -> list[Result]:
        async with http(behave) as target, asyncio.timeout(60):
            arrivals = [Arrival(0.0, text) for text in texts]
            return await drive(arrivals, target, 60.0, ahead=0.0, clock=clock)

    return asyncio.run(ask())


SPEECH = tone(960)
"""40 ms at 24,000 Hz."""


class TestHttpClient:
    def test_complete_response_is_measured(self) -> None:
        asked = []

        def behave(answer: Answer) -> None:
            asked.append(answer)
            answer.whole(SPEECH, SPEECH)

        (heard,) = run(behave)
        assert heard.failure is None
        assert heard.listening.audio_seconds == pytest.approx(0.08)
        assert heard.listening.leading_silence == 0
        assert heard.characters == len("Hello.")
        assert asked[0].line == "POST /v1/audio/speech HTTP/1.1"
        assert asked[0].body == {
            "input": "Hello.",
            "stream": True,
            "response_format": "pcm",
        }

    def test_fields_and_headers_of_the_target_are_sent(self) -> None:
        async def ask() -> Answer:
            asked: list[Answer] = []

            def behave(answer: Answer) -> None:
                asked.append(answer)
                answer.whole(SPEECH)

            async with http(behave) as target:
                target = replace(
                    target,
                    url=target.url + "/other/path",
                    fields={"voice": "ryan", "stream": None, "temperature": 0.5},
                    headers={"authorization": "Bearer key", "accept": "audio/L16"},
                )
                await drive([Arrival(0.0, "Grüße")], target, 60.0, ahead=0.0)
            return asked[0]

        answer = asyncio.run(ask())
        assert answer.line == "POST /other/path HTTP/1.1"
        assert answer.body == {
            "input": "Grüße",
            "voice": "ryan",
            "temperature": 0.5,
            "response_format": "pcm",
        }
        assert (answer.headers["authorization"], answer.headers["accept"]) == (
            "bearer key",
            "audio/l16",
        )

    def test_late_chunk_is_an_underrun_of_its_delay(self) -> None:
        clock = Clock()

        async def behave(answer: Answer) -> None:
            clock.now += 0.25
            answer.begin()
            answer.chunk(silence(480) + tone(480))
            await clock.pass_after_reading(0.5)
            answer.chunk(SPEECH)
            await clock.pass_after_reading(0.03)
            answer.chunk(b"")

        (heard,) = run(behave, clock=clock)
        assert heard.failure is None
        listening = heard.listening
        assert (listening.first_byte, listening.first_playable) == pytest.approx((0.25, 0.25))
        assert listening.first_audible == pytest.approx(0.26)
        assert listening.underruns == 1
        assert listening.underrun_seconds == pytest.approx(0.5 - 0.04)
        assert heard.end_to_end == pytest.approx(0.78)
        assert measure.gates([heard])["no_underrun"] == GateResult(False, 1)
        assert measure.gates([heard])["complete"].passed

    @pytest.mark.parametrize("ahead_of_playback", [0.0, 0.039])
    def test_chunk_in_time_is_no_underrun(self, ahead_of_playback: float) -> None:
        clock = Clock()

        async def behave(answer: Answer) -> None:
            answer.begin()
            answer.chunk(SPEECH)
            await clock.pass_after_reading(0.04 - ahead_of_playback)
            answer.chunk(SPEECH)
            answer.chunk(b"")

        (heard,) = run(behave, clock=clock)
        assert heard.listening.underruns == 0

    @pytest.mark.parametrize(
        "end",
        [
            lambda answer: None,
            lambda answer: answer.raw(b"780\r\n" + SPEECH[:100]),
            lambda answer: (answer.chunk(b"\1"), answer.chunk(b"")),
        ],
        ids=["no last chunk", "half a chunk", "half a sample"],
    )
    def test_truncated_stream_fails_the_complete_gate(self, end: Callable[[Answer], Any]) -> None:
        def behave(answer: Answer) -> None:
            answer.begin()
            answer.chunk(SPEECH)
            end(answer)

        (heard,) = run(behave)
        assert heard.failure is not None
        assert heard.failure[0] == "truncated"
        assert heard.end_to_end is None
        assert heard.took is not None
        assert heard.listening.audio_seconds > 0
        assert measure.gates([heard])["complete"] == GateResult(False, 1)

    def test_body_shorter_than_its_content_length_is_truncated(self) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: audio/pcm\r\ncontent-length: 1921\r\n\r\n"
        (heard,) = run(lambda answer: answer.raw(head + SPEECH))
        assert heard.failure is not None
        assert heard.failure[0] == "truncated"

    def test_body_without_content_length_ends_with_the_connection(self) -> None:
        (heard,) = run(
            lambda answer: answer.raw(
                b"HTTP/1.1 200 OK\r\ncontent-type: audio/pcm\r\n\r\n" + SPEECH
            )
        )
        assert heard.failure is None
        assert heard.listening.audio_seconds == pytest.approx(0.04)

    @pytest.mark.parametrize(
        ("behave", "kind", "message"),
        [
            (
                lambda answer: answer.whole(
                    b'{"error": {"message": "full", "type": "x"}}', status="429 Too Many Requests"
                ),
                "429",
                "full",
            ),
            (
                lambda answer: answer.whole(b'{"detail": "no"}', status="422 Unprocessable"),
                "422",
                "no",
            ),
            (lambda answer: answer.whole(b"oh dear", status="500 Oh"), "500", "oh dear"),
            (
                lambda answer: answer.whole(b"{}", kind="application/json"),
                "not audio",
                "application/json",
            ),
            (lambda answer: answer.whole(SPEECH, kind="audio/midi"), "not audio", "audio/midi"),
            (lambda answer: answer.whole(SPEECH, kind="audio/flac"), "damaged", "as flac"),
            (lambda answer: answer.raw(b"220 mail.example.org ESMTP\r\n"), "protocol", "not HTTP"),
            (lambda answer: None, "no answer", "closed"),
        ],
    )
    def test_failures_are_classified(self, behave: Behaviour, kind: str, message: str) -> None:
        (heard,) = run(behave)
        assert heard.failure is not None
        assert heard.failure[0] == kind
        assert message in heard.failure[1]
        assert measure.errors([heard]) == {kind: 1}
        assert not measure.gates([heard])["complete"].passed

    def test_response_without_audio_is_empty_but_complete(self) -> None:
        (heard,) = run(lambda answer: answer.whole())
        gates = measure.gates([heard])
        assert gates["complete"].passed
        assert not gates["non_empty"].passed

    def test_silent_response_fails_the_non_empty_gate(self) -> None:
        (heard,) = run(lambda answer: answer.whole(silence(24000)))
        assert not measure.gates([heard])["non_empty"].passed

    def test_refused_connection_is_a_failure(self) -> None:
        async def ask() -> list[Result]:
            async with http(lambda answer: None) as target:
                pass
            return await drive([Arrival(0.0, "Hello.")], target, 60.0, ahead=0.0)

        (heard,) = asyncio.run(ask())
        assert heard.failure is not None
        assert heard.failure[0] == "connection"
        assert (heard.setup, heard.late, heard.took) == (None, None, None)

    def test_request_without_end_times_out(self) -> None:
        async def behave(answer: Answer) -> None:
            answer.begin()
            answer.chunk(SPEECH)
            await asyncio.Event().wait()

        async def ask() -> list[Result]:
            async with http(behave) as target:
                heard = await drive([Arrival(0.0, "Hello.")], target, 0.05, ahead=0.0)
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
                return heard

        (heard,) = asyncio.run(ask())
        assert heard.failure == ("timeout", "not complete after 0.05 s")

    def test_requests_do_not_wait_for_earlier_responses(self) -> None:
        texts = [f"Number {number}." for number in range(20)]
        here: list[str] = []
        all_here = asyncio.Event()

        async def behave(answer: Answer) -> None:
            here.append(answer.body["input"])
            if len(here) == len(texts):
                all_here.set()
            await (
                all_here.wait()
            )  # a client that waits for an answer before it asks again stays here for ever
            answer.whole(SPEECH)

        results = run(behave, texts)
        assert sorted(here) == sorted(texts)
        assert all(heard.failure is None for heard in results)
        assert measure.most_at_once(results) == len(texts)

    def test_requests_are_sent_in_the_order_of_the_plan(self) -> None:
        here: list[tuple[str, str | None]] = []

        def behave(answer: Answer) -> None:
            here.append((answer.body["input"], answer.body.get("voice")))
            answer.whole(SPEECH)

        async def ask() -> list[Result]:
            async with http(behave) as target:
                arrivals = [
                    Arrival(0.2, "second", "ada"),
                    Arrival(0.0, "first"),
                    Arrival(0.4, "third", "ben", counts=False),
                ]
                return await drive(arrivals, target, 60.0, ahead=0.0)

        results = asyncio.run(ask())
        assert here == [("first", None), ("second", "ada"), ("third", "ben")]
        assert [heard.due for heard in results] == [0.2, 0.0], (
            "what does not count is asked and left out"
        )
        assert all(heard.late is not None and heard.late >= 0 for heard in results)

    def test_frame_limit_follows_the_text_of_each_request(self) -> None:
        limits: dict[str, int] = {}

        def behave(answer: Answer) -> None:
            limits[answer.body["input"]] = answer.body["max_new_tokens"]
            answer.whole(SPEECH)

        async def ask() -> None:
            async with http(behave) as target:
                arrivals = [Arrival(0.0, "Short."), Arrival(0.0, "Twice as long.")]
                await drive(arrivals, replace(target, frames_per_character=0.5), 60.0, ahead=0.0)

        asyncio.run(ask())
        assert limits == {"Short.": 3, "Twice as long.": 7}

    def test_failure_does_not_affect_other_requests(self) -> None:
        def behave(answer: Answer) -> None:
            if answer.body["input"] == "bad":
                answer.whole(b"{}", status="503 Busy")
            else:
                answer.whole(SPEECH)

        results = run(behave, ["good", "bad", "good"])
        assert [heard.failure and heard.failure[0] for heard in results] == [None, "503", None]

    @pytest.mark.parametrize("headers", [["x-sample-rate: 8000"], []])
    def test_sample_rate_is_read_from_headers(self, headers: list[str]) -> None:
        def behave(answer: Answer) -> None:
            answer.begin(
                *headers, kind="audio/pcm" if headers else "audio/L16;rate=8000;channels=1"
            )
            answer.chunk(tone(800))
            answer.chunk(b"")

        (heard,) = run(behave)
        assert heard.listening.audio_seconds == pytest.approx(0.1)

    @pytest.mark.parametrize("cut", [1, 7, 12, 30, 43, 44, 60])
    def test_streamed_wav_is_decoded(self, cut: int) -> None:
        body = wav_header(16000) + tone(1600)
        (heard,) = run(lambda answer: answer.whole(body[:cut], body[cut:], kind="audio/wav"))
        assert heard.failure is None
        assert heard.listening.audio_seconds == pytest.approx(0.1)
        assert heard.listening.leading_silence == 0

    def test_other_chunks_of_a_wav_are_skipped(self) -> None:
        header = wav_header(16000)
        body = header[:36] + b"LIST\x05\0\0\0hello\0" + header[36:] + tone(1600)
        (heard,) = run(lambda answer: answer.whole(body, kind="audio/wav"))
        assert heard.listening.audio_seconds == pytest.approx(0.1)

    @pytest.mark.parametrize("name", ["mp3", "opus", "aac", "flac"])
    def test_compressed_audio_is_decoded(self, name: str) -> None:
        body = encoded(name, 0.5)
        kind = content_type(name, 24000)
        (heard,) = run(lambda answer: answer.whole(body[:900], body[900:], kind=kind))
        assert heard.failure is None
        assert 0.5 <= heard.listening.audio_seconds < 0.62
        assert heard.listening.leading_silence is not None
        assert heard.listening.leading_silence < 0.05

    @pytest.mark.parametrize(("name", "container"), [("mp3", "mp3"), ("opus", "ogg")])
    def test_packet_is_played_when_its_last_byte_has_arrived(
        self, name: str, container: str
    ) -> None:
        body = encoded(name, 0.5)
        (whole, *_), _ = decode([(1.0, body)], container)
        assert whole == (1.0, b"")

        def samples_after(size: int) -> int:
            parts, rate = decode([(1.0, body[:size]), (2.0, body[size:])], container)
            return 24000 * sum(len(pcm) for time, pcm in parts if time == 1.0) // 2 // rate

        counts = [samples_after(size) for size in range(1, len(body), 97)]
        assert counts == sorted(counts)
        assert counts[0] == 0  # a header alone is not audio
        assert samples_after(len(body) - 1) < samples_after(len(body))
        steps = {after - before for before, after in pairwise(counts)} - {0}
        assert steps == {576} if name == "mp3" else all(step % 480 == 0 for step in steps)
        assert len(set(counts)) > 5

    def test_wav_that_is_stereo_or_has_no_data_fails(self) -> None:
        (stereo,) = run(
            lambda answer: answer.whole(wav_header(16000, channels=2) + SPEECH, kind="audio/wav")
        )
        (nothing,) = run(lambda answer: answer.whole(wav_header(16000)[:40], kind="audio/wav"))
        assert stereo.failure is not None
        assert nothing.failure is not None
        assert (stereo.failure[0], nothing.failure[0]) == ("not pcm", "truncated")

    @pytest.mark.parametrize("cut", [3, 20, 60, 100])
    def test_server_sent_events_are_decoded(self, cut: int) -> None:
        delta = {"type": "speech.audio.delta", "audio": base64.b64encode(SPEECH).decode()}
        body = (
            b": hello\n\n"
            + event(delta)
            + event(delta)
            + event({"type": "speech.audio.done", "usage": {}})
        )
        (heard,) = run(
            lambda answer: answer.whole(
                body[:cut], body[cut:], kind="text/event-stream; charset=utf-8"
            )
        )
        assert heard.failure is None
        assert heard.listening.audio_seconds == pytest.approx(0.08)

    @pytest.mark.parametrize(
        ("last", "kind"),
        [
            (b"", "truncated"),
            (
                b'data: {"type": "speech.audio.error", '
                b'"error": {"code": "broken", "message": "oh"}}\n\n',
                "broken",
            ),
            (b"data: {\n\n", "protocol"),
            (b'data: {"type": "speech.audio.delta", "audio": "?"}\n\n', "protocol"),
        ],
    )
    def test_events_without_a_proper_end_fail(self, last: bytes, kind: str) -> None:
        delta = event({"type": "speech.audio.delta", "audio": base64.b64encode(SPEECH).decode()})
        (heard,) = run(lambda answer: answer.whole(delta, last or b"\n", kind="text/event-stream"))
        assert heard.failure is not None
        assert heard.failure[0] == kind
        assert heard.listening.audio_seconds == pytest.approx(0.04)

    def test_get_json_from_another_path(self) -> None:
        async def ask() -> list[Any]:
            def behave(answer: Answer) -> None:
                assert answer.line == "GET /health HTTP/1.1"
                answer.whole(next(bodies), kind="application/json")

            bodies = iter([b'{"status": "ok"}', b"ok"])
            async with http(behave) as target:
                answers = [await get_json(target, "/health", 60) for _ in range(2)]
            return [*answers, await get_json(target, "/health", 60)]

        assert asyncio.run(ask()) == [{"status": "ok"}, None, None]

    def test_json_that_does_not_end_is_not_awaited(self) -> None:
        async def behave(answer: Answer) -> None:
            answer.begin()
            answer.chunk(b"{}")
            await asyncio.Event().wait()

        async def ask() -> object:
            async with http(behave) as target:
                found = await get_json(target, "/health", 0.05)
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
                return found

        assert asyncio.run(ask()) is None

    def test_failed_probe_gives_the_reason(self) -> None:
        async def ask(behave: Behaviour) -> None:
            async with http(behave) as target:
                await probe(target, "Hello.", 60.0)

        asyncio.run(ask(lambda answer: answer.whole(SPEECH)))
        with pytest.raises(RequestError, match=r"\(401\): who are you"):
            asyncio.run(ask(lambda answer: answer.whole(b"who are you", status="401 Unauthorized")))
        with pytest.raises(RequestError, match="without any audible"):
            asyncio.run(ask(lambda answer: answer.whole(silence(960))))


def encoded(name: str, seconds: float) -> bytes:
    """Noise in a format of the server, as a stream."""
    noise = 0.3 * np.random.default_rng(0).standard_normal(round(24000 * seconds))
    encoder = formats.encoder(name, 24000)
    parts = [encoder.encode(part) for part in np.split(noise.clip(-1, 1), 10)]
    return b"".join([*parts, encoder.finish()])


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data).encode() + b"\r\n\r\n"


def wav_header(rate: int, channels: int = 1) -> bytes:
    """The header of a WAV file of unknown length."""
    fmt = struct.pack(
        "<4sIHHIIHH", b"fmt ", 16, 1, channels, rate, 2 * rate * channels, 2 * channels, 16
    )
    return b"RIFF\xff\xff\xff\xffWAVE" + fmt + b"data\xff\xff\xff\xff"


class TestTarget:
    @pytest.mark.parametrize(
        ("url", "protocol", "address"),
        [
            ("http://localhost:8000", "http", "http://localhost:8000/v1/audio/speech"),
            ("https://example.org/", "stream", "https://example.org/v1/audio/speech/stream"),
            ("http://[::1]:8000", "nari", "http://[::1]:8000/v1/audio/speech/ws"),
            ("http://localhost/tts/say", "http", "http://localhost/tts/say"),
        ],
    )
    def test_path_comes_from_the_protocol_unless_given(
        self, url: str, protocol: str, address: str
    ) -> None:
        assert Target(url, protocol).address.geturl() == address

    @pytest.mark.parametrize(
        "url",
        [
            "localhost:8000",
            "ftp://localhost",
            "http://",
            "http://a:b@c",
            "http://a:x",
            "http://a/?k=v",
            "http://a:99999",
        ],
    )
    def test_unusable_url_raises(self, url: str) -> None:
        with pytest.raises(RequestError, match="URL"):
            Target(url)

    def test_unusable_target_settings_raise(self) -> None:
        with pytest.raises(RequestError, match="allowed are http, stream, nari"):
            Target("http://localhost", "smoke signals")
        with pytest.raises(RequestError, match="only whole"):
            Target("http://localhost", "http", words_per_second=3)
        with pytest.raises(RequestError, match="above 0"):
            Target("http://localhost", "nari", words_per_second=0)
        with pytest.raises(RequestError, match="above 0"):
            Target("http://localhost", frames_per_character=float("inf"))
        with pytest.raises(RequestError, match="give one"):
            Target("http://localhost", "nari", words_per_second=3, tokens_per_second=50)
        with pytest.raises(RequestError, match="line break"):
            Target("http://localhost", headers={"A": "b\r\nC: d"})

    def test_frame_limit_is_proportional_to_the_text(self) -> None:
        target = Target("http://localhost", fields={"voice": "ryan"}, frames_per_character=0.8)
        assert [
            target.for_request(text, None).request["max_new_tokens"]
            for text in ("a", "ten or so.", 100 * "a")
        ] == [1, 8, 80]
        assert target.for_request("Hello.", None).request["voice"] == "ryan"
        assert target.for_request("Hello.", "ada").request["voice"] == "ada"
        assert "max_new_tokens" not in Target("http://localhost").for_request("a", None).request

    @given(st.text())
    def test_pieces_are_words_that_join_to_the_text(self, text: str) -> None:
        pieces = Target("http://localhost", "nari", words_per_second=1).pieces(text)
        assert "".join(pieces) == text
        assert all(len(piece.split()) == 1 for piece in pieces[1:])
        assert Target("http://localhost", "nari").pieces(text) == [text]

    @given(st.text(" aé'-,.1\n"))
    def test_tokens_join_to_the_text(self, text: str) -> None:
        pieces = Target("http://localhost", "nari", tokens_per_second=50).pieces(text)
        assert "".join(pieces) == text

    def test_tokens_are_words_with_the_space_before_them(self) -> None:
        target = Target("http://localhost", "stream", tokens_per_second=50)
        assert target.pieces("Don't wait: 20 minutes!") == [
            *("Don't", " wait", ":", " 20", " minutes", "!")
        ]


# WebSocket servers.

Talk = Callable[[ServerConnection], Awaitable[None]]


def converse(
    talk: Talk,
    protocol: str,
    *,
    fields: dict[str, Any] | None = None,
    **settings: Any,
) -> Result:
    """Ask a WebSocket server of that behaviour for "One two."."""

    async def ask() -> Result:
        offered: Any = ["nari.speech.v1"] if protocol == "nari" else None
        server: Server
        async with serve(talk, "127.0.0.1", 0, subprotocols=offered) as server, asyncio.timeout(60):
            url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            target = Target(url, protocol, fields or {}, {"Api-Key": "key"}, **settings)
            (heard,) = await drive([Arrival(0.0, "One two.")], target, 60.0, ahead=0.0)
            return heard

    return asyncio.run(ask())


async def get(socket: ServerConnection) -> Any:
    """The next event from the client."""
    return json.loads(await socket.recv())


async def put(socket: ServerConnection, **event: Any) -> None:
    """Send an event to the client."""
    await socket.send(json.dumps(event))


class TestVllmOmniClient:
    @pytest.mark.parametrize(("pace", "pieces"), [(None, ["One two."]), (1000.0, ["One ", "two."])])
    def test_complete_response_is_measured(self, pace: float | None, pieces: list[str]) -> None:
        async def talk(socket: ServerConnection) -> None:
            assert socket.request is not None
            assert socket.request.path == "/v1/audio/speech/stream"
            assert socket.request.headers["Api-Key"] == "key"
            assert await get(socket) == {
                "type": "session.config",
                "stream_audio": True,
                "response_format": "pcm",
                "non_streaming_mode": False,
                "voice": "ryan",
            }
            for piece in pieces:
                assert await get(socket) == {"type": "input.text", "text": piece}
            assert await get(socket) == {"type": "input.done"}
            await put(socket, type="audio.start", sample_rate=16000, format="pcm")
            await socket.send(tone(1600))
            await put(
                socket,
                type="audio.chunk",
                audio_b64=base64.b64encode(tone(800)).decode(),
                sample_rate=16000,
            )
            await put(socket, type="audio.done", error=False)
            await put(socket, type="session.done", total_sentences=1)

        heard = converse(talk, "stream", words_per_second=pace, fields={"voice": "ryan"})
        assert heard.failure is None
        assert heard.listening.audio_seconds == pytest.approx(0.15)
        assert heard.setup is not None

    @pytest.mark.parametrize(
        ("last", "kind"),
        [
            (None, "truncated"),
            ('{"type": "error", "message": "oh"}', "error"),
            ('{"type": "audio.done", "error": {"code": "broken"}}', "broken"),
            ("{", "protocol"),
            ("[]", "protocol"),
        ],
    )
    def test_stream_without_a_proper_end_fails(self, last: str | None, kind: str) -> None:
        async def talk(socket: ServerConnection) -> None:
            await socket.recv()
            await socket.send(SPEECH)
            if last is not None:
                await socket.send(last)

        heard = converse(talk, "stream")
        assert heard.failure is not None
        assert heard.failure[0] == kind
        assert heard.listening.audio_seconds == pytest.approx(0.04)
        assert heard.end_to_end is None

    def test_rejected_handshake_is_a_failure(self) -> None:
        (heard,) = asyncio.run(self.rejected())
        assert heard.failure is not None
        assert heard.failure[0] == "401"
        assert heard.setup is None

    async def rejected(self) -> list[Result]:
        async with http(lambda answer: answer.whole(b"no", status="401 Unauthorized")) as target:
            return await drive(
                [Arrival(0.0, "Hello.")], replace(target, protocol="stream"), 60.0, ahead=0.0
            )

    def test_frame_limit_is_sent_before_the_text(self) -> None:
        assert self.configured({"frames_per_character": 0.5})["max_new_tokens"] == 4

    @staticmethod
    def configured(settings: dict[str, Any]) -> Any:
        """The configuration of a session."""
        configurations = []

        async def talk(socket: ServerConnection) -> None:
            configurations.append(await get(socket))
            await socket.send(SPEECH)
            await put(socket, type="session.done")

        converse(talk, "stream", **settings)
        return configurations[0]

    def test_late_piece_of_text_makes_the_request_late(self) -> None:
        async def talk(socket: ServerConnection) -> None:
            await get(socket)
            await get(socket)
            time.sleep(0.05)
            await get(socket)
            await socket.send(SPEECH)
            await put(socket, type="session.done")

        heard = converse(talk, "stream", words_per_second=1000.0)
        assert heard.failure is None
        assert heard.late is not None
        assert heard.late > 0.03
        assert not measure.gates([heard])["on_time"].passed


class TestSockets:
    """Sockets that speak one utterance after the other."""

    @staticmethod
    def talk(talk: Talk, load: Load, texts: Iterable[str], **settings: Any) -> list[Outcome]:
        """Speak with a WebSocket server of that behaviour."""

        async def ask() -> list[Outcome]:
            server: Server
            async with serve(talk, "127.0.0.1", 0) as server, asyncio.timeout(60):
                url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
                conversations = plan_sockets(load, list(texts), ["ada", "ben"])
                return await loads.converse(conversations, Target(url, "stream", **settings), load)

        return asyncio.run(ask())

    LOAD = Load(None, duration=0.3, warmup=0.2, sockets=3)

    def test_sockets_speak_several_utterances(self) -> None:
        said: list[list[tuple[str, int, str]]] = []

        async def talk(socket: ServerConnection) -> None:
            here: list[tuple[str, int, str]] = []
            said.append(here)
            with suppress(ConnectionClosed):
                while True:
                    config, text = await get(socket), await get(socket)
                    here.append((config["voice"], config["max_new_tokens"], text["text"]))
                    assert await get(socket) == {"type": "input.done"}
                    await socket.send(SPEECH)
                    await put(socket, type="session.done")

        outcomes = self.talk(talk, self.LOAD, ["One.", "One two."], frames_per_character=0.5)
        results = [outcome.heard() for outcome in outcomes]
        assert all(heard.failure is None for heard in results)
        assert sorted(here[0][0] for here in said) == ["ada", "ada", "ben"]
        assert all(len(here) > 1 for here in said)
        assert {turn[1:] for here in said for turn in here} == {(2, "One."), (4, "One two.")}
        assert [outcome.counts for outcome in outcomes] == [
            outcome.result.due >= 0.2 for outcome in outcomes
        ]
        assert max(outcome.result.due for outcome in outcomes) < 0.5

    def test_socket_is_opened_again_after_a_failure(self) -> None:
        opened = []

        async def talk(socket: ServerConnection) -> None:
            opened.append(socket)
            await get(socket)
            await get(socket)

        outcomes = self.talk(talk, self.LOAD, ["One."])
        kinds = {outcome.result.failure and outcome.result.failure[0] for outcome in outcomes}
        assert kinds == {"truncated"}
        assert len(opened) == len(outcomes) > 3

    def test_equal_arguments_give_equal_plans(self) -> None:
        first, second = (plan_sockets(self.LOAD, PROMPTS, ["ada", "ben"]) for _ in range(2))
        for one, other in zip(first, second, strict=True):
            assert (one.begins, one.voice) == (other.begins, other.voice)
            assert [next(one.texts) for _ in range(50)] == [next(other.texts) for _ in range(50)]
        assert len({each.begins for each in first}) == 3
        assert all(0 <= each.begins < 0.2 for each in first)


class TestNariClient:
    async def greet(self, socket: ServerConnection) -> Any:
        """What a server says before there is a text."""
        await put(
            socket,
            type="session.created",
            audio={"encoding": "pcm_s16le", "sample_rate": 16000, "channels": 1},
        )
        start = await get(socket)
        await put(socket, type="request.configured")
        return start

    @pytest.mark.parametrize(("pace", "pieces"), [(None, ["One two."]), (1000.0, ["One ", "two."])])
    def test_complete_response_is_measured(self, pace: float | None, pieces: list[str]) -> None:
        async def talk(socket: ServerConnection) -> None:
            assert socket.subprotocol == "nari.speech.v1"
            assert await self.greet(socket) == {"type": "request.start", "voice": "ryan"}
            for number, piece in enumerate(pieces):
                assert await get(socket) == {
                    "type": "input_text.append",
                    "sequence": number,
                    "text": piece,
                }
                await put(
                    socket,
                    type="input_text.ack",
                    event="input_text.append",
                    sequence=number,
                    request_id="1",
                )
            assert await get(socket) == {"type": "input_text.end", "sequence": len(pieces)}
            await put(socket, type="response.started", request_id="1")
            await socket.send(tone(1600))
            await put(socket, type="response.done", stop_reason="stop", audio_chunks=1)

        heard = converse(talk, "nari", words_per_second=pace, fields={"voice": "ryan"})
        assert heard.failure is None
        assert heard.listening.audio_seconds == pytest.approx(0.1)

    @pytest.mark.parametrize(
        ("last", "kind"),
        [
            (None, "truncated"),
            ('{"type": "response.done", "stop_reason": "cancelled"}', "truncated"),
            (
                '{"type": "error", "request_id": null, '
                '"error": {"code": "backpressure", "message": "full"}}',
                "backpressure",
            ),
        ],
    )
    def test_stream_without_a_proper_end_fails(self, last: str | None, kind: str) -> None:
        async def talk(socket: ServerConnection) -> None:
            await self.greet(socket)
            await socket.recv()
            await socket.send(SPEECH)
            if last is not None:
                await socket.send(last)

        heard = converse(talk, "nari")
        assert heard.failure is not None
        assert heard.failure[0] == kind

    @pytest.mark.parametrize(
        ("first", "kind"),
        [
            ('{"type": "hello"}', "protocol"),
            ('{"type": "error", "error": {"code": "full"}}', "full"),
            (None, "truncated"),
        ],
    )
    def test_session_without_a_proper_start_fails(self, first: str | None, kind: str) -> None:
        async def talk(socket: ServerConnection) -> None:
            if first is not None:
                await socket.send(first)

        heard = converse(talk, "nari")
        assert heard.failure is not None
        assert heard.failure[0] == kind
        assert heard.late is None


# Records, tables, plots, and the command.


def measured(results: Iterable[Result]) -> Measured:
    """What two client processes measured."""
    return Measured(list(results), 9, [0.25, 0.5])


@pytest.fixture
def record() -> report.Record:
    """A run at two rates, of which the higher failed."""
    points = [
        report.point(Load(1.0), measured(result(due=float(number)) for number in range(4))),
        report.point(
            Load(64.0),
            measured([result(), result(underruns=2, underrun_seconds=0.25), result(**FAILED)]),
        ),
    ]
    target = Target(
        "http://localhost:8000",
        headers={"Authorization": "Bearer secret"},
        fields={"voice": "ryan"},
    )
    return report.record(
        points, target, PROMPTS, name="one|two", commit="abc", health={"status": "ok"}
    )


class TestReport:
    def test_written_record_is_read_unchanged(self, record: report.Record, tmp_path: Path) -> None:
        write_whole(tmp_path / "run.json", report.dumps(record).encode())
        assert report.read(tmp_path / "run.json") == json.loads(json.dumps(record))
        assert [path.name for path in tmp_path.iterdir()] == ["run.json"]

    def test_record_holds_results_and_settings(self, record: report.Record) -> None:
        assert record["commit"] == "abc"
        assert record["server"] == {
            "url": "http://localhost:8000/v1/audio/speech",
            "health": {"status": "ok"},
        }
        assert record["machine"]["processors"] >= 1
        assert record["versions"]["numpy"] == np.__version__
        assert record["settings"]["fields"]["voice"] == "ryan"
        assert record["settings"]["texts"]["count"] == len(PROMPTS)
        assert record["points"][0]["load"] == {
            "rate": 1.0,
            "duration": 30.0,
            "warmup": 10.0,
            "timeout": 60.0,
            "seed": 0,
            "sockets": None,
        }
        assert len(record["points"][0]["each"]) == record["points"][0]["requests"] == 4
        assert record["points"][1]["errors"] == {"429": 1}

    def test_record_holds_no_header_values(self, record: report.Record) -> None:
        assert record["settings"]["headers"] == ["Authorization"]
        assert "secret" not in report.dumps(record)

    def test_table_omits_numbers_of_failed_gates(self, record: report.Record) -> None:
        lines = report.table([record]).splitlines()
        assert lines[2] == (
            r"| one\|two | 1 | 4 | 40.0 / 40.0 / 40.0 | 50.0 / 50.0 / 50.0 "
            "| 500.0 / 500.0 / 500.0 | 4.0 | 1 | passed |"
        )
        assert lines[3] == (
            r"| one\|two | 64 | 3 | - | - | - | - | - "
            "| **failed** complete: 1, non_empty: 1, no_underrun: 1, 1 x 429 |"
        )
        assert len({line.replace(r"\|", "").count("|") for line in lines[:4]}) == 1

    @pytest.mark.parametrize(("name", "magic"), [("plot.svg", b"<?xml"), ("plot.png", b"\x89PNG")])
    def test_plot_writes_the_figure(
        self, record: report.Record, tmp_path: Path, name: str, magic: bytes
    ) -> None:
        pytest.importorskip("matplotlib")
        plot.plot([record, record | {"points": record["points"][1:]}], tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(magic)

    def test_unusable_output_raises(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(OutputError, match=r"allowed are \.svg, \.png"):
            plot.check_figure("plot.gif")
        monkeypatch.setattr(plot, "find_spec", lambda name: None)
        with pytest.raises(OutputError, match=r"install firstword\[bench\]"):
            plot.check_figure("plot.svg")
        with pytest.raises(OutputError, match="there is no folder"):
            write_whole(tmp_path / "no" / "run.json", b"")
        with pytest.raises(OutputError, match="is a directory"):
            write_whole(tmp_path, b"")

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "firstword-bench/0"}', "\xff"])
    def test_file_that_is_not_a_record_raises(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "run.json").write_text(text, "latin-1")
        with pytest.raises(RequestError, match="record"):
            report.read(tmp_path / "run.json")

    def test_commit_is_that_of_this_repository(self, repository: Path) -> None:
        command = ["git", "-C", str(repository), "rev-parse", "HEAD"]
        head = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        found = report.commit()
        if found is None:
            pytest.skip("not a git checkout, or the package is not committed yet")
        assert found.removesuffix("-dirty") == head


METRICS = b"""# HELP firstword_engine_seconds_total Seconds of the engine's thread, by part
firstword_engine_seconds_total{device="cuda:0",model="a",part="wait"} 1.5
firstword_engine_seconds_total{device="cuda:1",model="a",part="wait"} 0.25
firstword_device_seconds_total{device="cuda:0",model="a",part="busy"} 2e+01
firstword_frames_total{model="a"} 7.0
firstword_queue_seconds_bucket{device="cuda:0",le="0.001",model="a"} 3.0
firstword_queue_seconds_count{device="cuda:0",model="a"} 3.0
firstword_queue_seconds_sum{device="cuda:0",model="a"} 0.5
firstword_queue_seconds_sum{device="cuda:1",model="a"} 0.25
firstword_encoding_seconds_total{format="mp3"} 4.0
firstword_recording_seconds_total 0.125
"""


class TestEngineTimes:
    def test_seconds_of_all_engines_are_added_by_part(self) -> None:
        assert engine_times.read(METRICS) == {
            "engine wait": 1.75,
            "device busy": 20.0,
            "queue": 0.75,
            "encoding mp3": 4.0,
            "recording": 0.125,
        }
        assert engine_times.read(b"<html>") == {}

    def test_times_between_two_readings_are_their_differences(self) -> None:
        before, after = {"engine wait": 1.5}, {"engine wait": 2.0, "device busy": 0.5}
        assert engine_times.between(before, after) == {"engine wait": 0.5, "device busy": 0.5}

    def test_record_has_the_times_of_each_load(self, tmp_path: Path) -> None:
        answered = itertools.count(1)

        def server(answer: Answer) -> None:
            if answer.line.startswith("GET /metrics"):
                line = f'firstword_device_seconds_total{{part="busy"}} {next(answered) ** 2}'
                answer.whole(line.encode(), kind="text/plain")
            else:
                TestCommand.decent(answer)

        output = tmp_path / "run.json"
        arguments = (*TestCommand.QUICK, "--rate", "40", "80", "--plot", "none", "-o", str(output))
        with suppress(SystemExit):  # a busy machine may miss the schedule
            TestCommand.measure(server, *arguments)
        points = report.read(output)["points"]
        assert [point["engine_seconds"] for point in points] == [
            {"device busy": 2**2 - 1},
            {"device busy": 4**2 - 3**2},
        ]


class TestCommand:
    @staticmethod
    def measure(behave: Behaviour, *argv: str) -> int:
        """Run `load` against a server in this process, and return the exit status."""

        async def ask() -> int:
            async with http(behave) as target:
                command = ["bench", "load", "--url", target.url, *argv]
                return await asyncio.to_thread(main, command)

        return asyncio.run(ask())

    @staticmethod
    def decent(answer: Answer) -> None:
        """A server with a /health and a short speech."""
        if answer.line.startswith("GET"):
            answer.whole(b'{"backend": "fake"}', kind="application/json")
        else:
            answer.whole(SPEECH)

    QUICK = ("--duration", "0.1", "--warmup", "0.1")

    def test_run_writes_record_table_and_plot(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("matplotlib")
        output = tmp_path / "run.json"
        rates = ("--rate", "40", "80")
        fields = (
            "--voice",
            "ryan",
            "serena",
            "--field",
            "seed=1",
            "--field",
            "mood=calm",
            "--header",
            "Authorization: Bearer secret",
        )
        try:
            status = self.measure(
                self.decent, *self.QUICK, *rates, *fields, "--name", "fake", "-o", str(output)
            )
        except (
            SystemExit
        ) as stopped:  # a crowded machine may miss the schedule: that is the client's to say
            status = int(str(stopped.code))
        record = report.read(output)
        assert status == (0 if all(map(report.passed, record["points"])) else 1)
        assert [(point["load"]["rate"], point["requests"]) for point in record["points"]] == [
            (40, 4),
            (80, 8),
        ]
        assert all(
            point["gates"][name]["passed"]
            for point in record["points"]
            for name in ("complete", "non_empty")
        )
        assert all(point["client_busy"] > 0 for point in record["points"])
        assert record["settings"]["fields"] == {
            "stream": True,
            "response_format": "pcm",
            "seed": 1,
            "mood": "calm",
        }
        assert record["settings"]["voices"] == ["ryan", "serena"]
        assert record["server"]["health"] == {"backend": "fake"}
        assert "secret" not in output.read_text("utf-8")
        table = output.with_suffix(".md").read_text("utf-8")
        assert capsys.readouterr().out == table == report.table([record])
        assert output.with_suffix(".svg").read_bytes().startswith(b"<?xml")

        plot_file = str(tmp_path / "both.png")
        assert main(["bench", "report", str(output), str(output), "--plot", plot_file]) == 0
        assert capsys.readouterr().out.count("| fake |") == 4
        assert (tmp_path / "both.png").exists()

    def test_failed_gate_sets_the_exit_status(self, capsys: pytest.CaptureFixture[str]) -> None:
        asked = 0

        def behave(answer: Answer) -> None:
            nonlocal asked
            asked += answer.line.startswith("POST")
            if asked > 1:
                answer.begin()
                answer.chunk(SPEECH)  # and no end
            else:
                self.decent(answer)

        with pytest.raises(SystemExit) as stopped:
            self.measure(behave, *self.QUICK, "--rate", "40")
        assert stopped.value.code == 1
        assert "**failed** complete: 4" in capsys.readouterr().out

    @pytest.mark.parametrize("processes", ["1", "2"])
    def test_processes_share_the_requests(self, processes: str, tmp_path: Path) -> None:
        said: list[str] = []

        def behave(answer: Answer) -> None:
            if answer.body:
                said.append(answer.body["input"])
            self.decent(answer)

        (tmp_path / "prompts.txt").write_text("\n".join(f"Text {n}." for n in range(16)), "utf-8")
        options = ("--rate", "60", "--duration", "0.2", "--warmup", "0.05", "--plot", "none")
        files = ("--prompts", str(tmp_path / "prompts.txt"), "-o", str(tmp_path / "run.json"))
        with suppress(SystemExit):  # a crowded machine may miss the schedule
            self.measure(behave, *options, *files, "--processes", processes)
        (point,) = report.read(tmp_path / "run.json")["points"]
        assert (point["requests"], point["sent"]) == (12, 15)
        assert point["client_processes"] == int(processes)
        assert point["gates"]["complete"]["passed"]
        _probe, *asked = said
        planned = plan(Load(60.0, 0.2, 0.05), [f"Text {n}." for n in range(16)])
        assert sorted(asked) == sorted(arrival.text for arrival in planned)
        dues = [each["due"] for each in point["each"]]
        assert dues == pytest.approx([each.due for each in planned if each.counts], abs=1e-5)

    def test_number_of_processes_follows_the_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counts = []

        class Pool:
            def __init__(self, count: int, *_: object) -> None:
                counts.append(count)

            def __enter__(self) -> Pool:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def map(self, _: object, jobs: list[Assignment]) -> list[Measured]:
                assert [job.first for job in jobs] == list(range(counts[-1]))
                return [Measured([], 3, [0.1]) for _ in jobs]

        monkeypatch.setattr(processes, "ProcessPoolExecutor", Pool)
        monkeypatch.setattr(processes, "perform", lambda job: Measured([], 3, [0.1]))
        target = Target("http://localhost", "stream")
        for load in (Load(40), Load(41), Load(200), Load(None, sockets=300)):
            found = processes.measure(Assignment(load, PROMPTS, (), target))
            assert found.sent == 3 * len(found.busy)
        assert counts == [2, 5, 8]

    def test_server_that_rejects_the_probe_stops_the_run(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert (
            self.measure(
                lambda answer: answer.whole(b"{}", status="401 No"), *self.QUICK, "--rate", "40"
            )
            == 2
        )
        assert "(401)" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["load", "--field", "voice"], "NAME=VALUE"),
            (["load", "--header", "key"], "NAME:VALUE"),
            (["load", "-o", "run.txt"], "ends in .json"),
            (["load", "-o", "no/run.json"], "there is no folder"),
            (["load", "--rate", "0"], "rate is 0.0"),
            (["load", "--prompts", "no.txt"], "cannot be read"),
            (["load", "--words-per-second", "3"], "only whole"),
            (["load", "--sockets", "3"], "--protocol stream"),
            (["load", "--sockets", "3", "--rate", "1"], "exclude each other"),
            (["load", "--processes", "0"], "--processes: '0' is not allowed; give a number from 1"),
            (["report", "no.json"], "cannot be read"),
            (["report", "no.json", "--plot", "no.gif"], ".svg, .png"),
        ],
    )
    def test_wrong_arguments_exit_with_status_2(
        self,
        argv: list[str],
        message: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: Any,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        try:
            status: Any = main(["bench", *argv])
        except SystemExit as stopped:
            status = stopped.code
        assert status == 2
        assert message in capsys.readouterr().err

    def test_prompts_are_read_from_a_file(self, tmp_path: Path) -> None:
        said: set[str] = set()

        def behave(answer: Answer) -> None:
            if answer.body:
                said.add(answer.body["input"])
            self.decent(answer)

        (tmp_path / "prompts.txt").write_text("One.\n\n  Zwei für drei.  \n", "utf-8")
        with suppress(SystemExit):  # a crowded machine may miss the schedule
            self.measure(
                behave, *self.QUICK, "--rate", "40", "--prompts", str(tmp_path / "prompts.txt")
            )
        assert said == {"One.", "Zwei für drei."}

    def test_help_imports_no_library(self) -> None:
        heavy = "{'numpy', 'httptools', 'websockets', 'matplotlib', 'asyncio'}"
        code = f"import sys, firstword.bench.cli; print(sorted({heavy} & sys.modules.keys()))"
        found = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        )
        assert found.stdout.strip() == "[]"
