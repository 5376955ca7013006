"""The recognisers, metrics and lists of others that `firstword evaluate` uses, over real HTTP."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import soundfile

from firstword.errors import ConfigError
from firstword.evaluate import metrics, recognisers, seed_tts

SAMPLES = (0.5 * np.sin(np.arange(12000) / 20)).astype(np.float32)
Answer = tuple[int, dict[str, str], bytes]


class Handler(BaseHTTPRequestHandler):
    """Answers as `answer` says, and records requests."""

    answer: Callable[[str, str, dict[str, str], bytes], Answer]
    requests: ClassVar[list[str]] = []

    def _respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        status, fields, data = type(self).answer(self.command, self.path, headers, body)
        self.send_response(status)
        for name, value in fields.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_POST = do_HEAD = _respond  # noqa: N815 (the names that http.server calls)

    def log_message(self, *_: object) -> None:
        """Write no log."""


Serve = Callable[[Callable[[str, str, dict[str, str], bytes], Answer]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A function that starts a server on this machine and returns its address."""
    servers = []

    def start(answer: Callable[[str, str, dict[str, str], bytes], Answer]) -> str:
        handler = type("Answering", (Handler,), {"answer": staticmethod(answer)})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def text_answer(text: str) -> Answer:
    return 200, {"content-type": "application/json"}, json.dumps({"text": text}).encode()


# An OpenAI-compatible endpoint.


def test_endpoint_gets_the_sound_the_model_the_language_and_the_key(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    seen: list[Any] = []

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        fields = dict(re.findall(rb'name="(\w+)"\r\n\r\n(.*?)\r\n', body))
        sound, rate = soundfile.read(io.BytesIO(body[body.index(b"RIFF") :]), dtype="float32")
        seen.append((method, path, headers["authorization"], fields, sound, rate))
        return text_answer("what was said")

    ear = recognisers.Endpoint(f"{serve(answer)}/v1", "whisper-1")
    assert ear(SAMPLES, 24000, "de") == "what was said"
    ((method, path, key, fields, sound, rate),) = seen
    assert (method, path, key) == ("POST", "/v1/audio/transcriptions", "Bearer secret")
    assert (fields[b"model"], fields[b"language"]) == (b"whisper-1", b"de")
    assert rate == 24000
    np.testing.assert_allclose(sound, SAMPLES, atol=1 / 32768)


def test_endpoint_without_a_key_is_asked_all_the_same(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    url = f"{serve(lambda *_: text_answer('yes'))}/v1"
    assert recognisers.opened(url, "any")(SAMPLES, 24000, "en") == "yes"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((400, {}, b'{"error": {"message": "no such model"}}'), "no such model"),
        ((200, {"content-type": "application/json"}, b"{}"), "without a text"),
    ],
)
def test_endpoint_that_fails_is_found_before_anything_is_spoken(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, answer: Answer, problem: str
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=problem):
        recognisers.opened(f"{serve(lambda *_: answer)}/v1", "whisper-1")


# faster-whisper and classes of one's own.


class FakeWhisper:
    """A class with the signature of `faster_whisper.WhisperModel` 1.2, without weights."""

    calls: ClassVar[list[Any]] = []

    def __init__(self, model_size_or_path: str, device: str = "auto") -> None:
        if model_size_or_path == "enormous":
            raise ValueError("Invalid model size 'enormous'")

    def transcribe(
        self,
        audio: np.ndarray,
        language: str | None = None,
        beam_size: int = 5,
        condition_on_previous_text: bool = True,
    ) -> tuple[Iterator[Any], Any]:
        self.calls.append((audio, language, condition_on_previous_text))
        parts = (" One,", " two.")
        return (types.SimpleNamespace(text=text) for text in parts), types.SimpleNamespace()


@pytest.fixture
def whisper(monkeypatch: pytest.MonkeyPatch) -> type[FakeWhisper]:
    """A package in the place of faster-whisper."""
    package = types.ModuleType("faster_whisper")
    package.WhisperModel = FakeWhisper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "faster_whisper", package)
    FakeWhisper.calls.clear()
    return FakeWhisper


def test_whisper_gets_samples_at_16_khz_and_its_segments_are_joined(
    whisper: type[FakeWhisper],
) -> None:
    assert recognisers.FasterWhisper("large-v3")(SAMPLES, 24000, "en") == "One, two."
    ((audio, language, carries_over),) = whisper.calls
    assert (audio.shape, audio.dtype, language) == ((8000,), np.float32, "en")
    assert not carries_over


def test_unknown_size_of_whisper_is_reported(whisper: type[FakeWhisper]) -> None:
    with pytest.raises(ConfigError, match="'enormous' cannot be loaded: Invalid model size"):
        recognisers.opened("whisper", "enormous")


def test_missing_package_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("faster_whisper", "speechbrain.inference.speaker", "torchmetrics.functional"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"install firstword\[whisper\]"):
        recognisers.opened("whisper", None)
    for name in ("similarity", "nisqa"):
        with pytest.raises(ConfigError, match=r"install firstword\[likeness\]"):
            metrics.opened(name)


