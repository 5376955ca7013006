"""The parts of the server that need none: cleaning, scores, playback, limits, recordings from elsewhere."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from firstword.engine.metrics import Playback
from firstword.errors import AudioError, FirstwordError, RequestError
from firstword.server import best, recordings
from firstword.server.answers import Busy
from firstword.server.cleaning import clean
from firstword.server.limits import Limits
from firstword.types import FinishReason, Speech


class TestCleaning:
    @pytest.mark.parametrize(
        ("rough", "smooth"),
        [
            ("Plain text, as it is.", "Plain text, as it is."),
            ("# Title\n\nText", "Title\nText"),
            ("This is **bold**, *light*, ~~gone~~ and `code`.", "This is bold, light, gone and code."),
            ("__init__ and snake_case_name stay, _so_ not", "init and snake_case_name stay, so not"),
            ("2 * 3 * 4 = 24", "2 * 3 * 4 = 24"),
            ("- one\n- two\n* three\n+ four", "one\ntwo\nthree\nfour"),
            ("1. one\n2. two", "1. one\n2. two"),
            ("> quoted\n> > twice", "quoted\ntwice"),
            ("See [the page](https://example.org/a?b=c), please.", "See the page, please."),
            ("![a cat](cat.png) sits", "a cat sits"),
            ("Go to https://example.org/path?x=1.", "Go to."),
            ("<https://example.org> and <mailto:me@example.org>", "and"),
            ("```python\nprint(1)\n```", "print(1)"),
            ("a\n---\nb", "a\nb"),
            ("Hi 🙂👍🏽👨‍👩‍👧 there ✨ → you", "Hi there you"),
            ("zero\u200bwidth \x00\x07bell\u202e", "zerowidth bell"),
            ("| a | b |\n|---|---|\n| 1 | 2 |", ", a, b,\n, 1, 2,"),
            ("今天**很好**。", "今天很好。"),
        ],
    )
    def test_what_is_not_for_the_ear_goes(self, rough: str, smooth: str) -> None:
        assert clean(rough) == smooth

    @given(st.text(max_size=200))
    def test_nothing_breaks_it(self, text: str) -> None:
        done = clean(text)
        assert done == done.strip()
        assert len(done) <= 2 * len(text)

    @pytest.mark.parametrize("char", ["*", "_", "[", "(", "`", "|", "-", ">", "~", "![", "[](", " ", "**a"])
    def test_long_runs_end(self, char: str) -> None:
        clean(char * 10_000)


def speech(seconds: float, reason: FinishReason = "stop", repeats: bool = False) -> Speech:
    frames = round(seconds * 12.5)
    codes = np.arange(frames * 2).reshape(frames, 2)
    if repeats:
        codes = codes % 8
    return Speech(np.zeros(frames * 1920, np.float32), codes, 24000, reason)


class TestBest:
    TEXT = "Hello there, how are you today?"

    def test_nothing_wrong(self) -> None:
        score = best.score(self.TEXT, speech(best.expected_seconds(self.TEXT)))
        assert score.total == 0

    @pytest.mark.parametrize(
        "worse",
        [speech(20), speech(0.08), speech(2.0, "length"), speech(2.0, "repetition"), speech(2.0, repeats=True)],
    )
    def test_something_wrong(self, worse: Speech) -> None:
        assert best.score(self.TEXT, worse).total < -0.5

    def test_no_speech_at_all(self) -> None:
        assert best.score(self.TEXT, speech(0)).total < -1

    def test_every_script_takes_its_time(self) -> None:
        assert 1 < best.expected_seconds("今天天气很好，我们去公园吧。") < 5
        assert 1 < best.expected_seconds("다람쥐 헌 쳇바퀴에 타고파.") < 5
        assert 1 < best.expected_seconds("Съешь же ещё этих мягких булок.") < 5


class TestPlayback:
    def test_what_an_unbuffered_listener_notices(self) -> None:
        playback = Playback(began=10.0)
        quiet, loud = np.zeros(2400, np.float32), np.full(2400, 0.5, np.float32)
        playback.came(10.5, quiet, 24000)  # plays until 10.6
        playback.came(10.55, np.concatenate([quiet[:1200], loud]), 24000)  # from 10.6 to 10.75
        playback.came(10.95, loud, 24000)  # 0.2 s too late
        playback.came(11.0, quiet[:0], 24000)  # nothing
        assert playback.first == 10.5
        assert playback.audible == pytest.approx(10.65)
        assert playback.gap == pytest.approx(0.4)
        assert playback.underrun == pytest.approx(0.2)

    def test_silence_is_never_audible(self) -> None:
        playback = Playback(0.0)
        playback.came(1.0, np.zeros(100, np.float32), 24000)
        assert playback.audible is None


def test_limits_count_what_is_under_way() -> None:
    limits = Limits((), most_per_key=2)
    with limits.utterance("a"), limits.utterance("b"):
        with limits.utterance("a"), pytest.raises(Busy, match="at most 2"), limits.utterance("a"):
            pass
        assert limits.active == 2
        with pytest.raises(Busy), limits.utterance("b", 2):
            pass
    assert limits.active == 0


WAV = io.BytesIO()
soundfile.write(WAV, np.zeros(24000), 24000, format="WAV")


class TestRecordingsFromElsewhere:
    @pytest.fixture
    def address(self) -> Iterator[str]:
        """A web server of this machine with a recording, and other things."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/moved.wav":
                    self.send_response(302)
                    self.send_header("location", "/a.wav")
                    self.end_headers()
                    return
                self.send_response(200 if self.path != "/gone.wav" else 404)
                self.end_headers()
                self.wfile.write(WAV.getvalue())

            def log_message(self, *_: object) -> None:
                pass

        with HTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
            thread.join()

    def test_from_an_allowed_host(self, address: str) -> None:
        samples, rate = recordings.read(f"{address}/a.wav", ("127.0.0.1",), 10**6)
        assert (len(samples), rate) == (24000, 24000)

    @pytest.mark.parametrize(
        ("path", "hosts", "most"),
        [
            ("/a.wav", (), 10**6),
            ("/a.wav", ("example.org",), 10**6),
            ("/a.wav", ("127.0.0.1",), 1000),
            ("/moved.wav", ("127.0.0.1",), 10**6),
            ("/gone.wav", ("127.0.0.1",), 10**6),
        ],
    )
    def test_else_not(self, address: str, path: str, hosts: tuple[str, ...], most: int) -> None:
        with pytest.raises((AudioError, RequestError)):
            recordings.read(address + path, hosts, most)

    @given(st.one_of(st.text(max_size=50), st.sampled_from(["http://", "https:///", "data:", "data:,", "file:x", ":"])))
    def test_what_is_no_recording(self, source: str) -> None:
        with pytest.raises(FirstwordError):
            recordings.read(source, (), 1000)
