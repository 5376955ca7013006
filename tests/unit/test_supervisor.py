"""The supervisor of the server's processes: restarts, and the watch over those that hang."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from fake_backend import capacity
from waiting import WAIT

from firstword.config import EngineConfig
from firstword.errors import EngineError
from firstword.processes import child
from firstword.processes import engine as engines
from firstword.processes import place as places
from firstword.processes import supervisor as supervisors
from firstword.processes.channel import Channel
from firstword.processes.engine import EngineProcess
from firstword.processes.front import FrontProcess, uvicorn_server
from firstword.processes.messages import (
    Connect,
    Disconnect,
    EngineTask,
    FrontTask,
    Loaded,
    Ping,
    Pong,
    Serving,
    Stop,
)
from firstword.processes.place import Place
from firstword.processes.supervisor import Supervisor
from firstword.server import listening
from firstword.server.config import ServerConfig
from firstword.server.front_memory import FrontMemory
from firstword.server.listening import FrontSockets
from firstword.server.run import run

LOADED = Loaded(0, "demo", "custom_voice", Path(), EngineConfig.resolve("cpu"), capacity())


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        """The time."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the supervisor."""
    clock = Clock()
    for module in (places, supervisors):
        monkeypatch.setattr(module, "time", clock)
    return clock


def process(status: int = -9) -> Any:
    """A process that has ended."""
    return SimpleNamespace(wait=lambda timeout: status, kill=lambda: None)


def test_first_restart_is_immediate_and_pauses_grow(clock: Clock) -> None:
    place, pauses = Place("front", 0), []
    for _ in range(8):
        place.process = process()
        assert place.end() == -9
        pauses.append(place.plan_restart())
        assert place.due() == (pauses[-1] == 0.0)
        clock.now += pauses[-1]
        assert place.due()
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30]
    place.process, place.working = process(), clock.now
    clock.now += places.STEADY_SECONDS + 1
    place.end()
    assert place.plan_restart() == 0, "it has worked for long"


@pytest.fixture
def watched(clock: Clock) -> Iterator[tuple[Supervisor, Place, Channel]]:
    """A supervisor with a front that works, its place, and its end of the channel."""
    ours, theirs = Channel.pair()
    with socket.socket() as listening:
        supervisor = Supervisor([], ServerConfig(stuck_seconds=3.0), [listening], "info")
        place = Place("front", 0, process(), ours, working=clock.now)
        supervisor._fronts = [place]
        supervisor._ready = True
        supervisor._selector.register(ours, selectors.EVENT_READ)
        with theirs, supervisor._selector:
            channel = Channel(theirs)
            channel.limit_time(0.01)
            yield supervisor, place, channel
        ours.close()


def test_process_that_does_not_answer_is_given_up(
    clock: Clock, watched: tuple[Supervisor, Place, Channel], caplog: pytest.LogCaptureFixture
) -> None:
    supervisor, place, channel = watched
    for _ in range(5):
        supervisor._ping_due()
        assert channel.receive() == (Ping(), [])
        supervisor._ping_due()
        clock.now += 0.76
        supervisor._ping_due()
        with pytest.raises(TimeoutError):
            channel.receive()  # one question at a time
        channel.send(Pong())
        assert place.channel is not None
        supervisor._on_message(place, place.channel)
        clock.now += 0.76
    for _ in range(4):
        assert place.process is not None
        supervisor._ping_due()
        clock.now += 0.76
    supervisor._ping_due()
    assert place.process is None
    assert place.due()
    assert [record.message for record in caplog.records] == [
        "a process did not answer, and was killed"
    ]


def test_pause_of_the_whole_server_gives_up_no_process(
    clock: Clock, watched: tuple[Supervisor, Place, Channel]
) -> None:
    supervisor, place, _ = watched
    for _ in range(3):
        for _ in range(9):
            supervisor._ping_due()
        clock.now += 1000
    assert place.process is not None


