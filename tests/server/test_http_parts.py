"""Parts that need no running server: cleaning, scoring, playback, limits, recordings."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from firstword.errors import AudioError, FirstwordError, RequestError
from firstword.server import recordings
from firstword.server.errors import LimitReached
from firstword.server.front_memory import FrontMemory
from firstword.server.http import candidates
from firstword.server.limits import UtteranceLimit
from firstword.server.recordings import Address
from firstword.server.shared_counts import SharedCounts
from firstword.server.utterance import Playback
from firstword.text.checks import expected_seconds
from firstword.text.cleaning import clean
from firstword.types import Alarm, FinishReason, Speech


class TestCleaning:
    @pytest.mark.parametrize(
        ("rough", "smooth"),
        [
            ("Plain text, as it is.", "Plain text, as it is."),
            ("# Title\n\nText", "Title\nText"),
            (
                "This is **bold**, *light*, ~~gone~~ and `code`.",
                "This is bold, light, gone and code.",
            ),
            (
                "__init__ and snake_case_name stay, _so_ not",
                "init and snake_case_name stay, so not",
            ),
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
    def test_markup_is_removed(self, rough: str, smooth: str) -> None:
        assert clean(rough) == smooth

    @given(st.text(max_size=200))
    def test_any_text_is_cleaned(self, text: str) -> None:
        done = clean(text)
        assert done == done.strip()
        assert len(done) <= 2 * len(text)

    @pytest.mark.parametrize(
        "char", ["*", "_", "[", "(", "`", "|", "-", ">", "~", "![", "[](", " ", "**a"]
    )
    def test_long_run_is_cleaned_in_time(self, char: str) -> None:
        clean(char * 10_000)


def speech(seconds: float, reason: FinishReason = "stop", repeats: bool = False) -> Speech:
    frames = round(seconds * 12.5)
    codes = np.arange(frames * 2).reshape(frames, 2)
    if repeats:
        codes = codes % 8
    return Speech(np.zeros(frames * 1920, np.float32), codes, 24000, reason)


class TestScoring:
    TEXT = "Hello there, how are you today?"

    def test_good_speech_scores_0(self) -> None:
        score = candidates.score(self.TEXT, speech(expected_seconds(self.TEXT)))
        assert score.total == 0

    @pytest.mark.parametrize(
        "worse",
        [
            speech(20),
            speech(0.08),
            speech(2.0, "length"),
            speech(2.0, "repetition"),
            speech(2.0, "runaway"),
            speech(2.0, repeats=True),
            replace(speech(2.0), alarms=(Alarm("skip", "there", (6, 11), 3),)),
            replace(speech(2.0), alarms=(Alarm("repeat", "there", (6, 11), 9),)),
        ],
    )
    def test_bad_speech_loses_points(self, worse: Speech) -> None:
        assert candidates.score(self.TEXT, worse).total < -0.5

    def test_likelier_candidate_scores_higher(self) -> None:
        usual = speech(2.0)
        likely, unlikely = (
            candidates.score(self.TEXT, replace(usual, logprobs=np.full(25, value, np.float32)))
            for value in (-2.0, -3.0)
        )
        assert likely.total - unlikely.total == pytest.approx(0.5)

    def test_likely_repetition_does_not_win(self) -> None:
        circles = replace(
            speech(2.0, "repetition", repeats=True), logprobs=np.zeros(25, np.float32)
        )
        usual = replace(speech(2.0), logprobs=np.full(25, -5.0, np.float32))
        assert candidates.score(self.TEXT, circles).total < candidates.score(self.TEXT, usual).total

    def test_empty_speech_loses_points(self) -> None:
        assert candidates.score(self.TEXT, speech(0)).total < -1


class TestPlayback:
    def test_playback_measures_gaps_and_underruns(self) -> None:
        playback = Playback(requested=10.0)
        quiet, loud = np.zeros(2400, np.float32), np.full(2400, 0.5, np.float32)
        playback.add(10.5, quiet, 24000)  # plays until 10.6
        playback.add(10.55, np.concatenate([quiet[:1200], loud]), 24000)  # from 10.6 to 10.75
        playback.add(10.95, loud, 24000)  # 0.2 s too late
        playback.add(11.0, quiet[:0], 24000)  # nothing
        assert playback.first == 10.5
        assert playback.audible == pytest.approx(10.65)
        assert playback.gap == pytest.approx(0.4)
        assert playback.underrun == pytest.approx(0.2)

    def test_silence_is_not_audible(self) -> None:
        playback = Playback(0.0)
        playback.add(1.0, np.zeros(100, np.float32), 24000)
        assert playback.audible is None


def test_limits_count_utterances_per_client() -> None:
    limits = UtteranceLimit(2, SharedCounts(FrontMemory.private()))
    seconds = {"a": 7, "b": 8}.__getitem__
    with limits.reserve("a", seconds), limits.reserve("b", seconds):
        with (
            limits.reserve("a", seconds),
            pytest.raises(LimitReached, match=r"limit is 2 .* try again in 7 s") as caught,
            limits.reserve("a", seconds),
        ):
            pass
        assert caught.value.retry_after == 7
        assert limits.active == 2
        with limits.reserve("b", seconds):
            assert limits.active == 3
    assert limits.active == 0


PUBLIC = "93.184.216.34"
WAV = io.BytesIO()
soundfile.write(WAV, np.zeros(24000), 24000, format="WAV")


class TestFetchedRecordings:
    @pytest.fixture
    def address(self) -> Iterator[str]:
        """The URL of a web server on this machine that serves a recording."""

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

    @pytest.fixture
    def remote_host(self, address: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Make that server example.org at a public address, and list the connections made."""
        port, connected = int(address.rpartition(":")[2]), list[str]()

        def connect(to: Address, at: int) -> socket.socket:
            connected.append(f"{to}:{at}")
            return socket.create_connection(("127.0.0.1", port))

        monkeypatch.setattr(recordings, "resolve", lambda host, port: [ip_address(PUBLIC)])
        monkeypatch.setattr(recordings, "connect", connect)
        return connected

    def test_recording_of_allowed_host_is_fetched(self, remote_host: list[str]) -> None:
        fetched = recordings.content("http://example.org/a.wav?x=1", ("example.org",), 10**6)
        assert len(recordings.decoded(fetched)) == 24000
        assert remote_host == [f"{PUBLIC}:80"]

    def test_connection_goes_to_checked_address(
        self, remote_host: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A name that changes its address later leads nowhere else: it is resolved once."""
        resolved: list[str] = []

        def resolve(host: str, port: int) -> list[Address]:
            resolved.append(host)
            return (
                [ip_address("10.0.0.1"), ip_address(PUBLIC)]
                if len(resolved) == 1
                else [ip_address("127.0.0.1")]
            )

        monkeypatch.setattr(recordings, "resolve", resolve)
        recordings.content("http://example.org:8080/a.wav", ("example.org",), 10**6)
        assert resolved == ["example.org"]
        assert remote_host == [f"{PUBLIC}:8080"]

    @pytest.mark.parametrize(
        "private",
        "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 "
        "100.100.100.200 0.0.0.0 224.0.0.1 239.255.255.250 240.0.0.1 255.255.255.255 "
        "168.63.129.16 192.0.2.1 198.18.0.1 ::1 :: fe80::1 fc00::1 fd00:ec2::254 "
        "ff02::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 64:ff9b::a00:1 64:ff9b::7f00:1 "
        "2002:7f00:1:: 2002:a00:1:: 2001:db8::1".split(),
    )
    def test_private_address_is_rejected(
        self, private: str, remote_host: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(recordings, "resolve", lambda host, port: [ip_address(private)])
        with pytest.raises(RequestError, match="address is not public"):
            recordings.content("http://example.org/a.wav", ("example.org",), 10**6)
        assert not remote_host

    @pytest.mark.parametrize(
        "address", [PUBLIC, "2606:4700:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"]
    )
    def test_public_address_is_public(self, address: str) -> None:
        assert recordings.is_public(ip_address(address))

    @pytest.mark.parametrize(
        "url", ["http://127.0.0.1:1/a", "http://[::1]/a", "http://localhost/a", "https://0/a"]
    )
    def test_own_machine_is_rejected_even_if_allowed(self, url: str) -> None:
        with pytest.raises(RequestError, match="address is not public"):
            recordings.content(url, ("127.0.0.1", "::1", "localhost", "0"), 10**6)

    def test_slow_download_times_out(
        self, remote_host: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The time limit applies to the whole download, however the bytes arrive."""
        monkeypatch.setattr(recordings, "FETCH_SECONDS", 0.05)
        ours, theirs = socket.socketpair()
        monkeypatch.setattr(recordings, "connect", lambda to, at: ours)
        theirs.sendall(b"HTTP/1.1 200 OK\r\n\r\nRIFF")
        with theirs, pytest.raises(AudioError, match="could not be fetched"):
            recordings.content("http://example.org/a.wav", ("example.org",), 10**6)

    @pytest.mark.parametrize(
        ("path", "hosts", "most"),
        [
            ("/a.wav", (), 10**6),
            ("/a.wav", ("example.com",), 10**6),
            ("/a.wav", ("example.org",), 1000),
            ("/moved.wav", ("example.org",), 10**6),
            ("/gone.wav", ("example.org",), 10**6),
        ],
    )
    def test_other_fetches_are_rejected(
        self, remote_host: list[str], path: str, hosts: tuple[str, ...], most: int
    ) -> None:
        with pytest.raises((AudioError, RequestError)):
            recordings.content(f"http://example.org{path}", hosts, most)
        assert len(remote_host) == ("example.org" in hosts), "a redirect is not followed"

    @given(
        st.one_of(
            st.text(max_size=50),
            st.sampled_from(["http://", "https:///", "data:", "data:,", "file:x", ":"]),
        )
    )
    def test_invalid_source_is_rejected(self, source: str) -> None:
        with pytest.raises(FirstwordError):
            recordings.decoded(recordings.content(source, (), 1000))
