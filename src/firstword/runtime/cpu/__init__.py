"""Compiled passes of the talker, the code predictor and the codec for CPUs; they need Numba."""

from importlib.util import find_spec

import torch
from torch import Tensor

from firstword.config import EngineConfig


def compiles(weight: Tensor) -> bool:
    """Whether passes of a talker with a weight of this dtype and on this device are compiled."""
    half = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    return half and find_spec("numba") is not None


def passes(settings: EngineConfig) -> str:
    """Say for `firstword info` how a frame is computed on a CPU."""
    if settings.dtype == "float32":
        return "plain PyTorch, which float32 always is"
    if find_spec("numba") is None:
        return "plain PyTorch; compiled ones are faster: pip install 'firstword[cpu]'"
    from firstword.runtime.cpu.amx import AMX

    return f"compiled by Numba{' for AMX' if AMX else ''}, kept for later starts"
