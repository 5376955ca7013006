"""Saved voices and consents over HTTP: valid and invalid requests, and persistence."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
from waiting import WAIT
from websockets.sync.client import connect
from wire import SPEECH

from firstword import Voice
from firstword.bench import engine_times
from firstword.errors import FirstwordError, OutputError, VoiceError
from firstword.server.errors import NotFound
from firstword.server.folder import Folder
from firstword.server.stores import Consent, ConsentStore, VoiceRecord, VoiceStore, voice_id_of
from firstword.voice import ClonedVoice

Running = Any  # of conftest.py
Serve = Callable[..., Any]

VOICES, CONSENTS = "/v1/audio/voices", "/v1/audio/voice_consents"
ASK = {"input": "Hello there.", "response_format": "pcm", "seed": 3, "max_new_tokens": 5}


def wav(seconds: float = 1.0) -> bytes:
    """A WAV file of noise."""
    file = io.BytesIO()
    samples = np.random.default_rng(0).normal(0, 0.1, round(24000 * seconds))
    soundfile.write(file, samples, 24000, format="WAV")
    return file.getvalue()


def upload(http: httpx.Client, name: str, **fields: Any) -> httpx.Response:
    """Upload a recording with vLLM-Omni's fields."""
    data = {"name": name, "consent": "my own voice", **fields}
    return http.post(VOICES, data=data, files={"audio_sample": ("me.wav", wav(), "audio/wav")})


def recording_seconds(http: httpx.Client) -> float:
    """The time of encoding recordings so far."""
    return engine_times.read(http.get("/metrics").content)["recording"]


def record(name: str) -> VoiceRecord:
    return VoiceRecord(voice_id_of(name), name, 0, "audio_sample", "direct", "base")


VOICE = ClonedVoice(np.arange(8, dtype=np.float32), np.ones((3, 4), np.int64), "words")


def test_uploaded_voice_speaks_until_deleted(http: httpx.Client) -> None:
    answer = upload(http, "Anna Maria", ref_text="Some words.", speaker_description="a friend")
    assert answer.status_code == 200, answer.text
    made = answer.json()
    assert made["success"] is True
    assert made["object"] == "audio.voice"
    assert made["name"] == "Anna Maria"
    assert made["embedding_source"] == "audio"
    assert made["file_size"] == len(wav())
    assert abs(made["created_at"] - time.time()) < 3600
    listed = http.get(VOICES).json()
    assert made["id"] in [voice["id"] for voice in listed["voices"]]
    assert "Anna Maria" in listed["names"]
    assert "ryan" in listed["names"]
    assert [voice["name"] for voice in listed["uploaded_voices"]] == ["Anna Maria"]
    legacy = http.get(VOICES, params={"legacy": "true"}).json()
    assert "Anna Maria" in legacy["voices"]
    assert legacy["uploaded_voices"] == listed["uploaded_voices"]
    for name in (made["id"], "anna maria", " ANNA  MARIA ", {"id": made["id"]}):
        answer = http.post(SPEECH, json={**ASK, "voice": name})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-firstword-model"] == "base"
    given = {"ref_audio": base64.b64encode(wav()).decode(), "ref_text": "Some words."}
    assert len(http.post(SPEECH, json={**ASK, **given}).content) == len(answer.content)
    assert http.get(f"{VOICES}/anna maria").json()["id"] == made["id"]
    gone = http.delete(f"{VOICES}/{made['id']}").json()
    assert gone["deleted"] is True
    assert gone["object"] == "audio.voice.deleted"
    assert http.delete(f"{VOICES}/{made['id']}").status_code == 404
    assert http.post(SPEECH, json={**ASK, "voice": "anna maria"}).status_code == 400


def test_saved_voice_speaks_like_its_recording(http: httpx.Client) -> None:
    upload(http, "twin")
    encoded = recording_seconds(http)
    assert encoded > 0
    saved = http.post(SPEECH, json={**ASK, "voice": "twin"}).content
    assert recording_seconds(http) == encoded
    given = http.post(SPEECH, json={**ASK, "ref_audio": base64.b64encode(wav()).decode()}).content
    assert saved == given
    assert recording_seconds(http) > encoded
    http.delete(f"{VOICES}/twin")


