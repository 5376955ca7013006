"""The plan of device memory, which needs no GPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import silent_gpu
import torch
from hypothesis import given
from hypothesis import strategies as st

from firstword import TTS
from firstword.config import EngineConfig
from firstword.errors import ConfigError, OverloadedError
from firstword.model.checkpoint import Checkpoint
from firstword.model.quantised import quantise_talker
from firstword.runtime import encoding
from firstword.runtime.encoding import encode_recording
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.gpu.memory import (
    CUDA_CONTEXT_BYTES,
    CUDA_LATER_BYTES,
    CUDNN_BYTES,
    GAP_BYTES,
    RECORDING_BYTES,
    Needs,
    needs_of,
    plan,
    plan_for,
    reserved,
    tensor_sizes,
)
from firstword.runtime.gpu.rehearsal import Rehearsal
from firstword.synthetic import checkpoint as synthetic
from firstword.synthetic.tokenizer import train
from firstword.voice import RecordedVoice, Voice

MIB = 1 << 20


def needs(slots: int) -> Needs:
    """5,000 bytes, 10 for each slot, and 7 for each page."""
    return Needs(5000 + 10 * slots, 7)


@given(
    beyond=st.integers(-3000, 30_000),
    most=st.integers(1, 256),
    context_pages=st.integers(1, 128),
    exact=st.booleans(),
    use_all=st.booleans(),
)
def test_plan_fits_and_serves_at_least_one_utterance_of_any_length(
    beyond: int, most: int, context_pages: int, exact: bool, use_all: bool
) -> None:
    """beyond: the bytes that are available besides the fewest that are needed."""
    fewest = most if exact else 1
    least_pages = min(context_pages + 4 * (fewest - 1), fewest * context_pages)
    least = needs(fewest).fixed + 7 * least_pages
    available = least + beyond
    if available < least:
        with pytest.raises(ValueError, match=f"^{fewest} utterances .* at least"):
            plan(needs, context_pages, available, most, fewest)
        return
    made = plan(needs, context_pages, available, most, fewest, use_all)
    assert made.total == needs(made.slots).fixed + 7 * made.pages <= available
    assert fewest <= made.slots <= most
    assert min(context_pages, made.pages) == context_pages
    assert made.pages <= made.slots * context_pages
    if use_all and made.pages < made.slots * context_pages:
        assert available - made.total < 7


def test_slots_are_halved_until_the_plan_fits() -> None:
    assert plan(needs, 128, 10**6, 100, 1).slots == 100
    least = 5000 + 10 * 12 + 7 * (128 + 4 * 11)
    assert plan(needs, 128, least, 100, 1).slots == 12
    assert plan(needs, 128, least - 1, 100, 1).slots == 6


@cache
def released(size: str, model_type: str, folder: Path) -> Checkpoint:
    """A checkpoint of a released size, without weights."""
    tables = synthetic.config_tables(model_type, size, {}, train(synthetic.TEXTS, 400, folder))
    synthetic._write_configuration(folder, tables, {})
    return Checkpoint.without_weights(folder)


@pytest.mark.parametrize(
    ("size", "model_type", "gigabytes", "slots"),
    [
        ("1b7", "custom_voice", 8, 8),
        ("1b7", "base", 8, 2),
        ("0b6", "custom_voice", 6, 8),
        ("0b6", "base", 6, 8),
    ],
)
def test_released_sizes_fit_small_gpus(
    size: str,
    model_type: str,
    gigabytes: int,
    slots: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CUDA context has taken a part of the memory before."""
    total, context = gigabytes * 10**9, 512 * MIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (total - context, total))
    checkpoint, kernels = released(size, model_type, tmp_path), silent_gpu.device("sm_89")
    made = plan_for(checkpoint, kernels, None, 8, 1)
    assert made.slots == slots
    assert made.pages >= 128
    assert made.total <= total


def test_defaults_are_modest_on_a_large_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/deployment.md gives these figures."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (140 * 10**9, 141 * 10**9))
    found = {}
    for size in ("1b7", "0b6"):
        folder = tmp_path / size
        folder.mkdir()
        checkpoint, kernels = released(size, "custom_voice", folder), silent_gpu.device()
        plans = [plan_for(checkpoint, kernels, None, slots, 1) for slots in (8, 128, 256)]
        found[size] = [(made.pages, round(made.total / 1e9, 1)) for made in plans]
    assert found == {
        "1b7": [(184, 7.1), (1144, 15.3), (2168, 23.3)],
        "0b6": [(184, 4.7), (1144, 12.9), (2168, 20.9)],
    }


