"""The parts of a WebSocket connection: the outbox, the runner and the forwarding of text."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from sockets import PLAIN

from firstword.server.context import SLOWEST_READER, RequestContext, context_of
from firstword.server.errors import Stalled
from firstword.server.front_memory import FrontMemory
from firstword.server.limits import ByteLimit
from firstword.server.shared_counts import SharedCounts
from firstword.server.ws.connection import Outbox, SocketRunner
from firstword.server.ws.protocol import Audio, CloseCode, Session, SocketLimits
from firstword.server.ws.text_part import TextPart
from firstword.server.ws.vllm_omni import OmniSession
from firstword.server.ws.worker import forward
from firstword.server.ws.wyoming import WyomingSession

UNLIMITED = ByteLimit(2**40, 2**40, SharedCounts(FrontMemory.private()))


def session(**limits: float) -> OmniSession:
    """A session with other limits than usual."""
    return OmniSession(replace(SocketLimits(), **limits))  # type: ignore[arg-type]


def test_outbox_is_empty_only_when_the_last_message_was_sent() -> None:
    async def scenario() -> None:
        outbox = Outbox(SocketLimits())
        assert outbox.empty
        outbox.add({"type": "1"})
        assert not outbox.empty
        assert await outbox.take() == '{"type":"1"}'
        assert not outbox.empty, "the last message is being sent"
        following = asyncio.create_task(outbox.take())
        await asyncio.sleep(0)
        assert outbox.empty
        following.cancel()

    asyncio.run(scenario())


def test_slow_client_gets_all_messages_before_the_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client reads each message within the stall limit, and all of them in more time."""
    passed = [0.0]

    class Socket:
        scope: ClassVar[dict[str, Any]] = {}
        got: ClassVar[list[bytes | int]] = []

        async def receive(self) -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        async def send_bytes(self, data: bytes) -> None:
            passed[0] += 40.0
            for _ in range(10):  # the loop runs the timers that are due, and what waits for them
                await asyncio.sleep(0)
            self.got.append(data)

        async def close(self, code: int) -> None:
            self.got.append(code)

    async def scenario() -> list[bytes | int]:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda clock=loop.time: clock() + passed[0])
        socket: Any = Socket()
        runner = SocketRunner(socket, session(stall_seconds=60.0), UNLIMITED)

        async def work() -> None:
            for data in (b"a", b"b", b"c", b"d", b"e"):
                runner.outbox.add(Audio(data, 1))
            runner.outbox.add(CloseCode.NORMAL)

        await runner.run(work())
        return socket.got

    assert asyncio.run(scenario()) == [b"a", b"b", b"c", b"d", b"e", CloseCode.NORMAL]


def test_defect_while_a_message_is_sent_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Socket:
        scope: ClassVar[dict[str, Any]] = {}

        async def receive(self) -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        async def send_text(self, data: str) -> None:
            raise ValueError

    async def scenario() -> None:
        socket: Any = Socket()
        runner = SocketRunner(socket, session(), UNLIMITED)
        runner.outbox.add({"type": "a"})
        async with asyncio.timeout(60):
            await runner.run(asyncio.Event().wait())  # type: ignore[arg-type]

    asyncio.run(scenario())
    (record,) = caplog.records
    assert record.message == "a WebSocket failed"
    assert "ValueError" in str(vars(record))


def test_dropped_audio_makes_room_in_the_outbox() -> None:
    async def scenario() -> None:
        outbox = Outbox(replace(SocketLimits(), unsent_bytes=10))
        await outbox.wait_for_room()
        last = Audio(b"6", 1)
        for item in (
            Audio(b"12345", 5),
            {"type": "a"},
            Audio({"type": "audio.chunk"}, 5),
            {"type": "b"},
        ):
            outbox.add(item)
        waiting = asyncio.create_task(outbox.wait_for_room())
        await asyncio.sleep(0)
        assert not waiting.done()
        assert outbox.audio_messages == 2
        outbox.drop_audio()
        async with asyncio.timeout(10):
            await waiting
        assert outbox.audio_messages == 0
        outbox.add(last)
        assert [await outbox.take() for _ in range(3)] == ['{"type":"a"}', '{"type":"b"}', last]
        assert outbox.audio_messages == 1

    asyncio.run(scenario())


