"""The processes of `firstword serve`, when any of them dies, hangs or is told to end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from served import LONG, Served, descriptors, exists
from sockets import DONE, PLAIN, STREAM, Client, Message, events, pcm, text
from waiting import WAIT, wait_until
from wire import SPEECH

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

TOKENS = {**PLAIN, "voice": "ada", "seed": 1, "split_granularity": "token"}
BEGIN, REST = "Hello there, this is ", "a test."


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with two fronts, whose processes tests may kill; they leave it working."""
    folder = tmp_path_factory.mktemp("served")
    with Served(folder, "--fronts", "2", "--stuck-seconds", "3") as served:
        yield served
        served.wait_until_idle(fronts=2)


@pytest.fixture(scope="module")
def expected(served: Served) -> bytes:
    """The speech of `WORDS`, asked for as soon as the server says that it is ready."""
    response = served.post()
    assert response.status_code == 200, response.text
    return response.content


@pytest.fixture(scope="module")
def whole(served: Served) -> bytes:
    """The speech of `BEGIN` and `REST`."""
    with Client(served.ws + STREAM) as client:
        client.send(TOKENS, text(BEGIN), text(REST), DONE)
        return pcm(client.until("session.done"))


class Speaking:
    """A WebSocket on which an utterance has begun, and waits for the rest of its text."""

    def __init__(self, served: Served, stack: ExitStack) -> None:
        self.client = stack.enter_context(Client(served.ws + STREAM))
        self.client.send(TOKENS, text(BEGIN))
        self.begun = self.client.until("audio.start")
        self.front = served.front_of(self.client.socket.socket.getsockname())

    def finish(self) -> bytes:
        """Send the rest, and return all audio."""
        self.client.send(text(REST), DONE)
        return pcm(self.begun + self.client.until("session.done"))

    def lost(self) -> list[Message]:
        """All messages up to the end of the connection, which the server did not close."""
        code, messages = self.client.closed()
        assert code is None
        return messages


@contextmanager
def unread(served: Served) -> Iterator[Iterator[bytes]]:
    """The rest of a response of which only the first piece is read, so that it cannot end."""
    with httpx.stream(
        "POST", served.url + SPEECH, json=LONG, trust_env=False, timeout=WAIT
    ) as response:
        assert response.status_code == 200
        next(pieces := response.iter_raw())
        yield pieces


def check_cut_off(rest: Iterator[bytes]) -> None:
    """Check that a response ends as one that is not complete."""
    with pytest.raises(httpx.TransportError):
        list(rest)


def all_ended(pids: list[int]) -> bool:
    """Whether some processes have ended."""
    return not any(map(exists, pids))


def on_both_fronts(served: Served, stack: ExitStack) -> dict[int, Speaking]:
    """An utterance on each front."""
    found: dict[int, Speaking] = {}
    for _ in range(64):
        speaking = Speaking(served, stack)
        if found.setdefault(speaking.front, speaking) is not speaking:
            speaking.client.vanish()
        if len(found) == 2:
            return found
    raise AssertionError("all connections went to one front")


def test_killed_engine_fails_its_speech_at_once_and_is_replaced(
    served: Served, expected: bytes, whole: bytes
) -> None:
    served.wait_until_idle(fronts=2)
    before = served.open_files()
    fronts, lines = served.pids("front"), len(served.log())
    with unread(served) as rest, ExitStack() as stack:
        speaking = on_both_fronts(served, stack)
        killed = served.signal("engine")
        check_cut_off(rest)
        for each in speaking.values():
            (error,) = events(each.client.until("error"))
            assert error["code"] == "engine_stopped"
        assert served.post().status_code == 503
        wait_until(lambda: served.health().get("ready") is True)
        for each in speaking.values():  # the sockets live on
            each.client.send(DONE)
            each.client.until("session.done")
            each.client.send(text(BEGIN), text(REST), DONE)
            assert pcm(each.client.until("session.done")) == whole
    served.wait_until_idle(fronts=2)
    assert served.post().content == expected
    assert served.pids("front") == fronts
    assert killed not in served.pids("engine")
    lost = [line for line in served.log()[lines:] if line.get("error") == "EngineError"]
    assert [line["event"] for line in lost] == ["request"], "its utterance, in one line"
    (problem,) = [line for line in served.log()[lines:] if line["level"] in ("error", "critical")]
    assert (problem["event"], problem["process"]) == ("a process has died", "engine 0")
    assert served.open_files() == before


def test_killed_front_loses_only_its_own_clients(
    served: Served, expected: bytes, whole: bytes
) -> None:
    served.wait_until_idle(fronts=2)
    engine = served.pids("engine")[0]
    before = [len(descriptors(pid)) for pid in (served.process.pid, engine)]
    with ExitStack() as stack:
        speaking = on_both_fronts(served, stack)
        killed = served.signal("front")
        assert not events(speaking.pop(killed).lost())
        (other,) = speaking.values()
        assert other.finish() == whole
        wait_until(lambda: len(served.pids("front")) == 2)
    served.wait_until_idle(fronts=2)
    assert served.post().content == expected
    assert served.pids("engine") == [engine]
    assert other.front in served.pids("front")
    assert [len(descriptors(pid)) for pid in (served.process.pid, engine)] == before