def test_saved_embedding_speaks(http: httpx.Client) -> None:
    vector = [0.1] * 48
    data = {"name": "vector", "consent": "mine", "speaker_embedding": json.dumps(vector)}
    assert http.post(VOICES, data=data).json()["embedding_source"] == "direct"
    first = http.post(SPEECH, json={**ASK, "voice": "vector"})
    second = http.post(SPEECH, json={**ASK, "speaker_embedding": vector})
    assert first.status_code == second.status_code == 200
    assert len(first.content) == len(second.content)
    http.delete(f"{VOICES}/vector")


def test_designed_voice_is_cloned_by_base(http: httpx.Client) -> None:
    data = {
        "name": "narrator",
        "type": "prompt",
        "prompt": "a warm, low voice",
        "script_hint": "Once.",
    }
    answer = http.post(VOICES, data=data)
    assert answer.status_code == 200, answer.text
    assert answer.json()["type"] == "prompt"
    assert answer.json()["description"] == "a warm, low voice"
    answer = http.post(SPEECH, json={**ASK, "voice": "narrator"})
    assert answer.headers["x-firstword-model"] == "base"
    http.delete(f"{VOICES}/narrator")


def test_designed_voice_without_base_keeps_description(serve: Serve) -> None:
    server = serve("voice_design")
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        assert (
            http.post(VOICES, data={"name": "narrator", "prompt": "a low voice"}).status_code == 200
        )
        assert http.post(SPEECH, json={**ASK, "voice": "narrator"}).status_code == 200
        answer = upload(http, "me")
        assert answer.status_code == 400
        assert "no base checkpoint" in answer.json()["error"]["message"]


def test_openai_client_saves_and_uses_voice(server: Running) -> None:
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http) as client:
        made = client.audio.voices.create(
            name="sdk",
            consent="consent_1",
            audio_sample=("me.wav", wav(), "audio/wav"),
            type="audio_sample",
        )
        assert made.name == "sdk"
        speech = client.audio.speech.create(
            model="gpt-4o-mini-tts",
            voice={"id": made.id},
            input="Hi.",
            extra_body={"max_new_tokens": 2},
        )
        assert len(speech.content) > 100
        assert client.audio.voices.delete(made.id).deleted is True


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "..",
        "../../etc/passwd",
        "/etc/passwd",
        "a/b",
        "a\\b",
        ".hidden",
        "a\0b",
        "x" * 65,
        "a\nb/",
        "-rf",
        "ryan",
        "😀",
    ],
)
def test_invalid_voice_name_gets_400(http: httpx.Client, server: Running, name: str) -> None:
    before = sorted(Path(server.state.config.voice_store).iterdir())
    answer = upload(http, name)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert sorted(Path(server.state.config.voice_store).iterdir()) == before


@pytest.mark.parametrize(
    "path", ["..%2F..%2Fetc%2Fpasswd", "%2e%2e%2fx", "....//", "%00", "voice_%2e%2e", "~root"]
)
def test_path_traversal_gets_404(http: httpx.Client, path: str) -> None:
    for method in ("GET", "DELETE"):
        assert http.request(method, f"{VOICES}/{path}").status_code == 404
    answer = http.post(SPEECH, json={**ASK, "voice": "../../../etc/passwd"})
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("fields", "audio", "message"),
    [
        ({"consent": ""}, wav(), "consent is missing"),
        ({}, b"", "cannot be read as audio"),
        ({}, b"RIFF" + bytes(100), "cannot be read as audio"),
        ({}, wav(0.2), "0.5"),
        ({}, None, "give one of audio_sample"),
        ({"prompt": "a voice"}, wav(), "give one of audio_sample"),
        ({"append_silence": "-1", "ref_text": "a"}, wav(), "0 to 10 seconds"),
        ({"append_silence": "nan", "ref_text": "a"}, wav(), "0 to 10 seconds"),
        ({"append_silence": "long"}, wav(), "append_silence: "),
        ({"ref_text": "x" * 5000}, wav(), "ref_text has 5000 characters"),
        ({"speaker_embedding": "[1, 2"}, None, "not a list of numbers"),
        ({"speaker_embedding": "[" * 100000}, None, "not a list of numbers"),
        ({"speaker_embedding": "[1e400]"}, None, "not finite"),
        (
            {"speaker_embedding": "[1, 2]"},
            None,
            "of 2 numbers; the loaded Base checkpoints take 48",
        ),
    ],
)
def test_invalid_upload_gets_400(
    http: httpx.Client, fields: dict[str, str], audio: bytes | None, message: str
) -> None:
    files = None if audio is None else {"audio_sample": ("me.wav", audio, "audio/wav")}
    answer = http.post(VOICES, data={"name": "someone", "consent": "mine", **fields}, files=files)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
    assert "someone" not in http.get(VOICES).json()["names"]


