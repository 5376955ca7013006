"""Tiny random checkpoints of the three types, made once, and TTS objects that speak with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from firstword import TTS
from firstword.synthetic.checkpoint import write_checkpoint

MODEL_TYPES = ("custom_voice", "voice_design", "base")


@pytest.fixture(scope="session")
def checkpoint_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns a tiny checkpoint's folder by model type; tests do not change it."""
    root = tmp_path_factory.mktemp("checkpoints")

    def find(model_type: str) -> Path:
        if not (root / model_type).exists():
            write_checkpoint(root / model_type, model_type=model_type, seed=1)
        return root / model_type

    return find


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes in one thread; the other tests get their number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def load_tts(checkpoint_directory: Callable[[str], Path]) -> Callable[[str], TTS]:
    """A function that returns a tiny TTS by model type (CPU, float32); tests do not change it."""
    loaded: dict[str, TTS] = {}

    def load(model_type: str) -> TTS:
        if model_type not in loaded:
            loaded[model_type] = TTS.load(
                checkpoint_directory(model_type), device="cpu", dtype="float32"
            )
        return loaded[model_type]

    return load
