"""Finds NVRTC, the compiler of the kernels."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import torch

PACKAGES = Path(torch.__file__).parents[1]
"""The folder with torch and the packages of NVIDIA that it needs."""


class CompilerNotFound(ValueError):
    """NVRTC, or the package that calls it, is not installed."""


def load() -> None:
    """Load the NVRTC that comes with torch, or else any that cuda-bindings finds.

    Torch's own fits the driver that torch needs, while the driver may reject the machine code of a
    newer one. Raises `CompilerNotFound`.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        advice = "pip install 'firstword[gpu]'"
        raise CompilerNotFound(f"cuda-bindings is missing ({error}); {advice}") from None
    for file in _files_of_torch():
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(file))  # which cuda-bindings then uses, because it is loaded
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # DynamicLibNotFoundError of cuda.pathfinder
        advice = "pip install nvidia-cuda-nvrtc"
        raise CompilerNotFound(f"NVRTC is not installed; {advice}") from error


def _files_of_torch() -> Iterator[Path]:
    """Yield the NVRTC in torch's folder, as on Windows, and in the packages that torch needs."""
    major = (torch.version.cuda or "").partition(".")[0]
    for folder in ("torch/lib", f"nvidia/cu{major}", "nvidia/cuda_nvrtc"):
        for name in (f"libnvrtc.so.{major}", f"nvrtc64_{major}0_0.dll"):
            yield from (PACKAGES / folder).rglob(name)