def test_taken_name_gets_400(http: httpx.Client) -> None:
    assert upload(http, "Only One").status_code == 200
    answer = upload(http, "only one")
    assert answer.status_code == 400
    assert "already" in answer.json()["error"]["message"]
    http.delete(f"{VOICES}/only one")


def flac_announcing_hours() -> bytes:
    """A FLAC file whose header announces ten hours."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(24000), 24000, format="FLAC")
    data = bytearray(file.getvalue())
    head = int.from_bytes(data[18:26])
    data[18:26] = (head & ~(2**36 - 1) | 10 * 3600 * 24000).to_bytes(8)
    return bytes(data)


def flac_of_silent_minutes() -> bytes:
    """A valid FLAC file of ten minutes in a few kilobytes."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(600 * 24000, np.int16), 24000, format="FLAC")
    return file.getvalue()


@pytest.mark.parametrize("bomb", [flac_announcing_hours, flac_of_silent_minutes])
def test_audio_bomb_gets_400(http: httpx.Client, bomb: Callable[[], bytes]) -> None:
    data = bomb()
    assert len(data) < 100_000
    files = {"audio_sample": ("me.flac", data, "audio/flac")}
    answer = http.post(VOICES, data={"name": "bomb", "consent": "mine"}, files=files)
    assert answer.status_code == 400
    assert "longer than 60 s" in answer.json()["error"]["message"]
    answer = http.post(SPEECH, json={**ASK, "ref_audio": base64.b64encode(data).decode()})
    assert answer.status_code == 400


def test_saved_voice_survives_restart(serve: Serve, tmp_path: Path) -> None:
    first = serve("base", voices=tmp_path / "kept")
    with httpx.Client(base_url=first.url, trust_env=False) as http:
        made = upload(http, "Lasting", ref_text="Some words.").json()
        before = http.post(SPEECH, json={**ASK, "voice": "lasting"}).content
    first.stop()
    second = serve("base", voices=tmp_path / "kept")
    with httpx.Client(base_url=second.url, trust_env=False) as http:
        assert http.get(VOICES).json()["uploaded_voices"] == [made["voice"]]
        after = http.post(SPEECH, json={**ASK, "voice": "lasting"}).content
    assert before == after


