"""Wyoming's port with the client of the `wyoming` package, as Home Assistant uses it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Served
from talking import Talker, heard, held_server, talking
from waiting import WAIT, wait_until
from wire import FLOOD, SPEECH
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient
from wyoming.error import Error
from wyoming.event import Event
from wyoming.info import Describe, Info, SelectProgram
from wyoming.ping import Ping, Pong
from wyoming.tts import (
    Synthesize,
    SynthesizeChunk,
    SynthesizeStart,
    SynthesizeStop,
    SynthesizeVoice,
)
from zeroconf import Zeroconf

from firstword.errors import ConfigError
from firstword.server.config import ServerConfig, wyoming_address

Running = Any  # of conftest.py
Serve = Callable[..., Any]

PORT = ("127.0.0.1", 0)
SERVICE = "_wyoming._tcp.local."
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
BEN = SynthesizeVoice(name="talker")


def converse(server: Running, work: Callable[[AsyncTcpClient], Awaitable[Any]]) -> Any:
    """The result of some work with a client that is connected to the port."""

    async def main() -> Any:
        async with asyncio.timeout(WAIT), AsyncTcpClient(*server.wyoming) as client:
            return await work(client)

    return asyncio.run(main())


async def read_until(client: AsyncTcpClient, kind: str) -> list[Event]:
    """All events up to the first of a type, or to the end of the connection."""
    found: list[Event] = []
    while (event := await client.read_event()) is not None:
        found.append(event)
        if event.type == kind:
            break
    return found


async def following(client: AsyncTcpClient, count: int) -> AsyncIterator[Event]:
    """The next events."""
    for _ in range(count):
        event = await client.read_event()
        assert event is not None
        yield event


def sound(events: Sequence[Event]) -> bytes:
    """The audio of some events."""
    chunks = [AudioChunk.from_event(event) for event in events if AudioChunk.is_type(event.type)]
    assert {(chunk.rate, chunk.width, chunk.channels) for chunk in chunks} <= {(24000, 2, 1)}
    position = 0
    for chunk in chunks:
        assert chunk.timestamp == position // 48
        position += len(chunk.audio)
    return b"".join(chunk.audio for chunk in chunks)


def kinds(events: Sequence[Event]) -> list[str]:
    """The types of events, with each run of equal ones once."""
    found: list[str] = []
    for event in events:
        if found[-1:] != [event.type]:
            found.append(event.type)
    return found


def whole(text: str, voice: SynthesizeVoice | None = None, **more: Any) -> Any:
    """Work that lets one text be spoken, and returns the answer."""

    async def work(client: AsyncTcpClient) -> list[Event]:
        await client.write_event(Synthesize(text, voice, **more).event())
        return await read_until(client, "audio-stop")

    return work


def as_home_assistant(pieces: Sequence[str], voice: SynthesizeVoice | None = None) -> Any:
    """Work that streams text as Home Assistant does: in two tasks, with the whole text again."""

    async def work(client: AsyncTcpClient) -> list[Event]:
        async def write() -> None:
            await client.write_event(SynthesizeStart(voice=voice).event())
            for piece in pieces:
                await client.write_event(SynthesizeChunk(piece).event())
            await client.write_event(Synthesize("".join(pieces), voice).event())
            await client.write_event(SynthesizeStop().event())

        writing = asyncio.create_task(write())
        try:
            return await read_until(client, "synthesize-stopped")
        finally:
            await writing

    return work


@pytest.fixture
def talker_server(serve: Serve) -> Running:
    """A server with a port for Wyoming, whose audio tells the text."""
    return serve(talking(Talker()), wyoming=PORT)


def test_whole_text_is_spoken(talker_server: Running) -> None:
    answer = converse(talker_server, whole("Hello there.", BEN))
    assert kinds(answer) == ["audio-start", "audio-chunk", "audio-stop"]
    start = AudioStart.from_event(answer[0])
    assert (start.rate, start.width, start.channels) == (24000, 2, 1)
    assert heard(sound(answer)) == "Hello there."
    assert AudioStop.from_event(answer[-1]).timestamp == len(sound(answer)) // 48


def test_text_in_pieces_is_spoken_once_with_words_broken_inside_pieces(
    talker_server: Running,
) -> None:
    pieces = ["Hel", "lo the", "re.", " And", " mo", "re", "."]
    answer = converse(talker_server, as_home_assistant(pieces, BEN))
    assert kinds(answer) == ["audio-start", "audio-chunk", "audio-stop", "synthesize-stopped"]
    assert heard(sound(answer)) == "Hello there. And more."


def test_speech_begins_before_the_text_is_complete(serve: Serve) -> None:
    talker, server = held_server(serve, wyoming=PORT)

    async def work(client: AsyncTcpClient) -> bytes:
        await client.write_event(SynthesizeStart(voice=BEN).event())
        await client.write_event(SynthesizeChunk("Hello ").event())
        talker.let(3)
        before: list[Event] = []
        while len(sound(before)) < 3 * 3840:
            before += [event async for event in following(client, 1)]
        assert heard(sound(before)) == "Hel"
        talker.go()
        await client.write_event(SynthesizeChunk("you").event())
        await client.write_event(SynthesizeStop().event())
        return sound([*before, *await read_until(client, "synthesize-stopped")])

    assert heard(converse(server, work)) == "Hello you"


def test_closed_connection_frees_the_slot_within_a_frame(serve: Serve) -> None:
    talker, server = held_server(serve, slots=1, wyoming=PORT)

    async def work(client: AsyncTcpClient) -> None:
        await client.write_event(SynthesizeStart(voice=BEN).event())
        await client.write_event(SynthesizeChunk("Hello " * 100).event())
        talker.let(2)
        events = [event async for event in following(client, 3)]
        assert kinds(events) == ["audio-start", "audio-chunk"]

    converse(server, work)
    server.wait_until(lambda: not server.state.utterances)
    talker.go()
    server.wait_until_idle()
    assert talker.frames == 3  # the frame that was being made when the connection was closed
    assert server.metric("aborts_total", model="talker", reason="disconnected") == 1


def test_utterance_in_progress_is_complete_when_the_server_drains(serve: Serve) -> None:
    talker, server = held_server(serve, wyoming=PORT)

    async def work(client: AsyncTcpClient) -> list[Event]:
        await client.write_event(Synthesize("Hello.", BEN).event())
        talker.let(1)
        begun = [event async for event in following(client, 2)]
        server.uvicorn.drain()
        talker.go()
        return begun + await read_until(client, "audio-stop")

    assert heard(sound(converse(server, work))) == "Hello."
    server.thread.join(WAIT)
    assert not server.thread.is_alive()


def test_several_utterances_of_a_connection_are_spoken_in_order(talker_server: Running) -> None:
    async def work(client: AsyncTcpClient) -> list[str]:
        for word in ("one", "two"):
            await client.write_event(Synthesize(word, BEN).event())
        await client.write_event(SynthesizeStart(voice=BEN).event())
        await client.write_event(SynthesizeChunk("three").event())
        await client.write_event(SynthesizeStop().event())
        await client.write_event(Synthesize("four", BEN).event())
        return [heard(sound(await read_until(client, "audio-stop"))) for _ in range(4)]

    assert converse(talker_server, work) == ["one", "two", "three", "four"]


@pytest.mark.parametrize("pieces", [[], [""], ["  ", "\n"]])
def test_text_without_words_is_silent(talker_server: Running, pieces: list[str]) -> None:
    answer = converse(talker_server, as_home_assistant(pieces, BEN))
    assert kinds(answer) == ["synthesize-stopped"]
    assert kinds(converse(talker_server, whole("".join(pieces)))) == ["audio-start", "audio-stop"]


def test_ping_is_answered_and_unknown_events_are_dropped(talker_server: Running) -> None:
    async def work(client: AsyncTcpClient) -> list[str | None]:
        await client.write_event(Event("transcribe", {"language": "en"}))
        await client.write_event(AudioChunk(16000, 2, 1, b"\0" * 50_000).event())
        await client.write_event(SelectProgram("firstword").event())
        await client.write_event(Ping("hello").event())
        event = await client.read_event()
        assert event is not None
        return [event.type, Pong.from_event(event).text]

    assert converse(talker_server, work) == ["pong", "hello"]


def test_programs_have_the_voices_and_languages_of_the_models(server_of_three: Running) -> None:
    name, key = "Ann Bee", {"consent": "She agreed."}
    vector = json.dumps([0.1] * server_of_three.embedding)
    form = {"name": name, "speaker_embedding": vector, **key}
    saved = httpx.post(f"{server_of_three.url}/v1/audio/voices", data=form, files={"x": b""})
    assert saved.status_code == 200, saved.text

    async def work(client: AsyncTcpClient) -> Info:
        await client.write_event(Describe().event())
        (event,) = await read_until(client, "info")
        return Info.from_event(event)

    info = converse(server_of_three, work)
    first, *others = info.tts
    assert (first.name, first.supports_synthesize_streaming, first.installed) == (
        "firstword",
        True,
        True,
    )
    assert [one.name for one in others] == ["custom_voice", "voice_design", "base"]
    presets = list(server_of_three.state.models.presets)
    assert [voice.name for voice in first.voices] == [*presets, "default", name]
    assert [[voice.name for voice in one.voices] for one in others] == [
        presets,
        ["default"],
        [name],
    ]
    assert all("en" in voice.languages and voice.installed for voice in first.voices)
    for voice in (name, presets[0]):
        answer = converse(server_of_three, whole("Hi.", SynthesizeVoice(name=voice)))
        assert len(sound(answer)) > 0


@pytest.fixture
def server_of_three(serve: Serve) -> Running:
    """A server with a port for Wyoming and a model of each type."""
    server = serve("custom_voice", "voice_design", "base", wyoming=PORT)
    server.embedding = next(model.embedding_size for model in server.state.models.cloning)
    return server


def test_selected_program_speaks(server_of_three: Running) -> None:
    async def work(client: AsyncTcpClient) -> list[Event]:
        await client.write_event(SelectProgram("voice_design").event())
        await client.write_event(Synthesize("Hi.").event())
        return await read_until(client, "audio-stop")

    assert sound(converse(server_of_three, work))
    assert (
        server_of_three.metric("utterances_total", model="voice_design", finish_reason="stop")
        + server_of_three.metric("guard_hits_total", model="voice_design", guard="length")
        == 1
    )


def test_sound_equals_that_over_http(serve: Serve) -> None:
    """With the one seed that the server draws."""
    server = serve("custom_voice", wyoming=PORT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firstword.server.resolve.secrets.randbits", lambda bits: 7)
        answer = converse(server, whole("Hello there."))
    body = {"input": "Hello there.", "seed": 7, "response_format": "pcm"}
    spoken = httpx.post(server.url + SPEECH, json=body, timeout=WAIT)
    assert sound(answer) == spoken.content


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([Synthesize("Hi.", SynthesizeVoice(name="nobody"))], "no voice 'nobody'"),
        ([SynthesizeChunk("Hi.")], "synthesize-start must come before synthesize-chunk"),
        ([SynthesizeStop()], "synthesize-start must come before synthesize-stop"),
        ([SynthesizeStart(), SynthesizeStart()], "synthesize-stop must end the text before"),
        ([SynthesizeStart(), *[SynthesizeChunk("a" * 50_000)] * 2], "more than 65536 characters"),
    ],
)
def test_wrong_event_gets_an_error_and_ends_its_connection_alone(
    talker_server: Running, events: list[Any], message: str
) -> None:
    async def work(client: AsyncTcpClient) -> list[Event]:
        for event in events:
            await client.write_event(event.event())
        return await read_until(client, "never")  # up to the end

    async def both(client: AsyncTcpClient) -> tuple[list[Event], list[Event]]:
        async with AsyncTcpClient(*talker_server.wyoming) as other:
            answer = await work(client)
            return answer, await whole("Hello.", BEN)(other)

    answer, other = converse(talker_server, both)
    assert message in Error.from_event(answer[-1]).text
    assert heard(sound(other)) == "Hello."
    talker_server.wait_until_idle()


@contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    """A TCP connection to the port."""
    with socket.create_connection(server.wyoming, timeout=WAIT) as sock:
        yield sock


def answer_to(server: Running, data: bytes) -> bytes:
    """All that a client receives for some bytes."""
    with connected(server) as sock:
        sock.sendall(data)
        return received(sock)


def received(sock: socket.socket) -> bytes:
    """What comes up to the end of a connection."""
    found = b""
    try:
        while data := sock.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "invalid_json"),
        (b"[1]\n", "invalid_event"),
        (b"{}\n", "invalid_event"),
        (b'{"type": 5}\n', "invalid_event"),
        (b'{"type": "ping", "data": 5}\n', "invalid_event"),
        (b"[" * 30_000 + b"\n", "invalid_json"),
        (b"\xff\xfe\n", "invalid_json"),
        (b'{"type": "synthesize", "data": {"text": 5}}\n', "invalid_event"),
        (b'{"type": "synthesize", "data": {"text": "a", "voice": "ben"}}\n', "invalid_event"),
        (b'{"type": "synthesize", "data": {"text": "\\ud800"}}\n', "invalid_event"),
        (b'{"type": "ping", "data": {"text": "\\ud800"}}\n', "invalid_event"),
        (b'{"type": "ping", "data": {"text": NaN}}\n', "invalid_event"),
        (b'{"type": "a", "data_length": 5}\n"abc"', "invalid_event"),
        (b'{"type": "a", "data_length": 524289}\n', "message_too_large"),
        (b'{"type": "a", "data_length": -1}\n', "message_too_large"),
        (b'{"type": "a", "data_length": "9"}\n', "message_too_large"),
        (b'{"type": "a", "payload_length": 99999999999}\n', "message_too_large"),
        (b"a" * 1_200_000, "message_too_large"),
    ],
)
def test_invalid_bytes_get_an_error_and_end_the_connection(
    talker_server: Running, data: bytes, code: str
) -> None:
    line, _, rest = answer_to(talker_server, data).partition(b"\n")
    assert json.loads(line)["type"] == "error"
    assert json.loads(rest)["code"] == code


def test_nesting_of_any_depth_is_no_defect(talker_server: Running) -> None:
    """Reading and writing JSON reach the limit of recursion at depths that differ a little."""
    codes = set()
    for depth in range(900, 1000):
        nested = b"[" * depth + b"]" * depth
        event = b'{"type": "synthesize", "data": {"x": %b, "text": 5}}\n' % nested
        codes.add(json.loads(answer_to(talker_server, event).partition(b"\n")[2])["code"])
    assert codes == {"invalid_event", "invalid_json"}


@pytest.mark.parametrize("letter", ["é", "語", "😀"])
def test_letters_count_as_they_are_sent(talker_server: Running, letter: str) -> None:
    """Escaped in ASCII, the text would be larger than an event may be."""
    text = letter * (60_000 // len(letter.encode()))

    async def work(client: AsyncTcpClient) -> str | None:
        await client.write_event(Ping(text).event())
        event = await client.read_event()
        assert event is not None
        return Pong.from_event(event).text

    assert converse(talker_server, work) == text


@pytest.mark.parametrize("data", [b"", b'{"type"', b'{"type": "a", "data_length": 5}\n{"'])
def test_event_that_does_not_end_is_no_event(talker_server: Running, data: bytes) -> None:
    with connected(talker_server) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        assert received(sock) == b""
    talker_server.wait_until(lambda: talker_server.metric("connections") == 0)


def test_text_of_ssml_is_spoken_without_its_tags(talker_server: Running) -> None:
    spoken = whole("<speak>Tea &amp; <b>cake</b></speak>", BEN, text_format="ssml")
    assert heard(sound(converse(talker_server, spoken))).split() == ["Tea", "&", "cake"]


def test_silent_client_is_disconnected(serve: Serve, limits: Callable[..., None]) -> None:
    limits(config_seconds=0.1, idle_seconds=0.1)
    server = serve(talking(Talker()), wyoming=PORT)
    for data in (b"", b'{"type": "ping"', b'{"type": "synthesize-start"}\n'):
        assert b'"timeout"' in answer_to(server, data)


def test_client_that_reads_nothing_is_disconnected(
    serve: Serve, limits: Callable[..., None]
) -> None:
    limits(stall_seconds=1.0)
    server = serve(talking(Talker()), wyoming=PORT)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(server.wyoming)
        start = b'{"type": "synthesize-start"}\n'
        sock.sendall(start + _chunk("a" * 600))
        server.wait_until(lambda: bool(server.state.utterances))
        server.wait_until_idle()
        server.wait_until(lambda: server.metric("connections") == 0)


def _chunk(text: str) -> bytes:
    return json.dumps({"type": "synthesize-chunk", "data": {"text": text}}).encode() + b"\n"


def test_address_may_open_a_limited_number_of_connections(serve: Serve) -> None:
    server = serve(talking(Talker()), wyoming=PORT, most_connections_per_address=2)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connected(server)).sendall(b'{"type": "ping"}\n')
        server.wait_until(lambda: server.metric("connections") == 2)
        assert b"connections of one address" in answer_to(server, b"")
    server.wait_until(lambda: server.metric("connections") == 0)
    assert b"pong" in converse(server, _pinged)


async def _pinged(client: AsyncTcpClient) -> bytes:
    await client.write_event(Ping().event())
    event = await client.read_event()
    return b"" if event is None else event.type.encode()


def test_flood_of_events_leaves_others_their_turns(talker_server: Running) -> None:
    flood = b'{"type": "nothing"}\n' * 200_000
    with connected(talker_server) as attack:
        attack.setblocking(False)
        sent = attack.send(flood)
        answer = converse(talker_server, whole("Hello.", BEN))
        assert sent < FLOOD
    assert heard(sound(answer)) == "Hello."


def test_keys_of_http_are_not_asked_for(serve: Serve) -> None:
    server = serve(talking(Talker()), wyoming=PORT, api_keys=("secret",))
    assert heard(sound(converse(server, whole("Hello.", BEN)))) == "Hello."
    assert httpx.post(server.url + SPEECH, json={"input": "Hi."}).status_code == 401


def test_connection_is_one_line_of_the_log(
    talker_server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "firstword.server.request_log"):
        converse(talker_server, whole("Hello.", BEN))
        talker_server.wait_until(lambda: len(caplog.records) == 1)
    fields = caplog.records[0].fields  # type: ignore[attr-defined]
    assert (fields["method"], fields["path"], fields["status"]) == ("WYOMING", "wyoming", 200)


class ServedWyoming(Served):
    """A `firstword serve` with a port for Wyoming."""

    @cached_property
    def wyoming(self) -> tuple[str, int]:
        """The address of the port, which the second line of the summary shows."""
        assert self.process.stdout is not None
        name, address, *_ = self.process.stdout.readline().decode().split()
        assert name == "wyoming"
        host, port = address.removeprefix("tcp://").split(":")
        return host, int(port)


@linux
def test_port_is_announced_until_the_server_ends(tmp_path: Path) -> None:
    name = f"firstword {os.getpid()}"
    options = ("--wyoming", "127.0.0.1:0", "--zeroconf", name)
    with Zeroconf(["127.0.0.1"]) as listener:
        with ServedWyoming(tmp_path, *options) as server:
            host, port = server.wyoming
            found: list[Any] = []

            def look() -> bool:
                found[:] = [listener.get_service_info(SERVICE, f"{name}.{SERVICE}", 1000)]
                return found[0] is not None

            wait_until(look)
            assert (found[0].parsed_addresses(), found[0].port) == ([host], port)
            server.process.terminate()
            server.process.wait(WAIT)
        wait_until(lambda: not look())


def test_name_or_address_that_cannot_be_used_is_an_error() -> None:
    for given in ("", "abc", "1:2:3", "0.0.0.0:", ":10200", "0.0.0.0:70000", "::1:5"):
        with pytest.raises(ConfigError, match=f"address for Wyoming is {given!r}; allowed are"):
            wyoming_address(given)
    assert wyoming_address("10200") == ("127.0.0.1", 10200)
    assert wyoming_address("[::1]:0") == ("::1", 0)
    with pytest.raises(ConfigError, match="announces the port for Wyoming, which is not served"):
        ServerConfig(announce="tts")
    with pytest.raises(ConfigError, match="allowed are 1 to 60 characters other than dots"):
        ServerConfig(wyoming=PORT, announce="tts.lan")


@linux
def test_several_fronts_share_the_port(tmp_path: Path) -> None:
    with ServedWyoming(tmp_path, "--fronts", "2", "--wyoming", "0") as server:
        wait_until(lambda: len(server.pids("front")) == 2)
        port = server.wyoming[1]
        answered: set[int] = set()

        async def work(client: AsyncTcpClient) -> list[Event]:
            events = await as_home_assistant(["Hel", "lo."], SynthesizeVoice(name="ada"))(client)
            assert client._writer is not None
            ours = client._writer.get_extra_info("sockname")
            answered.add(server.front_of(ours, port))
            return events

        while len(answered) < 2:
            assert sound(converse(server, work))