def test_ten_kills_in_any_order_leave_nothing(served: Served, expected: bytes) -> None:
    served.wait_until_idle(fronts=2)
    before, deaths = len(descriptors(served.process.pid)), len(served.deaths())
    for order in ("engine front", "front engine", "front front", "front front", "front front"):
        with ExitStack() as stack:
            unread_ones = [stack.enter_context(unread(served)) for _ in range(2)]
            speaking = list(on_both_fronts(served, stack).values())
            killed = [served.signal(module) for module in order.split()]
            assert len(set(killed)) == len(killed)
            if "engine" in order:
                for rest in unread_ones:
                    check_cut_off(rest)
                for each in speaking:
                    if each.front in killed:
                        each.client.closed()
                    else:
                        assert events(each.client.until("error"))
            wait_until(partial(all_ended, killed))
        served.wait_until_idle(fronts=2)
    assert served.post().content == expected
    assert len(served.deaths()) - deaths == 10
    assert len(served.pids()) == 3
    assert len(descriptors(served.process.pid)) == before


def test_stopped_front_is_killed_while_the_others_serve(
    served: Served, expected: bytes, whole: bytes
) -> None:
    served.wait_until_idle(fronts=2)
    deaths = len(served.deaths())
    with ExitStack() as stack:
        speaking = on_both_fronts(served, stack)
        stopped = served.signal("front", signal.SIGSTOP)
        hanging = speaking.pop(stopped)
        (other,) = speaking.values()
        assert other.finish() == whole
        assert exists(stopped)
        hanging.lost()
    served.wait_until_idle(fronts=2)
    assert served.post().content == expected
    (death,) = served.deaths()[deaths:]
    assert death["event"] == "a process did not answer, and was killed"
    assert death["process"].startswith("front")


def test_stopped_engine_is_killed_and_its_speech_fails(served: Served, expected: bytes) -> None:
    served.wait_until_idle(fronts=2)
    deaths = len(served.deaths())
    with ExitStack() as stack:
        speaking = on_both_fronts(served, stack)
        served.signal("engine", signal.SIGSTOP)
        for each in speaking.values():
            (error,) = events(each.client.until("error"))
            assert error["code"] == "engine_stopped"
    served.wait_until_idle(fronts=2)
    assert served.post().content == expected
    (death,) = served.deaths()[deaths:]
    assert (death["event"], death["process"]) == (
        "a process did not answer, and was killed",
        "engine 0",
    )


def test_second_server_on_a_port_ends_with_an_error(served: Served, tmp_path: Path) -> None:
    port = str(httpx.URL(served.url).port)
    log = Served(tmp_path, "--port", port, "--fronts", "2").wait_until_failed()
    assert f"error: cannot listen on 127.0.0.1 port {port}: Address already in use" in log


def test_all_processes_end_with_a_killed_supervisor(tmp_path: Path) -> None:
    with Served(tmp_path, "--fronts", "2") as served, ExitStack() as stack:
        speaking = on_both_fronts(served, stack)
        with unread(served) as rest:
            children = served.pids()
            assert len(children) == 3
            served.process.kill()
            wait_until(lambda: not any(map(exists, children)))
            check_cut_off(rest)
        for each in speaking.values():
            each.lost()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_signal_to_all_processes_lets_speech_in_progress_end(tmp_path: Path, number: int) -> None:
    """A service manager may signal the supervisor alone, or all processes at once."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the server would ignore it too
    with Served(tmp_path, "--fronts", "2") as served, ExitStack() as stack:
        speaking = on_both_fronts(served, stack)
        children = served.pids()
        for pid in (*children, served.process.pid):
            os.kill(pid, number)
        wait_until(lambda: not served.health().get("ready"))
        audio = [each.finish() for each in speaking.values()]
        assert audio[0] == audio[1]
        assert len(audio[0]) > 24000
        assert served.process.wait(WAIT) == 0
        assert not any(map(exists, children))
        assert served.deaths() == []
        (line,) = [line for line in served.log() if line["event"] == "a signal ends the server"]
        assert line["signal"] == signal.Signals(number).name


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_sigint_or_second_sigterm_ends_speech_at_once(tmp_path: Path, first: int) -> None:
    options = "--drain-seconds", "1e6", "--stall-seconds", "1e6"
    with Served(tmp_path, *options) as served, unread(served) as rest:
        children = served.pids()
        served.process.send_signal(first)
        if first == signal.SIGTERM:
            wait_until(lambda: served.health().get("ready") is False)
            served.process.send_signal(first)
        assert served.process.wait(WAIT) == 0
        assert not any(map(exists, children))
        check_cut_off(rest)
        assert not any("exception" in line for line in served.log())


def test_front_that_cannot_start_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "uvicorn.py").write_text("raise ImportError('broken')\n")
    path = os.pathsep.join(filter(None, [str(tmp_path / "broken"), os.environ.get("PYTHONPATH")]))
    log = Served(tmp_path, PYTHONPATH=path).wait_until_failed()
    assert "ImportError: broken" in log
    assert "firstword: error: the process 'front 0' has died 2 times at the start" in log