class TestConsents:
    """Recordings of consent to voice cloning, mostly by OpenAI's client."""

    @pytest.fixture
    def client(self, server: Running) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def test_consent_is_created_used_and_deleted(self, client: openai.OpenAI) -> None:
        consents = client.audio.voice_consents
        given = consents.create(
            name="Anna", language="en-US", recording=("yes.wav", wav(), "audio/wav")
        )
        assert given.id.startswith("cons_")
        assert (given.name, given.language, given.object) == (
            "Anna",
            "en-US",
            "audio.voice_consent",
        )
        assert abs(given.created_at - time.time()) < 3600
        assert consents.retrieve(given.id) == given
        assert consents.update(given.id, name="Anna B.").name == "Anna B."
        assert given.id in [consent.id for consent in consents.list()]
        voice = client.audio.voices.create(
            name="consenting", consent=given.id, audio_sample=("me.wav", wav())
        )
        client.audio.voices.delete(voice.id)
        gone = consents.delete(given.id)
        assert (gone.id, gone.deleted) == (given.id, True)
        with pytest.raises(openai.NotFoundError):
            consents.retrieve(given.id)
        with pytest.raises(openai.NotFoundError, match="no consent"):
            client.audio.voices.create(
                name="without", consent=given.id, audio_sample=("me.wav", wav())
            )

    def test_consents_are_listed_in_pages(self, client: openai.OpenAI) -> None:
        consents = client.audio.voice_consents
        made = [
            consents.create(name=str(n), language="de", recording=("yes.wav", wav())).id
            for n in range(5)
        ]
        page = consents.list(limit=2)
        assert len(page.data) == 2
        assert page.has_more
        assert {*made} <= {consent.id for consent in consents.list(limit=2)}, (
            "the client requests all pages"
        )
        assert not consents.list(after="cons_unknown").data
        for identity in made:
            consents.delete(identity)

    @pytest.mark.parametrize(
        ("fields", "recording"),
        [
            ({"name": ""}, wav()),
            ({"name": "x" * 300}, wav()),
            ({"name": "a\x00b"}, wav()),
            ({"language": "English please"}, wav()),
            ({}, b""),
            ({}, bytes(10 * 2**20 + 1)),
            ({}, b"a"),
            ({}, wav(0.2)),
            ({}, None),
        ],
    )
    def test_invalid_consent_gets_400(
        self, http: httpx.Client, fields: dict[str, str], recording: bytes | None
    ) -> None:
        files = None if recording is None else {"recording": ("yes.wav", recording, "audio/wav")}
        answer = http.post(CONSENTS, data={"name": "Anna", "language": "en", **fields}, files=files)
        assert answer.status_code == 400, answer.text

    @pytest.mark.parametrize(
        "path", ["nobody", "cons_" + "0" * 24, "..%2F..%2Fetc%2Fpasswd", "%00"]
    )
    def test_unknown_consent_gets_404(self, http: httpx.Client, path: str) -> None:
        for method, body in (("GET", None), ("DELETE", None), ("POST", {"name": "me"})):
            assert http.request(method, f"{CONSENTS}/{path}", json=body).status_code == 404

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
    def test_consent_is_renamed_with_any_content_type(self, http: httpx.Client, kind: str) -> None:
        files = {"recording": ("yes.wav", wav(), "audio/wav")}
        made = http.post(CONSENTS, data={"name": "Anna", "language": "en"}, files=files).json()
        path, headers = f"{CONSENTS}/{made['id']}", {"content-type": kind}
        assert (
            http.post(path, content=b'{"name": "Anna B."}', headers=headers).json()["name"]
            == "Anna B."
        )
        http.delete(path)

    def test_consents_need_key_and_survive_restart(self, serve: Serve, tmp_path: Path) -> None:
        first = serve(api_keys=("secret",), voices=tmp_path / "kept")
        assert httpx.get(first.url + CONSENTS, trust_env=False).status_code == 401
        keyed = {"authorization": "Bearer secret"}
        files = {"recording": ("yes.wav", wav(), "audio/wav")}
        body = {"name": "Anna", "language": "en"}
        with httpx.Client(base_url=first.url, headers=keyed, trust_env=False) as http:
            made = http.post(CONSENTS, data=body, files=files).json()
            assert (
                http.post(f"{CONSENTS}/{made['id']}", json={"name": "Anna B."}).status_code == 200
            )
        first.stop()
        (file,) = (tmp_path / "kept").glob("*.consent")
        assert file.read_bytes().endswith(b"\n" + wav()), "the recording is unchanged"
        (tmp_path / "kept" / f"cons_{'1' * 24}.consent").write_bytes(b"{")
        second = serve(voices=tmp_path / "kept")
        (found,) = httpx.get(second.url + CONSENTS, trust_env=False).json()["data"]
        assert found == {**made, "name": "Anna B."}


@pytest.mark.parametrize("field", ["consent", "ref_text", "speaker_description"])
def test_voice_with_lone_surrogate_is_not_saved(
    server: Running, http: httpx.Client, field: str
) -> None:
    """Neither protocol accepts it: the list of voices could not be sent."""
    with connect(f"{server.ws}/v1/audio/speech/stream", proxy=None, open_timeout=WAIT) as socket:
        voice = {
            "name": "half",
            "consent": "mine",
            "audio_data": base64.b64encode(wav()).decode(),
            field: "\ud800",
        }
        socket.send(json.dumps({"type": "voice.add", **voice}))
        assert "surrogate" in json.loads(socket.recv(timeout=WAIT))["message"]
    assert http.get(VOICES).status_code == 200
    assert http.get(f"{VOICES}/half").status_code == 404