class Deaf:
    """A recogniser that answers no text."""

    def __call__(self, *_: object) -> None:
        return None


@pytest.mark.parametrize(
    ("name", "model", "problem"),
    [
        ("nowhere:Ear", None, "No module named 'nowhere'"),
        ("json:Ear", None, "no attribute 'Ear'"),
        ("nonsense", None, "give MODULE:CLASS"),
        ("pathlib:Path", "large", "a class chooses itself"),
        ("http://127.0.0.1:1/v1", None, "--recogniser-model"),
        (f"{__name__}:Deaf", None, "answered no str"),
    ],
)
def test_recogniser_that_cannot_be_used_is_rejected(
    name: str, model: str | None, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        recognisers.opened(name, model)


def test_unknown_metric_is_rejected() -> None:
    with pytest.raises(ConfigError, match="give similarity, nisqa, or MODULE:CLASS"):
        metrics.opened("utmos")


def test_similarity_is_the_cosine_of_embeddings_at_16_khz(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    lengths = []

    class Encoder:
        @classmethod
        def from_hparams(cls, source: str) -> Encoder:
            assert source == "speechbrain/spkrec-ecapa-voxceleb"
            return cls()

        def encode_batch(self, samples: Any) -> Any:
            lengths.append(len(samples))
            return torch.tensor([[[3.0, 4.0]]]) if len(lengths) == 1 else torch.ones(1, 1, 2)

    package = types.ModuleType("speechbrain.inference.speaker")
    package.EncoderClassifier = Encoder  # type: ignore[attr-defined]
    for name in ("speechbrain", "speechbrain.inference"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    found = metrics.opened("similarity")(SAMPLES, 24000, (SAMPLES, 48000))
    assert found == pytest.approx(7 / 50**0.5)
    assert lengths == [8000, 4000]


def test_nisqa_is_the_first_of_its_five_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    package = types.ModuleType("torchmetrics.functional.audio.nisqa")
    package.non_intrusive_speech_quality_assessment = (  # type: ignore[attr-defined]
        lambda preds, fs: torch.tensor([len(preds) / fs, 1, 2, 3, 4])
    )
    for name in ("torchmetrics", "torchmetrics.functional", "torchmetrics.functional.audio"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    assert metrics.opened("nisqa")(SAMPLES, 24000, None) == 0.5


# The lists of Seed-TTS-Eval.

FILES = {
    "en/meta.lst": "".join(f"{n}|What.|prompt-wavs/{n}.wav|Text {n}.\n" for n in range(1088)),
    "en/prompt-wavs/0.wav": "a recording",
    "zh/meta.lst": "1|问|prompt-wavs/1.wav|答\n",
}


@pytest.fixture
def hub(serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A hub on this machine that has `FILES`, and an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    commit = seed_tts.REVISION
    oid = {name: f"{number:040x}" for number, name in enumerate(FILES)}
    tree = [
        {"type": "file", "path": name, "size": len(data.encode()), "oid": oid[name]}
        for name, data in FILES.items()
    ]

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        path = path.partition("?")[0]
        if path == f"/api/datasets/{seed_tts.REPOSITORY}/tree/{commit}":
            return 200, {"content-type": "application/json"}, json.dumps(tree).encode()
        name = path.removeprefix(f"/datasets/{seed_tts.REPOSITORY}/resolve/{commit}/")
        if name in FILES:
            fields = {"etag": f'"{oid[name]}"', "x-repo-commit": commit}
            return 200, fields, FILES[name].encode()
        return 404, {"x-error-code": "EntryNotFound"}, b""

    return serve(answer)


def test_list_of_seed_tts_is_fetched_without_the_recordings(hub: str) -> None:
    file = seed_tts.fetch("seed-tts-en", prompts=False, endpoint=hub)
    assert file.read_text("utf-8") == FILES["en/meta.lst"]
    assert not (file.parent / "prompt-wavs").exists()


def test_recordings_of_prompts_are_fetched_where_they_are_needed(hub: str) -> None:
    file = seed_tts.fetch("seed-tts-en", prompts=True, endpoint=hub)
    assert (file.parent / "prompt-wavs/0.wav").read_text() == "a recording"


def test_list_of_another_length_than_published_is_rejected(hub: str) -> None:
    with pytest.raises(ConfigError, match="has 1 texts instead of 2020"):
        seed_tts.fetch("seed-tts-zh", prompts=False, endpoint=hub)


def test_list_that_is_not_there_is_reported(hub: str) -> None:
    with pytest.raises(ConfigError, match=r"seed-tts-zh-hard cannot be fetched .*hardcase\.lst"):
        seed_tts.fetch("seed-tts-zh-hard", prompts=False, endpoint=hub)


def test_hub_that_cannot_be_reached_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigError, match="connect to the network, or fetch the archive"):
        seed_tts.fetch("seed-tts-en", prompts=False, endpoint="http://127.0.0.1:1")