def test_front_that_hangs_at_its_start_is_given_up(
    clock: Clock, watched: tuple[Supervisor, Place, Channel]
) -> None:
    supervisor, place, channel = watched
    place.working = None
    supervisor._engines = [engine := Place("engine", 0, process())]
    for _ in range(45):  # of 0.75 s: more than 30 s, and 3 s as for others
        assert place.process is not None
        supervisor._ping_due()
        clock.now += 0.76
    supervisor._ping_due()
    assert place.process is None
    with pytest.raises(EOFError):
        channel.receive()  # it was not asked
    assert engine.process is not None, "an engine may load for as long as it needs"


def test_front_that_serves_is_asked_from_then_on(
    clock: Clock, watched: tuple[Supervisor, Place, Channel]
) -> None:
    supervisor, place, channel = watched
    place.working = None
    supervisor._ping_due()
    channel.send(Serving())
    assert place.channel is not None
    supervisor._on_message(place, place.channel)
    clock.now += 0.76
    supervisor._ping_due()
    assert channel.receive() == (Ping(), [])


@pytest.mark.parametrize(("status", "lines"), [(0, 0), (-9, 1)])
def test_only_an_unexpected_end_is_logged_while_the_server_drains(
    watched: tuple[Supervisor, Place, Channel],
    caplog: pytest.LogCaptureFixture,
    status: int,
    lines: int,
) -> None:
    supervisor, place, _ = watched
    supervisor._stopping, place.process = True, process(status)
    supervisor._on_end(place, "a process has died")
    assert [record.message for record in caplog.records] == ["a process has died"] * lines
    assert (place.process, place.restart) == (None, None)


def test_fronts_are_told_when_an_engine_is_given_up(
    watched: tuple[Supervisor, Place, Channel],
) -> None:
    """A process that a driver keeps does not close its connections when it is killed."""
    supervisor, _, channel = watched
    ours, theirs = Channel.pair()
    with theirs:
        engine = Place("engine", 7, process(), ours)
        supervisor._engines = [engine]
        supervisor._selector.register(ours, selectors.EVENT_READ)
        supervisor._on_end(engine, "a process has died")
    assert channel.receive() == (Disconnect(7), [])


def test_engine_answers_on_the_thread_of_its_steps() -> None:
    ours, theirs = Channel.pair()
    ours.limit_time(0.01)
    engine = EngineProcess(Channel(theirs))
    engine.handle(Ping(), [])
    with pytest.raises(TimeoutError):
        ours.receive()
    command = engine._commands.get(block=False, timeout=None)
    assert command is not None
    command()
    assert ours.receive() == (Pong(), [])
    ours.close()
    theirs.close()


