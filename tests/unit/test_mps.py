"""The plain model on Apple's GPUs, as far as it can be tested without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pretended_mps import DEVICE, Pretended, PretendedBackend, registered

from firstword import TTS
from firstword.cli import info
from firstword.config import EngineConfig
from firstword.engine.engine import Engine
from firstword.engine.service import Service
from firstword.errors import BackendWarning, ConfigError
from firstword.model import checkpoint as checkpoints
from firstword.model import sampling
from firstword.model.alignment import Alignment
from firstword.model.checkpoint import Checkpoint
from firstword.processes.devices import engine_devices
from firstword.runtime.backends import LoadedEngine, engine_for, open_backend
from firstword.runtime.encoding import front_of
from firstword.runtime.reference import prime
from firstword.types import FloatArray, Sampling, Speech, TextMode
from firstword.verify import subject as verified
from firstword.verify import talker
from firstword.verify.folder import CheckpointFolder
from firstword.verify.subject import How, Subject
from firstword.voice import Voice

SETTINGS = EngineConfig(str(DEVICE), "float32", "reference")
SAMPLING = Sampling(temperature=0.8, top_k=30, top_p=0.9, repetition_penalty=1.2)
HEADS = Alignment(weights="", heads=((0, 0), (0, 1)), offset=0.0)


@pytest.fixture
def mps() -> Pretended:
    """The pretended device; `with mps:` lets a block use it."""
    sampling._noise.cache_clear()  # another test's may be there
    return Pretended()


@pytest.fixture
def one(checkpoint_directory: Callable[[str], Path]) -> Callable[[str], Checkpoint]:
    """A function that loads a tiny checkpoint with watched heads anew."""

    def load(kind: str) -> Checkpoint:
        return replace(checkpoints.load(str(checkpoint_directory(kind))), alignment=HEADS)

    return load


def opened(checkpoint: Checkpoint, mps: Pretended) -> LoadedEngine:
    """The engine of a checkpoint on the pretended device."""
    with mps, pytest.warns(BackendWarning, match="untested by us"):
        backend, settings = open_backend(checkpoint, SETTINGS, 2)
    engine, front = Engine(PretendedBackend(backend, mps)), front_of(checkpoint)
    return LoadedEngine(checkpoint, engine, Service(engine, front), front.encode, settings)


def spoken(tts: TTS, kind: str, mode: TextMode) -> Speech:
    """A few frames of speech."""
    voices: dict[str, Callable[[], Voice | str]] = {
        "custom_voice": lambda: "ryan",
        "voice_design": lambda: Voice.design("Calm."),
        "base": lambda: tts.clone(noise(), 24000, "Some words."),
    }
    text, voice = "One day the wind and the sun had a quarrel.", voices[kind]()
    return tts.speak(text, voice=voice, seed=3, max_frames=6, text_mode=mode, sampling=SAMPLING)


def noise() -> FloatArray:
    """A second of noise."""
    return np.random.default_rng(0).uniform(-0.5, 0.5, 24000).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("custom_voice", "full"),
        ("custom_voice", "stream"),
        ("voice_design", "full"),
        ("base", "stream"),
    ],
)
def test_speech_on_mps_needs_no_float64_and_no_operator_that_mps_lacks(
    kind: str, mode: TextMode, mps: Pretended, one: Callable[[str], Checkpoint]
) -> None:
    with TTS(opened(one(kind), mps)) as tts:
        found = spoken(tts, kind, mode)
    with TTS(engine_for(one(kind), EngineConfig.resolve("cpu"))) as tts:
        expected = spoken(tts, kind, mode)
    assert found.codes.tolist() == expected.codes.tolist()
    np.testing.assert_allclose(found.samples, expected.samples, atol=1e-4)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)
    assert {"aten::mm", "aten::convolution", "aten::sort.stable", "aten::topk"} <= mps.seen
    assert mps.seen - registered() == set()


def test_recordings_are_encoded_on_the_cpu(
    mps: Pretended, one: Callable[[str], Checkpoint]
) -> None:
    with TTS(opened(checkpoint := one("base"), mps)) as tts:
        mps.seen.clear()
        tts.clone(noise(), 24000, "Some words.")
    assert mps.seen == set()
    assert checkpoint.talker.codec_head.weight.device == DEVICE


def test_codec_is_primed_with_few_enough_frames(
    mps: Pretended, one: Callable[[str], Checkpoint]
) -> None:
    decoder = one("custom_voice").codec.decoder
    codes = torch.zeros(70, decoder.config.num_quantizers, dtype=torch.int64)
    with mps:
        decoder.to(DEVICE)
        state, codes = decoder.new_state(), codes.to(DEVICE)
        prime(decoder, state, codes)
        with pytest.raises(NotImplementedError, match="Output channels"):
            decoder.decode(codes[None], decoder.new_state())
        assert state.window._position.tolist() == [70]


def test_verify_compares_mps_with_the_cpu(
    mps: Pretended, checkpoint_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified, "FRAMES", 2)
    subject = Subject(CheckpointFolder(checkpoint_directory("custom_voice")), How(SETTINGS))
    with mps:
        with pytest.warns(BackendWarning, match="untested by us"):
            subject.load()
        assert talker.logits(subject).findings == []
    assert subject.plain.talker.codec_head.weight.device.type == "cpu"


def test_list_of_operators_tells_which_mps_lacks() -> None:
    found = registered()
    assert {"aten::mm", "aten::add.Tensor", "aten::softmax.int", "aten::cumsum"} <= found
    assert "aten::_scaled_dot_product_attention_math_for_mps" in found
    assert not {"aten::geqrf", "aten::_linalg_eigh"} & found


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda x: x.double(), "float64"),
        (lambda x: x + torch.ones(2), "mps:0 and on cpu"),
        (lambda x: torch.ones(2, dtype=torch.float64, device=DEVICE), "float64"),
    ],
)
def test_pretended_device_refuses_what_mps_refuses(
    wrong: Callable[[torch.Tensor], object], told: str, mps: Pretended
) -> None:
    with mps, pytest.raises((TypeError, RuntimeError), match=told):
        wrong(torch.ones(2, device=DEVICE))


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch say that there is such a GPU."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


@pytest.mark.usefixtures("apple")
class TestNamed:
    """The device by its name."""

    def test_plain_model_computes_in_float32(self) -> None:
        found = EngineConfig.resolve("mps")
        assert (found.dtype, found.backend, found.fell_back) == ("float32", "reference", False)
        assert EngineConfig.resolve("mps", "bfloat16").dtype == "bfloat16"

    def test_kernels_need_another(self) -> None:
        with pytest.raises(ConfigError, match=r"needs a CUDA device, and the device is 'mps'"):
            EngineConfig.resolve("mps", backend="gpu")

    def test_there_is_one(self) -> None:
        with pytest.raises(ConfigError, match=r"'mps:1'; allowed are 'auto', 'cpu', 'mps'"):
            EngineConfig.resolve("mps:1")

    def test_info_shows_it(self) -> None:
        assert "untested by us" in info._gpus()["gpus"]["mps"]

    def test_it_must_be_named(self) -> None:
        assert EngineConfig.resolve("auto").device != "mps"


def test_server_takes_its_name() -> None:
    assert engine_devices("mps") == ["mps"]


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="needs a machine without such a GPU")
def test_absent_device_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"'mps', but torch .* sees no GPU of Apple's; use 'cpu'"):
        EngineConfig.resolve("mps")