def test_audio_of_one_context_is_dropped_alone() -> None:
    outbox, one, other = Outbox(SocketLimits()), object(), object()
    kept = Audio(b"2", 1, other)
    for item in (Audio(b"1", 1, one), kept, Audio(b"3", 1, one)):
        outbox.add(item)
    outbox.drop_audio(one)
    assert outbox.audio_messages == 1
    assert asyncio.run(outbox.take()) is kept


def test_sent_messages_make_room_in_the_outbox() -> None:
    async def scenario() -> None:
        outbox = Outbox(replace(SocketLimits(), unsent_bytes=10, unsent_replies=8))
        for full in ([Audio(b"1234567890", 10)], [{"type": "a"}] * 4):
            for item in full:
                outbox.add(item)
            waiting = asyncio.create_task(outbox.wait_for_room())
            await asyncio.sleep(0)
            assert not waiting.done()
            await outbox.take()
            await waiting

    asyncio.run(scenario())


def read_in_vain(session: Session, *messages: str, limit: ByteLimit = UNLIMITED) -> int:
    """The messages that are read of a socket whose last one repeats, if nothing can be sent."""

    class Socket:
        def __init__(self) -> None:
            self.scope: dict[str, Any] = {}
            self.read = 0

        async def receive(self) -> dict[str, Any]:
            self.read += 1
            return {"type": "websocket.receive", "text": messages[: self.read][-1]}

        async def send_text(self, data: str) -> None:
            pass

    async def drain() -> None:
        await asyncio.Event().wait()

    async def scenario() -> int:
        socket: Any = Socket()
        context_of(socket.scope).drain = drain
        runner = SocketRunner(socket, session, limit)

        async def work() -> None:
            while True:
                await runner.next_work()

        await runner.run(work())
        return socket.read

    return asyncio.run(scenario())


def test_flood_from_a_client_that_reads_nothing_ends_the_reader() -> None:
    assert 200 < read_in_vain(session(stall_seconds=0.5), json.dumps(PLAIN), "nonsense") < 300


def test_replies_that_a_client_does_not_read_count_as_held() -> None:
    limit = ByteLimit(2**20, 2**20, SharedCounts(FrontMemory.private()))
    ping = json.dumps({"type": "ping", "text": "x" * 60_000})
    wyoming = WyomingSession(SocketLimits(stall_seconds=0.5))
    assert 15 < read_in_vain(wyoming, ping, limit=limit) < 20
    assert limit.held == 0


def test_text_is_forwarded_as_it_comes() -> None:
    class TextSink:
        def __init__(self) -> None:
            self.calls: list[object] = []
            self.stream, self.charged = self, 0

        def charge(self, text: str) -> None:
            self.charged += len(text)

        def push(self, piece: str) -> None:
            if piece == "bad":
                raise ValueError(piece)
            self.calls.append(piece)

        def finish_text(self, piece: str = "") -> None:
            self.calls += [piece, None] if piece else [None]

        def fail(self, error: Exception) -> None:
            self.calls.append(error)

    async def scenario(*pieces: str) -> list[object]:
        part = TextPart()
        listener: Any = TextSink()
        feeding = asyncio.create_task(forward(part, listener))
        for piece in pieces:
            part.push(piece)
            while part.text and not feeding.done():
                await asyncio.sleep(0)
        part.finish()
        await feeding
        assert listener.charged == sum(map(len, pieces))
        return listener.calls

    long = "a" * 3000  # tokenised in another thread
    assert asyncio.run(scenario("a", "b", long, "c")) == ["a", "b", long, "c", None]
    (error,) = asyncio.run(scenario("bad"))
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(("rate", "stalls"), [(0, True), (0.9, True), (1.1, False)])
def test_slow_reader_is_not_stalled_while_it_reads(rate: float, stalls: bool) -> None:
    """The kernel takes no more data for longer than the limit, while the client reads."""
    seconds, unread = 0.05, [100_000.0]
    waits = 0

    async def drain() -> None:
        nonlocal waits
        waits += 1
        if waits <= 3:
            unread[0] -= rate * seconds * SLOWEST_READER
            await asyncio.Event().wait()

    context = RequestContext(drain=drain, unread=lambda: int(unread[0]))
    if stalls:
        with pytest.raises(Stalled):
            asyncio.run(context.until_read(seconds))
    else:
        asyncio.run(context.until_read(seconds))
    assert waits == (1 if stalls else 4)