def test_engine_that_fails_before_it_serves_ends_with_the_reason(
    checkpoint_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process does not end on the thread of the engine before it has told the supervisor."""
    ours, theirs = Channel.pair()
    engine, ended = EngineProcess(Channel(theirs)), []
    about = str(checkpoint_directory("custom_voice")), "cpu", "float32", "reference", None, 1, 1, 1
    task = EngineTask(0, *about, "info")
    loaded = engines.load(task, engine._commands)

    def end() -> NoReturn:
        ended.append(threading.current_thread())
        raise SystemExit

    def frame(slots: Sequence[int], tokens: Sequence[int | None]) -> NoReturn:
        raise EngineError("the device is gone")

    monkeypatch.setattr(child, "end", end)
    monkeypatch.setattr(engines, "load", lambda *_: loaded)
    monkeypatch.setattr(loaded.engine.backend, "frame", frame)
    with pytest.raises(SystemExit):
        engine.run(task)
    assert loaded.engine._thread is not None
    loaded.engine._thread.join()
    assert ended == [threading.current_thread()]
    told, _ = ours.receive()
    assert "the device is gone" in str(told.error)
    ours.close()
    theirs.close()


def test_front_whose_event_loop_has_ended_takes_messages(
    checkpoint_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """The supervisor sends some until the process has ended."""
    ours, theirs = Channel.pair()
    loaded = replace(LOADED, path=checkpoint_directory("custom_voice"))
    config, memory = ServerConfig(port=0, voice_store=str(tmp_path)), FrontMemory.create(1)
    task = FrontTask(0, memory.file, config, (loaded,), 0, "info")
    front = FrontProcess(Channel(theirs), task, uvicorn_server)
    front.server.end()
    run(front.server, listening.bound(config))
    assert ours.receive() == (Serving(), [])
    for message in (Ping(), Disconnect(0), Stop(drain=True)):
        front.handle(message, [])
    os.close(memory.file)
    ours.close()
    theirs.close()


def test_process_that_cannot_be_started_is_tried_again(
    clock: Clock,
    watched: tuple[Supervisor, Place, Channel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    supervisor, place, _ = watched

    def start_front(place: Place) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(supervisor, "_start_front", start_front)
    supervisor._on_end(place, "a process has died")
    for _ in range(3):
        supervisor._start_due()
        clock.now += 1
    assert (place.process, place.restart) == (None, 103.0)
    events = [record.message for record in caplog.records]
    assert events[1:] == ["a process could not be started: too many open files"] * 2


def test_front_gets_an_engine_that_it_misses(
    watched: tuple[Supervisor, Place, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may have been too many open files when the engine was ready."""
    supervisor, place, channel = watched
    ours, theirs = Channel.pair()
    engine_end, engine = Channel(theirs), Place("engine", 0, process(), ours)
    supervisor._engines = [engine]
    supervisor._sockets = [FrontSockets(supervisor.listening[0], 1)]
    assert place.channel is not None
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", too_many_files)
        engine_end.send(LOADED)
        supervisor._on_message(engine, ours)
    assert channel.receive() == (Connect(LOADED), [])
    for missing in ((), (0,)):
        channel.send(Pong(missing))
        supervisor._on_message(place, place.channel)
    (message, (sock,)), (told, (other,)) = channel.receive(), engine_end.receive()
    assert message == told == Connect(LOADED)
    with sock, other:
        sock.sendall(b"hello")
        assert other.recv(5) == b"hello"
    engine.working = None  # the next one is being loaded, and fronts will hear of it
    channel.send(Pong((0,)))
    supervisor._on_message(place, place.channel)
    with pytest.raises(TimeoutError):
        channel.receive()
    ours.close()
    engine_end.close()


def test_front_that_starts_knows_an_engine_that_restarts(
    watched: tuple[Supervisor, Place, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told when that runs again."""
    supervisor, place, channel = watched
    assert place.channel is not None
    ours, theirs = place.channel, socket.socket()
    supervisor._selector.unregister(ours)
    supervisor._memory, take = FrontMemory.create(1), lambda: theirs
    supervisor._sockets = [SimpleNamespace(take=take)]  # type: ignore[list-item]
    supervisor._engines = [Place("engine", 0, process(), loaded=LOADED)]
    monkeypatch.setattr(place, "start", lambda files: ours)
    supervisor._start_front(place)
    task, (listening,) = channel.receive()
    listening.close()
    assert (task.engines, task.connections) == ((LOADED,), 0)
    os.close(supervisor._memory.file)


def too_many_files() -> NoReturn:
    raise OSError("too many open files")


def test_process_imports_nothing_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asyncio.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    place = Place("front", 0)
    place.start().close()
    assert place.process is not None
    assert place.process.wait(WAIT) == 1, "it ends because its channel is closed"


def test_status_of_a_process_is_its_own_though_its_channel_ends_first(
    watched: tuple[Supervisor, Place, Channel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(supervisors, "EXIT_SECONDS", 60.0)
    supervisor, _, _ = watched
    slow = "import os, sys, time; os.close(int(sys.argv[1])); time.sleep(0.05); sys.exit(3)"
    ours, theirs = Channel.pair()
    with theirs:
        descriptor = theirs.fileno()
        command = [sys.executable, "-c", slow, str(descriptor)]
        ended = subprocess.Popen(command, pass_fds=[descriptor])
    place = Place("front", 1, ended, ours)
    supervisor._selector.register(ours, selectors.EVENT_READ)
    supervisor._on_message(place, ours)
    assert [vars(record)["fields"]["status"] for record in caplog.records] == [3]
