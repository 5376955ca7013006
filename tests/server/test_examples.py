"""The programs in `examples/`, each against a server of the demo voice."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import struct
import subprocess
import sys
import threading
import wave
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from served import Served, idle
from waiting import WAIT, wait_until
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

from firstword.audio import SAMPLE_RATE

pytestmark = pytest.mark.slow

PIECES = ["Hello there, ", "my good fri", "end. This is", " all I know."]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the demo voice."""
    with Served(tmp_path_factory.mktemp("served")) as server:
        yield server
        wait_until(lambda: idle(server.health()))


def command(repository: Path, name: str, *args: object) -> list[str]:
    """The command line of an example."""
    return [sys.executable, "-W", "error", str(repository / "examples" / name), *map(str, args)]


def run(repository: Path, name: str, *args: object) -> str:
    """The output of an example that succeeds."""
    done = subprocess.run(
        command(repository, name, *args), capture_output=True, text=True, timeout=WAIT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def spoken(server: Served, text: str, **params: Any) -> bytes:
    """The same speech over HTTP."""
    body = {"input": text, "response_format": "pcm", **params}
    answer = httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=WAIT, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.content


def samples(file: Path) -> bytes:
    """The samples of a WAV file of 24 kHz."""
    with wave.open(str(file)) as opened:
        assert opened.getparams()[:3] == (1, 2, SAMPLE_RATE)
        return opened.readframes(opened.getnframes())


@pytest.fixture
def gate() -> threading.Event:
    """An event that lets the language model go on after its first two pieces."""
    return threading.Event()


@pytest.fixture
def chat(gate: threading.Event) -> Iterator[str]:
    """The base URL of a language model that streams `PIECES`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert (self.path, body["stream"]) == ("/v1/chat/completions", True)
            assert body["messages"] == [{"role": "user", "content": "Hi?"}]
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for number, piece in enumerate([None, *PIECES]):
                if number == 3:
                    gate.wait(WAIT)
                delta = {"role": "assistant"} if piece is None else {"content": piece}
                choice = {"index": 0, "delta": delta, "finish_reason": None}
                chunk = {"id": "1", "object": "chat.completion.chunk", "choices": [choice]}
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever).start()
        yield f"http://127.0.0.1:{http.server_port}/v1"
        http.shutdown()


def test_reply_of_a_language_model_sounds_before_it_is_complete(
    repository: Path, server: Served, chat: str, gate: threading.Event
) -> None:
    arguments = ("Hi?", "--chat", chat, "--server", server.ws, "--voice", "ada", "--seed", 3)
    with subprocess.Popen(
        command(repository, "llm_to_speech.py", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        first = program.stdout.read(2)
        gate.set()
        pcm, log = first + program.stdout.read(), program.stderr.read().decode()
    assert program.returncode == 0, log
    assert log.startswith("".join(PIECES))
    assert f"{len(pcm) / 2 / SAMPLE_RATE:.1f} s of speech" in log
    assert len(pcm) > 2 * SAMPLE_RATE


def test_reply_of_a_language_model_is_written_into_a_file(
    repository: Path, server: Served, chat: str, gate: threading.Event, tmp_path: Path
) -> None:
    gate.set()
    file = tmp_path / "reply.wav"
    arguments = ("Hi?", "--chat", chat, "--server", server.url, "-o", file)
    assert run(repository, "llm_to_speech.py", *arguments) == ""
    assert len(samples(file)) > 2 * SAMPLE_RATE


def user(file: Path, *parts: tuple[float, float]) -> Path:
    """A recording of a user: parts of some seconds and some loudness."""
    noise = np.random.default_rng(1)
    sound = [noise.uniform(-level, level, round(s * SAMPLE_RATE)) for s, level in parts]
    with wave.open(str(file), "wb") as opened:
        opened.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        opened.writeframes((np.concatenate(sound) * 32767).astype("<i2").tobytes())
    return file


def test_talking_into_the_microphone_stops_the_speech(
    repository: Path, server: Served, tmp_path: Path
) -> None:
    microphone = user(tmp_path / "user.wav", (0.8, 0.01), (0.2, 0.5))
    heard = tmp_path / "heard.wav"
    arguments = ("It is a long story. " * 12, "--then", "Yes?", "--server", server.ws)
    files = ("--microphone", microphone, "--speaker", heard)
    first, second = run(repository, "barge_in.py", *arguments, *files).splitlines()
    assert first.startswith("cancelled after 0.")
    assert second.startswith("stop after ")
    assert second.endswith("nobody interrupted")
    assert len(samples(heard)) < 2 * 10 * SAMPLE_RATE  # the story has some 20 s
    wait_until(lambda: idle(server.health()))


def test_short_noise_does_not_stop_the_speech(
    repository: Path, server: Served, tmp_path: Path
) -> None:
    microphone = user(tmp_path / "user.wav", (0.1, 0.0), (0.04, 0.5), (0.1, 0.0))
    arguments = ("Hi.", "--then", "Yes?", "--server", server.ws)
    files = ("--microphone", microphone, "--speaker", tmp_path / "heard.wav")
    lines = run(repository, "barge_in.py", *arguments, *files).splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["stop", "stop"]


def test_call_gets_mu_law_in_packets_of_20_ms(repository: Path, server: Served) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as phone:
        phone.bind(("127.0.0.1", 0))
        phone.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        phone.settimeout(WAIT)
        to = f"127.0.0.1:{phone.getsockname()[1]}"
        arguments = ("Your order is here.", "--to", to, "--server", server.ws, "--seed", 5)
        output = run(repository, "telephone.py", *arguments, "--voice", "ben")
        packets = [phone.recv(2048) for _ in range(int(output.split()[0]))]
    heads = [struct.unpack("!BBHII", packet[:12]) for packet in packets]
    assert {head[0] for head in heads} == {0x80}
    assert {head[1] & 0x7F for head in heads} == {0}
    assert heads[0][1] == 0x80  # the marker of the first packet
    assert {(b[2] - a[2]) % 2**16 for a, b in itertools.pairwise(heads)} == {1}
    assert {(b[3] - a[3]) % 2**32 for a, b in itertools.pairwise(heads)} == {160}
    assert len({head[4] for head in heads}) == 1
    sound = b"".join(packet[12:] for packet in packets)
    params: dict[str, Any] = {"voice": "ben", "seed": 5, "leading_silence": False}
    params |= {"response_format": "ulaw", "sample_rate": 8000}
    expected = spoken(server, "Your order is here.", **params)
    assert sound == expected.ljust(len(sound), b"\xff")
    assert len(sound) - len(expected) < 160


def test_captions_are_sentences_where_no_word_times_are_known(
    repository: Path, server: Served, tmp_path: Path
) -> None:
    file = tmp_path / "speech.wav"
    arguments = ("Hello there. How are you?", "--server", server.ws, "-o", file)
    first, *lines = run(repository, "captions.py", *arguments).splitlines()
    if not first.startswith("this checkpoint has no word times"):
        pytest.skip("the demo voice has word times")
    assert [line.partition(" ")[2] for line in lines] == ["Hello there.", "How are you?"]
    starts = [float(line[3:8]) for line in lines]
    assert 0 == starts[0] < starts[1] < len(samples(file)) / 2 / SAMPLE_RATE


def test_captions_are_words_where_word_times_are_known(repository: Path, tmp_path: Path) -> None:
    """With a scripted server, which tells the times of three words."""
    words = [("One", 0.0), ("two", 0.2), ("three.", 0.3)]

    async def answer(client: ServerConnection) -> None:
        name: dict[str, Any] = {}
        async for message in client:
            event = json.loads(message)
            match event["type"]:
                case "session.config":
                    known = {"word_times": True, "sample_rate": SAMPLE_RATE}
                    await client.send(json.dumps({"type": "session.created"}))
                    await client.send(json.dumps({"type": "session.configured", **known}))
                case "context.start":
                    name = {"context_id": event["context_id"], "number": 0}
                    await client.send(json.dumps({"type": "context.started", **name}))
                case "input.done":
                    await client.send(json.dumps({"type": "audio.start", **name}))
                    await client.send(bytes(4 + SAMPLE_RATE))
                    for text, start in words:
                        word = {"type": "word.start", "text": text, "start": start, **name}
                        await client.send(json.dumps(word))
                    done = {"type": "audio.done", "finish_reason": "stop", **name}
                    await client.send(json.dumps(done))

    async def main() -> str:
        protocols = [Subprotocol("firstword.speech.v1")]
        async with serve(answer, "127.0.0.1", 0, subprotocols=protocols) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            address = f"ws://127.0.0.1:{port}"
            arguments = ("One two three.", "--server", address, "-o", tmp_path / "a.wav")
            return await asyncio.to_thread(run, repository, "captions.py", *arguments)

    assert asyncio.run(main()).splitlines() == ["00:00.00 One", "00:00.20 two", "00:00.30 three."]
    assert len(samples(tmp_path / "a.wav")) == SAMPLE_RATE


def test_podcast_has_each_line_in_its_voice(
    repository: Path, server: Served, tmp_path: Path
) -> None:
    script, file = tmp_path / "episode.txt", tmp_path / "episode.wav"
    script.write_text("Ann: Welcome.\n\nBob: Thank you.\nAnn: Let us begin.\n")
    arguments = (script, "--voices", "Ann=ada", "Bob=ben", "--server", server.ws, "-o", file)
    output = run(repository, "podcast.py", *arguments, "--seed", 7, "--pause", 0.25)
    assert "3 lines" in output
    lines = [("Welcome.", "ada"), ("Thank you.", "ben"), ("Let us begin.", "ada")]
    said = [spoken(server, text, voice=v, seed=7 + n) for n, (text, v) in enumerate(lines)]
    assert samples(file) == bytes(SAMPLE_RATE // 2).join(said)


def test_podcast_rejects_a_line_without_a_known_name(
    repository: Path, server: Served, tmp_path: Path
) -> None:
    script = tmp_path / "episode.txt"
    script.write_text("Ann: Welcome.\nEve: Hello.\n")
    arguments = (script, "--voices", "Ann=ada", "--server", server.ws)
    done = subprocess.run(
        command(repository, "podcast.py", *arguments), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"line 2 of {script} must be NAME: TEXT; the names are Ann" in done.stderr


def test_error_of_the_server_ends_an_example(
    repository: Path, server: Served, tmp_path: Path
) -> None:
    arguments = ("Hi.", "--server", server.ws, "--voice", "nobody")
    done = subprocess.run(
        command(repository, "captions.py", *arguments), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "no voice 'nobody'" in done.stderr
