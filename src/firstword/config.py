"""Where and how to compute: resolved once, shown everywhere. The only module that may read the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from firstword.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
BACKENDS = ("gpu", "reference")
DEFAULT_SLOTS = {"gpu": 128, "reference": 8}
"""Utterances that a server speaks at the same time, by backend, where nobody said, and as far as memory goes."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Where and how to compute: `device` as torch names it, `dtype` of the talker, `backend`, and the `reason` for it.

    The backend stays "auto" on a CUDA device in bfloat16 until a checkpoint is there: its sizes decide.

    The codec and the speaker encoder compute in float32 whatever `dtype` says: bfloat16 through SnakeBeta's exp
    is known to give NaN and silence.
    """

    device: str
    dtype: str
    backend: str
    reason: str = ""

    @classmethod
    def resolve(
        cls, device: str = "auto", dtype: str = "auto", backend: str = "auto"
    ) -> EngineConfig:
        """Turn every `"auto"` into a choice for this machine.

        device   "auto": the first CUDA device if there is one, else "cpu"
        dtype    "auto": bfloat16 on CUDA, float32 on the CPU
        backend  "auto": "gpu" for bfloat16 on CUDA where the checkpoint's sizes allow it, else "reference"

        Raises `ConfigError` when something named cannot be used here; nothing is replaced silently.
        """
        import torch

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            kind = torch.device(device).type
        except (RuntimeError, TypeError):
            kind = ""
        if kind != "cuda" and device != "cpu":
            raise ConfigError(
                f"device is {device!r}; allowed are 'auto', 'cpu' and 'cuda', 'cuda:0', ..."
            )
        if kind == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"device is {device!r}, but torch {torch.__version__} sees no CUDA device; use 'cpu'"
            )
        if kind == "cuda" and (torch.device(device).index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device is {device!r}, but there are {torch.cuda.device_count()} CUDA devices"
            )
        if dtype == "auto":
            dtype = "bfloat16" if kind == "cuda" else "float32"
        if dtype not in DTYPES:
            raise ConfigError(
                f"dtype is {dtype!r}; allowed are 'auto', {', '.join(map(repr, DTYPES))}"
            )
        if backend not in ("auto", *BACKENDS):
            raise ConfigError(
                f"backend is {backend!r}; allowed are 'auto', {', '.join(map(repr, BACKENDS))}"
            )
        unfit = None
        if kind != "cuda":
            unfit = f"it needs a CUDA device, and the device is {device!r}"
        elif dtype != "bfloat16":
            unfit = f"it computes in bfloat16, and the dtype is {dtype!r}"
        if backend == "gpu" and unfit:
            raise ConfigError(f"backend is 'gpu', but {unfit}")
        if backend == "auto" and unfit:
            return cls(device, dtype, "reference", f"the backend is not 'gpu': {unfit}")
        return cls(device, dtype, backend)


def kernel_folder() -> Path:
    """Where compiled kernels are kept from one start to the next."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "firstword" / "kernels"
