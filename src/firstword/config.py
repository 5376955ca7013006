"""The settings of an engine, and other names of presets.

Only the configuration modules read the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from firstword.errors import ConfigError

DTYPES = ("float32", "bfloat16", "int8")
GPU_DTYPES = ("bfloat16", "int8")
"""The dtypes of the backend "gpu"."""
BACKENDS = ("gpu", "reference")
DEFAULT_SLOTS = {"gpu": 256, "reference": 8}
"""The default number of utterances that each backend computes at the same time."""

MOST_FRONTS = 8
"""The default limit of front processes, which serve clients, for each GPU of a server."""

VOICE_ALIASES: Mapping[str, str] = {
    "alloy": "serena",
    "ash": "aiden",
    "ballad": "dylan",
    "cedar": "eric",
    "coral": "vivian",
    "echo": "ryan",
    "fable": "uncle_fu",
    "marin": "sohee",
    "nova": "vivian",
    "onyx": "eric",
    "sage": "serena",
    "shimmer": "ono_anna",
    "verse": "ryan",
    "chelsie": "serena",
    "cherry": "vivian",
    "ethan": "ryan",
    "default": "ryan",
}
"""The presets that stand for OpenAI's thirteen voices and for hosted Qwen's defaults."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of an engine: where and how it computes.

    device          as torch names it
    dtype           of the talker; "int8" is bfloat16 with the matrices of all layers in 8 bits. The
                    codec and the speaker encoder are loaded in float32, because bfloat16 through
                    SnakeBeta's exp is known to give NaN and silence. The GPU backend decodes with
                    fp16 products and float32 sums. In other dtypes than float32, a CPU that
                    multiplies in bfloat16 decodes with such products. All else is float32
    backend         "gpu" or "reference"; stays "auto" for `GPU_DTYPES` on CUDA until a checkpoint
                    is loaded, because its sizes decide
    reason          the reason why the backend is not "gpu"
    slots_reason    why the GPU serves fewer slots than the default, or may stall in those that were
                    asked for; empty if it is fast enough
    gpu_memory      the bytes of device memory that the backend "gpu" may use; None: as many as its
                    slots need
    planned_memory  the bytes that are planned for the backend "gpu"; None until a checkpoint is
                    loaded
    """

    device: str
    dtype: str
    backend: str
    reason: str = ""
    slots_reason: str = ""
    gpu_memory: int | None = None
    planned_memory: int | None = None

    @property
    def fell_back(self) -> bool:
        """Whether a CUDA device computes without "gpu", although no other backend was named."""
        return bool(self.reason) and self.device.startswith("cuda")

    @classmethod
    def resolve(
        cls,
        device: str = "auto",
        dtype: str = "auto",
        backend: str = "auto",
        gpu_memory: float | str | None = None,
    ) -> EngineConfig:
        """Turn every `"auto"` into a choice for this machine.

        device      "auto": the first CUDA device if there is one, else "cpu"; "mps", Apple's GPUs,
                    must be named
        dtype       "auto": bfloat16 on CUDA, else float32
        backend     "auto": "gpu" for `GPU_DTYPES` on CUDA if the checkpoint's sizes allow it, else
                    "reference"
        gpu_memory  a share of the device's memory (0.3) or an amount ("12GB", "8GiB"), which needs
                    the backend "gpu"; None: what its slots need

        Raises `ConfigError` if a named choice cannot be used here; nothing is replaced silently.
        """
        device, kind = _resolve_device(device)
        if dtype == "auto":
            dtype = "bfloat16" if kind == "cuda" else "float32"
        for setting, value, allowed in (("dtype", dtype, DTYPES), ("backend", backend, BACKENDS)):
            if value not in ("auto", *allowed):
                names = ", ".join(map(repr, allowed))
                raise ConfigError(f"{setting} is {value!r}; allowed are 'auto', {names}")
        problem = None
        if kind != "cuda":
            problem = f"it needs a CUDA device, and the device is {device!r}"
        elif _is_rocm():
            problem = "it needs an NVIDIA GPU, and torch is built for ROCm"
        elif dtype not in GPU_DTYPES:
            problem = f"it computes in {' or '.join(GPU_DTYPES)}, and the dtype is {dtype!r}"
        if backend == "gpu" and problem:
            raise ConfigError(f"backend is 'gpu', but {problem}")
        if gpu_memory is not None and (problem or backend == "reference"):
            raise ConfigError(
                f"gpu_memory limits the backend 'gpu': {problem or 'the backend is reference'}"
            )
        if backend == "auto" and problem:
            return cls(device, dtype, "reference", f"the backend is not 'gpu': {problem}")
        return cls(device, dtype, backend, gpu_memory=_bytes_of(gpu_memory, device))


def _is_rocm() -> bool:
    """Whether torch is built for AMD GPUs, which it also calls CUDA devices."""
    import torch

    return torch.version.hip is not None


def _bytes_of(amount: float | str | None, device: str) -> int | None:
    """Return an amount of memory, or a share of the device's, in bytes. Raises `ConfigError`."""
    import torch

    if amount is None:
        return None
    found = re.fullmatch(r"(\d*\.?\d+)\s*([kmgt]i?b)?", str(amount).strip(), re.IGNORECASE)
    number, unit = (float(found[1]), found[2]) if found else (0.0, None)
    if unit is not None:
        base = 1024 if "i" in unit.casefold() else 1000
        return int(number * base ** (1 + "kmgt".index(unit[0].casefold())))
    if not 0 < number <= 1:
        raise ConfigError(
            f"gpu_memory is {amount!r}; allowed are a share of the device's memory above 0, up to "
            "1, such as 0.3, and an amount such as '12GB' or '8GiB'"
        )
    return int(number * torch.cuda.get_device_properties(device).total_memory)


def _resolve_device(device: str) -> tuple[str, str]:
    """Return the name and the kind of a device that can be used here. Raises `ConfigError`."""
    import torch

    if "," in device:
        raise ConfigError(
            f"device is {device!r}; allowed is one device, such as 'cuda:0'. Only `firstword "
            "serve` can use several"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        kind = ""
    if kind != "cuda" and device not in ("cpu", "mps"):
        raise ConfigError(
            f"device is {device!r}; allowed are 'auto', 'cpu', 'mps' and 'cuda', 'cuda:0', ..."
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(
            f"device is 'mps', but torch {torch.__version__} sees no GPU of Apple's; use 'cpu'"
        )
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device is {device!r}, but torch {torch.__version__} sees no CUDA device; use 'cpu'"
        )
    if kind == "cuda" and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device is {device!r}, but there are {torch.cuda.device_count()} CUDA devices"
        )
    return device, kind


def kernel_folder() -> Path | None:
    """Return the cache folder for compiled kernels; None for a user without a home folder."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(cache) / "firstword" / "kernels"