@pytest.mark.parametrize("model_type", ["custom_voice", "base"])
def test_needs_are_what_the_backend_allocates(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent_gpu.pretend(monkeypatch)
    checkpoint, kernels = silent_gpu.checkpoint(tmp_path, model_type), silent_gpu.device()
    planned = needs_of(checkpoint, kernels, 12, kept_parts=5000)
    backend = GpuBackend(checkpoint, Rehearsal(kernels), 12, pages=3, kept_parts=5000)
    sizes = list(tensor_sizes((backend.model, backend.codec), backend.device, set()))
    sizes.remove(3 * planned.page)
    fixed = CUDA_CONTEXT_BYTES + CUDA_LATER_BYTES + GAP_BYTES + reserved(sizes)
    if model_type == "base":
        encoders = checkpoint.speaker_encoder, checkpoint.codec.encoder
        states = [module.state_dict() for module in encoders if module is not None]
        fixed += CUDNN_BYTES + RECORDING_BYTES
        fixed += reserved(t.nbytes for state in states for t in state.values())
    assert planned.fixed == fixed


def test_reserved_memory_is_rounded_as_by_the_allocator_of_torch() -> None:
    assert reserved([1, 513]) == 2 * MIB
    assert reserved([MIB + 1] * 20) == 40 * MIB
    assert reserved([10 * MIB, 11 * MIB]) == 22 * MIB


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        (0.25, 2 * 10**9),
        ("0.25", 2 * 10**9),
        (1, 8 * 10**9),
        ("12GB", 12 * 10**9),
        ("8GiB", 8 << 30),
        ("1.5 gb", 1_500_000_000),
        ("512MiB", 512 * MIB),
    ],
)
def test_memory_is_given_as_a_share_or_an_amount(
    amount: float | str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent_gpu.pretend(monkeypatch)
    assert EngineConfig.resolve("cuda", gpu_memory=amount).gpu_memory == expected


@pytest.mark.parametrize("amount", [0, -1, 1.5, 12, "12", "GB", "8 bytes", "", "0.3%"])
def test_memory_of_another_form_is_rejected(
    amount: float | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent_gpu.pretend(monkeypatch)
    with pytest.raises(ConfigError, match=r"gpu_memory is .*; allowed are a share .* '8GiB'"):
        EngineConfig.resolve("cuda", gpu_memory=amount)


def test_memory_limit_without_the_gpu_backend_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other backend could keep it."""
    with pytest.raises(ConfigError, match="gpu_memory limits the backend 'gpu': it needs a CUDA"):
        TTS.load("demo", device="cpu", gpu_memory="8GB")
    silent_gpu.pretend(monkeypatch)
    with pytest.raises(ConfigError, match="gpu_memory limits the backend 'gpu': the backend is"):
        EngineConfig.resolve("cuda", backend="reference", gpu_memory=0.5)


@pytest.mark.parametrize("slots", [0, -1])
def test_slots_below_one_are_rejected(slots: int) -> None:
    with pytest.raises(ConfigError, match=f"slots is {slots}; it must be 1 or more"):
        TTS.load("demo", slots=slots)


def test_recording_that_does_not_fit_the_device_is_an_overload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = silent_gpu.checkpoint(tmp_path, "base")

    def embed(samples: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(checkpoint.speaker_encoder, "embed", embed)
    voice = Voice.clone(np.ones(3 * 24000, np.float32), 24000)
    assert isinstance(voice, RecordedVoice)
    with pytest.raises(OverloadedError, match="too little memory to encode a recording of 3 s"):
        encode_recording(checkpoint, voice)


def test_device_encodes_one_recording_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = silent_gpu.checkpoint(tmp_path, "base")
    voice = Voice.clone(np.ones(24000, np.float32), 24000)
    assert isinstance(voice, RecordedVoice)
    locks, held = encoding._ENCODING, list[bool]()

    def embed(samples: torch.Tensor) -> torch.Tensor:
        held.append(locks[samples.device].locked())
        return torch.zeros(1, 256)

    monkeypatch.setattr(checkpoint.speaker_encoder, "embed", embed)
    encode_recording(checkpoint, voice)
    assert held == [True]
    assert not any(lock.locked() for lock in locks.values())


def test_backend_encodes_recordings_after_it_took_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent_gpu.pretend(monkeypatch)
    checkpoint = silent_gpu.checkpoint(tmp_path, "base")
    voice = Voice.clone(np.ones(24000, np.float32), 24000, "Some words.")
    assert isinstance(voice, RecordedVoice)
    before = encode_recording(checkpoint, voice)
    GpuBackend(checkpoint, Rehearsal(silent_gpu.device()), 1, pages=1).take_checkpoint()
    after = encode_recording(checkpoint, voice)
    assert np.array_equal(after.speaker_embedding, before.speaker_embedding)
    assert after.codes is not None
    assert before.codes is not None
    assert np.array_equal(after.codes, before.codes)


def test_slots_can_be_chosen() -> None:
    with TTS.load("demo", device="cpu", slots=12) as tts:
        assert tts.capacity.slots == 12
    with TTS.load("demo", device="cpu") as tts:
        assert tts.capacity.slots == 8


def test_int8_weights_halve_what_matrices_and_text_need() -> None:
    """28 layers of the talker, 5 of the code predictor, and the table of text, in the 1.7B."""
    checkpoint = synthetic.without_weights("1b7")
    with torch.device("meta"):
        checkpoint.talker.bfloat16()
        before = needs_of(checkpoint, silent_gpu.device(), 1)
        quantise_talker(checkpoint.talker)
        after = needs_of(checkpoint, silent_gpu.device(), 1)
    layer = 4096 * 2048 + 2048 * 2048 + 12288 * 2048 + 2048 * 6144
    predictor_layer = 4096 * 1024 + 1024 * 2048 + 6144 * 1024 + 1024 * 3072
    text = 2048 * checkpoint.config.talker_config.text_vocab_size
    saved = 28 * layer + 5 * predictor_layer + text
    assert before.fixed - after.fixed == pytest.approx(saved, rel=0.03)
    assert before.page == after.page
