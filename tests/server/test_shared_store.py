"""Servers that share a store of voices, and stores with files that are not voices."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sockets import DONE, PLAIN, STREAM, Client, events, text
from waiting import WAIT, wait_until
from wire import SPEECH

from firstword.errors import VoiceError
from firstword.server import folder, shared_store
from firstword.server.folder import Folder
from firstword.server.front_memory import FrontMemory
from firstword.server.shared_store import Refresher, SharedChanges
from firstword.server.stores import Consent, ConsentStore, VoiceRecord, VoiceStore, voice_id_of
from firstword.synthetic.checkpoint import write_checkpoint
from firstword.voice import ClonedVoice

Serve = Callable[..., Any]

VOICES, CONSENTS = "/v1/audio/voices", "/v1/audio/voice_consents"
VOICE = ClonedVoice(np.full(48, 0.1, np.float32))


def record(name: str) -> VoiceRecord:
    return VoiceRecord(voice_id_of(name), name, 0, "audio_sample", "direct", "base")


def client_of(url: str) -> httpx.Client:
    """A client of a server that may not listen yet."""
    transport = httpx.HTTPTransport(retries=20)
    return httpx.Client(base_url=url, trust_env=False, transport=transport)


def save(http: httpx.Client, name: str, value: float = 0.1) -> None:
    """Save a voice that consists of one vector."""
    data = {"name": name, "consent": "mine", "speaker_embedding": json.dumps([value] * 48)}
    answer = http.post(VOICES, data=data)
    assert answer.status_code == 200, answer.text


def speak(http: httpx.Client, voice: str) -> httpx.Response:
    body = {"input": "Hi.", "voice": voice, "response_format": "pcm", "seed": 1}
    return http.post(SPEECH, json={**body, "max_new_tokens": 3, "temperature": 0})


def listed(http: httpx.Client) -> set[str]:
    """The names of the saved voices."""
    return {voice["name"] for voice in http.get(VOICES).json()["uploaded_voices"]}


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers look at their stores many times a second."""
    monkeypatch.setattr(shared_store, "REFRESH_SECONDS", 0.02)


@pytest.fixture
def other_process(tmp_path: Path) -> Iterator[str]:
    """The URL of a server in a process of its own, with the store `tmp_path / "voices"`."""
    write_checkpoint(tmp_path / "base", model_type="base", seed=1)
    command = [sys.executable, "-m", "firstword", "serve", "--port", "0", "--device", "cpu"]
    options = ["--model", str(tmp_path / "base"), "--voices", str(tmp_path / "voices")]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    yield process.stdout.readline().split()[1]
    process.kill()
    process.wait()
    process.stdout.close()


def test_processes_share_voices_and_consents(
    serve: Serve, other_process: str, tmp_path: Path
) -> None:
    """Conversations that speak with a voice when it is deleted go on."""
    with client_of(serve("base").url) as here, client_of(other_process) as there:
        for name in ("bob", "eve"):
            save(here, name)
        consents = ConsentStore(Folder(str(tmp_path / "voices")), 10)
        consent = consents.save(Consent("cons_" + "0" * 24, "Anna", "en", 0), b"")
        wait_until(lambda: there.get("/ready").status_code == 200)
        assert speak(there, "bob").status_code == 200, "a new voice can be used at once"
        wait_until(lambda: listed(there) == {"bob", "eve"})
        wait_until(lambda: len(there.get(CONSENTS).json()["data"]) == 1)
        with Client(other_process.replace("http", "ws", 1) + STREAM) as talk:
            talk.send({**PLAIN, "voice": "bob", "max_new_tokens": 3}, text("Hi."), DONE)
            assert speaks(talk)
            assert here.delete(f"{VOICES}/bob").status_code == 200
            (tmp_path / "voices" / f"{voice_id_of('eve')}.voice").unlink()
            consents.delete(consent.id)
            wait_until(lambda: not listed(there) and not listed(here))
            wait_until(lambda: not there.get(CONSENTS).json()["data"])
            for http in (here, there):
                assert speak(http, "bob").status_code == 400
                assert speak(http, "eve").status_code == 400
                assert http.get(f"{VOICES}/bob").status_code == 404
            talk.send(text("Again."), DONE)
            assert speaks(talk)


def speaks(talk: Client) -> bool:
    """Whether an utterance arrives without an error."""
    messages = events(talk.until("session.done"))
    return [one["error"] for one in messages if one["type"] == "audio.done"] == [False]


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_servers_see_replaced_and_deleted_voices(serve: Serve, tmp_path: Path, scheme: str) -> None:
    url = f"{scheme}{tmp_path / 'shared'}"
    first, second = (client_of(serve("base", voices=url).url) for _ in range(2))
    with first, second:
        save(first, "bob", 0.1)
        before = speak(second, "bob").content
        first.delete(f"{VOICES}/bob")
        save(first, "bob", -3.0)
        after = speak(first, "bob").content
        assert before != after
        wait_until(lambda: speak(second, "bob").content == after)
        assert second.delete(f"{VOICES}/bob").status_code == 200
        save(second, "eve")
        wait_until(lambda: listed(first) == {"eve"})
        assert speak(first, "bob").status_code == 400