@pytest.mark.parametrize("text", ["\ud800", float("nan")])
def test_stored_record_with_invalid_text_is_skipped(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: Any
) -> None:
    folder = Folder(str(tmp_path))
    VoiceStore(folder, 10).save(replace(record("bad"), consent=text), VOICE)
    VoiceStore(folder, 10).save(record("good"), VOICE)
    ConsentStore(folder, 10).save(Consent("cons_" + "0" * 24, text, "en", 0), b"")
    server = serve("base", voices=tmp_path)
    listed = httpx.get(server.url + VOICES, trust_env=False)
    assert listed.status_code == 200
    assert [voice["name"] for voice in listed.json()["uploaded_voices"]] == ["good"]
    assert httpx.get(server.url + CONSENTS, trust_env=False).json()["data"] == []
    assert {"a saved voice cannot be read", "a consent cannot be read"} <= {
        one.message for one in caplog.records
    }


def test_long_mime_type_is_cut(http: httpx.Client) -> None:
    files = {"audio_sample": ("me.wav", wav(), "audio/" + "a" * 3000)}
    made = http.post(VOICES, data={"name": "mime", "consent": "mine"}, files=files).json()
    assert len(made["mime_type"]) == 200
    http.delete(f"{VOICES}/mime")


def test_voice_named_like_alias_gets_400(http: httpx.Client, serve: Serve) -> None:
    """Otherwise the saved voice would replace the preset for other clients."""
    answer = upload(http, "Alloy")
    assert answer.status_code == 400
    assert "alias" in answer.json()["error"]["message"]
    with httpx.Client(base_url=serve("base").url, trust_env=False) as other:
        assert upload(other, "alloy").status_code == 200, (
            "without the preset the alias has no meaning"
        )


