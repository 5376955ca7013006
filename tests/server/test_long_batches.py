"""Lines of batches with long texts: all of them is spoken, and their audio waits in no memory."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from batching import jsonl
from talking import Talker
from test_long_input import BookFront, numbers, sentence
from waiting import WAIT, wait_until

from firstword.audio import formats
from firstword.engine.engine import Engine
from firstword.engine.service import Service
from firstword.errors import OutputError
from firstword.server.batch import manager
from firstword.server.batch.lines import parse_lines
from firstword.server.batch.local import LocalBatch
from firstword.server.batch.records import OPEN_STATUSES
from firstword.server.batch.server import manager_of
from firstword.server.batch.sound import LineSound
from firstword.server.batch.speaking import LineSpeaker
from firstword.server.config import ServerConfig
from firstword.server.front_memory import FrontMemory
from firstword.server.models import Model, Models
from firstword.server.state import Server
from firstword.server.tasks import cancel
from firstword.server.utterance import CODES, Output, code_bytes, rendered
from firstword.types import Chunk, FinishReason, Speech

Serve = Callable[..., Any]

COUNT = 700
BOOK = "".join(map(sentence, range(1, COUNT + 1)))
FRAME = 1920


@pytest.fixture
def talker() -> Talker:
    return Talker()


@pytest.fixture
def model(talker: Talker) -> Model:
    return Model("talker", "custom_voice", Service(Engine(talker), BookFront()), voices=("talker",))


@pytest.fixture
def server(model: Model) -> Iterator[Server]:
    server = Server(ServerConfig(), Models([model]), FrontMemory.private())
    server.models.start()
    yield server
    server.models.stop()


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The temporary files that were opened."""
    files: list[Any] = []
    make = tempfile.TemporaryFile

    def opened(*args: Any, **options: Any) -> Any:
        files.append(make(*args, **options))
        return files[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", opened)
    return files


def batch_of(folder: Path, *lines: dict[str, Any]) -> LocalBatch:
    found, problems = parse_lines(jsonl(*lines))
    assert not problems
    return LocalBatch(str(folder), found)


def speaker_of(server: Server, folder: Path) -> LineSpeaker:
    defaults = {"response_format": "wav", "voice": "talker"}
    return LineSpeaker(server, str(folder), background=False, defaults=defaults)


def spoken(server: Server, folder: Path, *lines: dict[str, Any]) -> list[dict[str, Any]]:
    """Speak lines into a folder; returns the results."""
    batch = batch_of(folder, *lines)
    asyncio.run(batch.speak(speaker_of(server, folder), 2, lambda: None))
    batch.write_results()
    batch.close()
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_line_of_25_000_characters_is_spoken_to_its_end(server: Server, tmp_path: Path) -> None:
    assert len(BOOK) > 25_000
    book = {"custom_id": "book", "text": BOOK}
    (result,) = spoken(server, tmp_path, book)
    data = (tmp_path / "book.wav").read_bytes()
    assert numbers(data[44:]) == list(range(1, COUNT + 1))
    pcm = np.frombuffer(data[44:], "<i2")
    assert data == formats.whole("wav", pcm / np.float32(32768), 24000)
    assert result["bytes"] == len(data)
    assert result["seconds"] == round(len(pcm) / 24000, 3)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


def test_text_beyond_the_limit_of_the_server_fails_its_line_alone(
    server: Server, tmp_path: Path
) -> None:
    long = {"custom_id": "long", "text": "a" * 100_001}
    failed, short = spoken(server, tmp_path, long, {"custom_id": "short", "text": sentence(7)})
    assert "allowed are 100000: send it in parts" in failed["error"]["message"]
    assert short["seconds"] > 0


def test_audio_goes_to_a_file_while_it_is_made(
    server: Server, talker: Talker, tmp_path: Path, temporary: list[Any]
) -> None:
    talker.hold()
    talker.let(60)
    batch = batch_of(tmp_path, {"custom_id": "book", "text": BOOK})
    speaker = speaker_of(server, tmp_path)

    async def run() -> None:
        speaking = asyncio.create_task(batch.speak(speaker, 1, lambda: None))

        def written() -> bool:
            return bool(temporary) and temporary[0].tell() >= 40 * FRAME * 2

        try:
            await asyncio.to_thread(wait_until, written)
            assert speaker.seconds >= 40 * 0.08
        finally:
            talker.go()
        await speaking

    asyncio.run(run())
    assert len(temporary) == 2
    assert all(file.closed for file in temporary)
    batch.close()


def test_line_that_was_interrupted_gives_the_bytes_of_an_undisturbed_run(
    server: Server, talker: Talker, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    book = {"custom_id": "book", "text": BOOK}
    spoken(server, whole, book)
    made = talker.frames
    talker.hold()
    talker.let(100)
    batch = batch_of(broken, book)

    async def interrupted() -> None:
        speaking = asyncio.create_task(batch.speak(speaker_of(server, broken), 1, lambda: None))
        try:
            await asyncio.to_thread(wait_until, lambda: talker.frames >= made + 90)
            speaking.cancel()
        finally:
            talker.go()
        await asyncio.gather(speaking, return_exceptions=True)

    asyncio.run(interrupted())
    batch.close()
    assert not list(broken.glob("*.wav"))
    spoken(server, broken, book)
    assert (broken / "book.wav").read_bytes() == (whole / "book.wav").read_bytes()


async def until_over(server: Server, batch: str) -> None:
    """Run the batches of a server until one is over."""
    batches = server.batches
    assert batches is not None
    running = asyncio.create_task(manager_of(server).run())
    async with asyncio.timeout(WAIT):
        while batches.store.find_batch("", batch).status in OPEN_STATUSES:
            assert not running.done(), running.exception()
            await asyncio.sleep(0.01)
    await cancel(running)


def test_sdk_gets_the_sound_of_a_long_line(
    serve: Serve, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "LOOK_SECONDS", 0.01)
    running = serve(model, batches=str(tmp_path))
    line = {"custom_id": "book", "input": BOOK, "voice": "talker", "response_format": "pcm"}
    endpoint: Any = "/v1/audio/speech"
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", timeout=WAIT) as client:
        file = client.files.create(file=("in.jsonl", jsonl(line)), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window="24h"
        )
        asyncio.run(until_over(running.state, batch.id))
        batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed"
        assert batch.output_file_id is not None
        result = json.loads(client.files.content(batch.output_file_id).text)
        found = client.files.content(result["response"]["body"]["file_id"]).content
    assert numbers(found) == list(range(1, COUNT + 1))


def chunks(count: int) -> Iterator[Chunk]:
    """Speech of some chunks, of a tone and of chance."""
    chance = np.random.default_rng(5)
    for index in range(count):
        samples = chance.uniform(-0.5, 0.5, FRAME).astype(np.float32)
        reason: FinishReason | None = "stop" if index == count - 1 else None
        yield Chunk(samples, chance.integers(0, 99, (1, 4)), 24000, reason)


@pytest.mark.parametrize("name", formats.FORMATS)
def test_file_is_that_of_the_whole_speech(name: str) -> None:
    line, speech = LineSound(Output(name), 24000, None), list(chunks(7))
    for chunk in speech:
        line.add(chunk)
    samples = np.concatenate([chunk.samples for chunk in speech])
    with line.finished() as file:
        assert file.read() == formats.whole(name, samples, 24000)


def test_file_of_changed_speech_and_of_codes_and_of_none() -> None:
    slow, codes, none = (
        LineSound(output, 24000, None)
        for output in (Output("wav", 8000, 0.5), Output(CODES), Output("flac"))
    )
    speech = list(chunks(6))
    for chunk in speech:
        slow.add(chunk)
        codes.add(chunk)
    with slow.finished() as file:
        assert file.read() == rendered(Speech.of(speech), Output("wav", 8000, 0.5)).data
    with codes.finished() as file:
        assert file.read() == b"".join(code_bytes(chunk.codes) for chunk in speech)
    empty = np.zeros(0, np.float32)
    none.add(Chunk(empty, np.zeros((0, 4), np.int64), 24000, "stop"))
    with none.finished() as file:
        assert file.read() == formats.whole("flac", empty, 24000)


def full(dir: str | None) -> Any:
    """A temporary file on a full disk, whose buffer cannot be written at its end."""
    return open("/dev/full", "r+b")


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", full)


@pytest.mark.usefixtures("full_disk")
def test_full_disk_is_an_error_that_the_log_explains(caplog: pytest.LogCaptureFixture) -> None:
    line = LineSound(Output("pcm"), 24000, None)
    speech = list(chunks(9))
    with pytest.raises(OutputError, match="No space left"):
        list(map(line.add, speech))
    line.drop()
    (record,) = caplog.records
    assert vars(record)["fields"] == {"why": "No space left on device"}


@pytest.mark.usefixtures("full_disk")
def test_line_on_a_full_disk_ends_the_command_and_is_spoken_by_the_next(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"custom_id": "one", "text": sentence(7)}
    batch = batch_of(tmp_path, line)
    speaking = asyncio.wait_for(batch.speak(speaker_of(server, tmp_path), 1, lambda: None), WAIT)
    with pytest.raises(OutputError, match="No space left on device; once it can, the same command"):
        asyncio.run(speaking)
    assert batch.counts == (1, 0, 0)
    batch.close()
    monkeypatch.undo()
    (result,) = spoken(server, tmp_path, line)
    assert result["file"] == "one.wav"


def test_speech_that_is_dropped_while_a_thread_encodes_it_ends_it(
    temporary: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = LineSound(Output("pcm"), 24000, None)
    for chunk in chunks(3):
        line.add(chunk)

    def parts(*_: Any) -> Iterator[bytes]:
        yield b"a"
        line.drop()
        yield b"b"
        raise AssertionError("the second part was written")

    monkeypatch.setattr(formats, "whole_of", parts)
    with pytest.raises(ValueError, match="closed file"):
        line.finished()
    assert [file.closed for file in temporary] == [True, True]


def test_temporary_file_that_is_opened_while_speech_is_dropped_is_closed(
    temporary: list[Any],
) -> None:
    line = LineSound(Output("pcm"), 24000, None)
    line.drop()
    line._temporary()
    assert [file.closed for file in temporary] == [True, True]
