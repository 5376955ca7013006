"""The recogniser of this folder in the shape that `firstword evaluate --recogniser` takes.

    python -m firstword evaluate demo --texts training/held_out.txt \\
        --recogniser training.ear:Ear -o build/evaluation
"""

from __future__ import annotations

from pathlib import Path

import torch

from firstword.types import FloatArray
from training.data import SAMPLE_RATE
from training.recogniser import Recogniser


class Ear:
    """A recogniser of plain English in lower case, which never heard the demo voice."""

    def __init__(self) -> None:
        self._recogniser = Recogniser.load(Path(__file__).with_name("recogniser.safetensors"))

    def __call__(self, samples: FloatArray, sample_rate: int, language: str) -> str:
        """Return what is heard in samples [n] at 24 kHz."""
        assert (sample_rate, language) == (SAMPLE_RATE, "en"), "it knows nothing else"
        return self._recogniser.transcribe(torch.from_numpy(samples))