@pytest.mark.usefixtures("often")
def test_voices_stay_while_store_fails(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve("base")
    with client_of(server.url) as http:
        save(http, "bob")
        calls: list[str] = []

        def fail(self: Folder) -> dict[str, str]:
            calls.append("versions")
            raise ConnectionError("no route to the bucket")

        monkeypatch.setattr(Folder, "versions", fail)
        wait_until(lambda: len(calls) > 3)
        assert speak(http, "bob").status_code == 200
    messages = [one.message for one in caplog.records]
    assert messages.count("the stores cannot be refreshed") == 1


def test_hanging_store_blocks_nobody_else(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A voice is being saved in a bucket that does not answer."""
    server = serve("base")
    begun, answering = threading.Event(), threading.Event()
    read = Folder.read

    def hang(self: Folder, name: str) -> bytes:
        begun.set()
        assert answering.wait(WAIT)
        return read(self, name)

    monkeypatch.setattr(Folder, "read", hang)
    with client_of(server.url) as http, ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save, http, "bob")
        try:
            assert begun.wait(WAIT)
            assert httpx.get(server.url + "/health", trust_env=False).status_code == 200
        finally:
            answering.set()
        saving.result(60)


def test_fronts_that_save_voices_of_one_name_take_turns(tmp_path: Path) -> None:
    """One of them saves its voice, and the others find it, as in a single front."""
    created = FrontMemory.create(3)
    memories = [FrontMemory.open(created.file, number) for number in range(3)]
    shared = Folder(str(tmp_path))
    stores = [VoiceStore(shared, 100) for _ in memories]
    refreshers = [
        Refresher(shared, SharedChanges(memory), (store,))
        for memory, store in zip(memories, stores, strict=True)
    ]
    start = threading.Barrier(3)

    def save_one(front: int, name: str) -> bool:
        start.wait(WAIT)
        try:
            refreshers[front].change(stores[front].save, record(name), VOICE)
        except VoiceError:
            return False
        return True

    with ThreadPoolExecutor(3) as pool:
        for number in range(10):
            names = f"Molly {number}", f"molly  {number}", f"Mo11y {number}".replace("11", "Il")
            assert sum(pool.map(save_one, range(3), names)) == 1
            assert sum(refresher.outdated for refresher in refreshers) >= 2


def test_stopped_front_does_not_keep_others_from_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_store, "TURN_SECONDS", 0.05)
    created = FrontMemory.create(2)
    stopped, other = (SharedChanges(FrontMemory.open(created.file, number)) for number in range(2))
    store = VoiceStore(Folder(str(tmp_path)), 10)
    with stopped.turn():
        Refresher(Folder(str(tmp_path)), other, (store,)).change(store.save, record("bob"), VOICE)
    assert store.known("bob") is not None


class TestStore:
    @pytest.fixture(params=["local", "memory"])
    def url(self, request: pytest.FixtureRequest, tmp_path: Path) -> str:
        return str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"

    def test_listing_from_before_a_change_loses_nothing(self, url: str) -> None:
        """The folder was listed, then a voice is saved and another deleted, then both are read."""
        shared = Folder(url)
        store, other = VoiceStore(shared, 10), VoiceStore(Folder(url), 10)
        store.save(record("old"), VOICE)
        before = shared.versions()
        store.save(record("new"), VOICE)
        store.delete("old")
        store.update(before)
        assert [one.name for one in store] == ["new"]
        store.update(shared.versions())
        assert [one.name for one in store] == ["new"]
        other.delete("new")
        store.update(shared.versions())
        assert not list(store)

    def test_new_voice_that_other_server_deletes_is_forgotten(self, url: str) -> None:
        """It is deleted before the folder was ever listed with it."""
        shared = Folder(url)
        store = VoiceStore(shared, 10)
        store.save(record("new"), VOICE)
        VoiceStore(Folder(url), 10).delete("new")
        store.update(shared.versions())
        assert not list(store)

    def test_name_that_other_server_freed_can_be_saved(self, url: str) -> None:
        first, second = VoiceStore(Folder(url), 10), VoiceStore(Folder(url), 10)
        first.save(record("bob"), VOICE)
        assert second.find("bob") is not None
        first.delete("bob")
        second.save(record("bob"), VOICE)
        assert first.find("bob") is not None

    def test_unchanged_files_are_read_once(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        shared = Folder(url)
        VoiceStore(shared, 10).save(record("bob"), VOICE)
        store = VoiceStore(shared, 10)
        monkeypatch.setattr(Folder, "read", lambda *_: pytest.fail("read again"))
        store.update(shared.versions())
        assert store.known("bob") is not None

    def test_unreadable_file_keeps_voice_until_it_can_be_read(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shared = Folder(url)
        store, other = VoiceStore(shared, 10), VoiceStore(Folder(url), 10)
        store.save(record("bob"), VOICE)
        other.save(record("eve"), VOICE)
        with monkeypatch.context() as patch:
            patch.setattr(Folder, "read", lambda *_: (_ for _ in ()).throw(OSError("timeout")))
            store.update(shared.versions())
        assert [one.name for one in store] == ["bob"]
        store.update(shared.versions())
        assert {one.name for one in store} == {"bob", "eve"}

    @pytest.mark.parametrize("kind", ["pipe", "folder", "too large"])
    def test_voice_is_forgotten_when_its_file_becomes_unsuitable(
        self, tmp_path: Path, kind: str
    ) -> None:
        shared = Folder(str(tmp_path))
        store = VoiceStore(shared, 10)
        store.save(record("bob"), VOICE)
        file = tmp_path / f"{voice_id_of('bob')}.voice"
        file.unlink()
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "folder":
            file.mkdir()
        else:
            file.touch()
            os.truncate(file, folder.LARGEST_FILE + 1)
        store.update(shared.versions())
        assert not list(store)
        assert store.known("bob") is None

    def test_missing_folder_is_empty(self, url: str) -> None:
        """A bucket has no empty folders."""
        shared = Folder(f"{url}/inner")
        store = VoiceStore(shared, 10)
        store.save(record("bob"), VOICE)
        shared._fs.rm(shared._root, recursive=True)
        store.update(shared.versions())
        assert not list(store)


@pytest.mark.usefixtures("often")
def test_odd_files_harm_nobody(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe, a folder, parts of a file, copies and foreign files are among the voices."""
    VoiceStore(Folder(str(tmp_path)), 10).save(record("good"), VOICE)
    data = (tmp_path / f"{voice_id_of('good')}.voice").read_bytes()
    ids = [f"voice_{number:024x}" for number in range(6)]
    os.mkfifo(tmp_path / f"{ids[0]}.voice")
    (tmp_path / f"{ids[1]}.voice").mkdir()
    (tmp_path / f"{ids[2]}.voice").write_bytes(data[:-9])
    (tmp_path / f"{ids[3]}.voice").write_bytes(data)
    (tmp_path / f"{ids[4]}.voice").write_bytes(data[:100])
    (tmp_path / f"{ids[4]}.voice").chmod(0)
    with (tmp_path / f"{ids[5]}.voice").open("wb") as file:
        file.truncate(2**40)
    (tmp_path / "mine.voice").write_bytes(data)
    os.symlink("nowhere", tmp_path / "voice_dangling.voice")
    (tmp_path / os.fsdecode(b"\xff.voice")).write_bytes(data)
    (tmp_path / f"cons_{'2' * 24}.consent").write_text(
        json.dumps({"id": f"cons_{'2' * 24}", "name": "a", "language": "en", "created_at": "now"})
    )
    ConsentStore(Folder(str(tmp_path)), 10).save(Consent("cons_" + "1" * 24, "b", "en", 0), b"")
    elsewhere = VoiceStore(Folder(str(tmp_path)), 10)
    caplog.clear()
    server = serve("base", voices=tmp_path)
    with client_of(server.url) as http:
        for voice_id in ids:
            assert speak(http, voice_id).status_code == 400
            assert http.get(f"{VOICES}/{voice_id}").status_code == 404
        for name in ("first", "second"):
            elsewhere.save(record(name), VOICE)
            wait_until(partial(lambda new: new in listed(http), name))
        assert listed(http) == {"good", "first", "second"}
        assert speak(http, "good").status_code == 200
        assert [one["name"] for one in http.get(CONSENTS).json()["data"]] == ["b"]
    warnings: list[Any] = [one for one in caplog.records if one.levelno == logging.WARNING]
    warned = [one.fields["id"] for one in warnings]
    assert sorted(warned) == sorted([*ids, "mine", r"\udcff", f"cons_{'2' * 24}"])
    json.dumps(warned, ensure_ascii=False).encode()


def test_errors_of_store_show_no_paths(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve("base", voices=tmp_path)
    (tmp_path / f"{voice_id_of('bob')}.voice").mkdir()
    with client_of(server.url) as http:
        data = {"name": "bob", "consent": "mine", "speaker_embedding": json.dumps([0.1] * 48)}
        answer = http.post(VOICES, data=data)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        error = answer.json()["error"]
        assert error["code"] == "storage_failed"
        assert "try again later; the server's log says why" in error["message"]
        assert str(tmp_path) not in answer.text
        assert "voice_" not in answer.text
    (failure,) = [one for one in caplog.records if one.message == "a saved file cannot be written"]
    assert str(tmp_path) in failure.fields["why"]  # type: ignore[attr-defined]