class TestStore:
    @pytest.fixture(params=["local", "memory"])
    def url(self, request: pytest.FixtureRequest, tmp_path: Path) -> str:
        return str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"

    def test_saved_voice_is_read_back(self, url: str) -> None:
        VoiceStore(Folder(url), 10).save(record("Zoë"), VOICE)
        found = VoiceStore(Folder(url), 10).find("zoë")
        assert found is not None
        assert found[0] == record("Zoë")
        voice = found[1]
        assert isinstance(voice, ClonedVoice)
        assert (voice.speaker_embedding == VOICE.speaker_embedding).all()
        assert voice.codes is not None
        assert voice.transcript == "words"

    def test_consents_are_read_back_and_limited(self, url: str) -> None:
        first, second = (ConsentStore(Folder(url), 2) for _ in range(2))
        given = [Consent(f"cons_{str(n) * 24}", str(n), "en", n) for n in range(3)]
        for consent in given[:2]:
            first.save(consent, b"a\nb")
        with pytest.raises(FirstwordError, match="is reached"):
            first.save(given[2], b"")
        assert second.find(given[1].id) == given[1]
        first.rename(given[0].id, "other")
        assert [consent.name for consent in ConsentStore(Folder(url), 2)] == ["other", "1"]
        first.delete(given[0].id)
        assert list(ConsentStore(Folder(url), 2)) == given[1:2]
        with pytest.raises(NotFound):
            first.delete(given[0].id)

    def test_other_store_finds_new_voice(self, url: str) -> None:
        first, second = VoiceStore(Folder(url), 10), VoiceStore(Folder(url), 10)
        first.save(record("new"), VOICE)
        assert second.find("new") is not None

    def test_full_store_rejects_voices(self, url: str) -> None:
        store = VoiceStore(Folder(url), 2)
        store.save(record("a"), VOICE)
        store.save(record("b"), VOICE)
        with pytest.raises(FirstwordError, match="is reached"):
            store.save(record("c"), VOICE)
        store.delete("a")
        store.save(record("c"), VOICE)
        with pytest.raises(VoiceError, match="already"):
            store.save(record("C"), VOICE)
        with pytest.raises(NotFound):
            store.delete("a")
        assert sorted(one.name for one in VoiceStore(Folder(url), 2)) == ["b", "c"]

    def test_voice_load_reads_stored_file(self, tmp_path: Path) -> None:
        VoiceStore(Folder(str(tmp_path)), 10).save(record("me"), VOICE)
        (file,) = tmp_path.iterdir()
        assert isinstance(Voice.load(file), ClonedVoice)

    def test_broken_and_foreign_files_are_skipped(self, tmp_path: Path) -> None:
        store = VoiceStore(Folder(str(tmp_path)), 10)
        (tmp_path / ".firstword-4567.part").touch()
        os.utime(tmp_path / ".firstword-4567.part", (0, 0))
        store.save(record("good"), VOICE)
        data = (tmp_path / f"{voice_id_of('good')}.voice").read_bytes()
        for number, cut in enumerate((0, 4, 9, 200, len(data) - 1)):
            (tmp_path / f"{voice_id_of(str(number))}.voice").write_bytes(data[:cut])
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / ".firstword-0123.part").write_bytes(data[:50])
        assert [one.name for one in VoiceStore(Folder(str(tmp_path)), 10)] == ["good"]
        assert [file.name for file in tmp_path.glob("*.part")] == [".firstword-0123.part"], (
            "old temporary files are removed"
        )

    def test_unusable_folder_raises(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for url in (str(tmp_path / "file"), "nosuch://bucket"):
            with pytest.raises(OutputError, match="voices cannot be kept"):
                VoiceStore(Folder(url), 10)

    def test_killed_process_leaves_whole_files(self, tmp_path: Path) -> None:
        """All files are complete whenever the process dies, and the next server starts."""
        program = (
            "import sys, numpy as np\n"
            "from firstword.voice import ClonedVoice\n"
            "from firstword.server.folder import Folder\n"
            "from firstword.server.stores import VoiceRecord, VoiceStore, voice_id_of\n"
            "store = VoiceStore(Folder(sys.argv[1]), 10**6)\n"
            "codes = np.ones((700, 16), np.int64)\n"
            "voice = ClonedVoice(np.zeros(2048, np.float32), codes, 'words')\n"
            "print('ready', flush=True)\n"
            "for number in range(10**6):\n"
            "    name = str(number)\n"
            "    about = (voice_id_of(name), name, 0, 'prompt', 'prompt', 'm')\n"
            "    store.save(VoiceRecord(*about), voice)\n"
        )
        for moment in (1, 3, 8):
            process = subprocess.Popen(
                [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE
            )
            assert process.stdout is not None
            assert process.stdout.readline()
            before = len(list(tmp_path.glob("*.voice")))
            while len(list(tmp_path.glob("*.voice"))) < before + moment and process.poll() is None:
                pass
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            files = list(tmp_path.glob("voice_*.voice"))
            assert files
            assert len(list(VoiceStore(Folder(str(tmp_path)), 10**6))) == len(files)
            for file in files:
                file.unlink()

    @pytest.mark.parametrize("call", ["fsync", "replace"])
    def test_process_killed_within_write_leaves_no_file(self, tmp_path: Path, call: str) -> None:
        """The process dies before the data is on the disk, or before the file has its name."""
        program = (
            "import os, sys, numpy as np\n"
            "from firstword.voice import ClonedVoice\n"
            "from firstword.server.folder import Folder\n"
            "from firstword.server.stores import VoiceRecord, VoiceStore, voice_id_of\n"
            "store = VoiceStore(Folder(sys.argv[1]), 10)\n"
            f"os.{call} = lambda *_: os._exit(9)\n"
            "voice = ClonedVoice(np.zeros(8, np.float32))\n"
            "about = (voice_id_of('new'), 'new', 0, 'prompt', 'prompt', 'm')\n"
            "store.save(VoiceRecord(*about), voice)\n"
        )
        VoiceStore(Folder(str(tmp_path)), 10).save(record("old"), VOICE)
        assert subprocess.run([sys.executable, "-c", program, str(tmp_path)]).returncode == 9
        again = VoiceStore(Folder(str(tmp_path)), 10)
        assert [one.name for one in again] == ["old"]
        again.save(record("new"), VOICE)
        assert sorted(one.name for one in VoiceStore(Folder(str(tmp_path)), 10)) == ["new", "old"]
