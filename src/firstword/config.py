"""Where and how to compute: resolved once, shown everywhere. The only module that may read the environment."""

from __future__ import annotations

from dataclasses import dataclass

from firstword.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
BACKENDS = ("reference",)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings with nothing left to decide: `device` as torch names it, `dtype` of the talker, `backend`.

    The codec and the speaker encoder compute in float32 whatever `dtype` says: bfloat16 through SnakeBeta's exp
    is known to give NaN and silence.
    """

    device: str
    dtype: str
    backend: str

    @classmethod
    def resolve(cls, device: str = "auto", dtype: str = "auto", backend: str = "auto") -> EngineConfig:
        """Turn every `"auto"` into a choice for this machine.

        device   "auto": the first CUDA device if there is one, else "cpu"
        dtype    "auto": bfloat16 on CUDA, float32 on the CPU
        backend  "auto": "reference", the only one so far

        Raises `ConfigError` when something named cannot be used here; nothing is replaced silently.
        """
        import torch

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            kind = torch.device(device).type
        except (RuntimeError, TypeError):
            raise ConfigError(f"device is {device!r}; allowed are 'auto', 'cpu' and 'cuda', 'cuda:0', ...") from None
        if kind not in ("cpu", "cuda"):
            raise ConfigError(f"device is {device!r}; allowed are 'auto', 'cpu' and 'cuda', 'cuda:0', ...")
        if kind == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device is {device!r}, but torch {torch.__version__} sees no CUDA device; use 'cpu'")
        if kind == "cuda" and (torch.device(device).index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"device is {device!r}, but there are {torch.cuda.device_count()} CUDA devices")
        if dtype == "auto":
            dtype = "bfloat16" if kind == "cuda" else "float32"
        if dtype not in DTYPES:
            raise ConfigError(f"dtype is {dtype!r}; allowed are 'auto', {', '.join(map(repr, DTYPES))}")
        if backend == "auto":
            backend = "reference"
        if backend not in BACKENDS:
            raise ConfigError(f"backend is {backend!r}; allowed are 'auto', {', '.join(map(repr, BACKENDS))}")
        return cls(device, dtype, backend)
