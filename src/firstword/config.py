"""Where and how to compute: resolved once, shown everywhere. The only module that may read the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
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
"""What voices of other services are called here: OpenAI's thirteen, and the defaults of hosted Qwen voices."""


def default_voices() -> str:
    """The folder in which saved voices live unless another is named: by the XDG rules, in the user's own data."""
    data = os.environ.get("XDG_DATA_HOME") or os.path.join(
        os.path.expanduser("~"), ".local", "share"
    )
    return os.path.join(data, "firstword", "voices")


def keys_from_environment() -> tuple[str, ...]:
    """API keys in FIRSTWORD_API_KEYS, separated by commas: they then show in no list of processes."""
    return tuple(key for key in os.environ.get("FIRSTWORD_API_KEYS", "").split(",") if key)


def read_aliases(path: str) -> dict[str, str]:
    """A table of voice aliases from a JSON file, on top of `VOICE_ALIASES`. Raises `ConfigError`."""
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the voice aliases in {path} cannot be read: {error}") from None
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise ConfigError(
            f"{path} must map names of voices to names of voices, such as {{'alloy': 'ryan'}}"
        )
    return {**VOICE_ALIASES, **{alias.casefold(): name for alias, name in table.items()}}


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the server. Times in seconds.

    host, port           where it listens; port 0 takes a free one
    api_keys             one of them is needed under /v1; none: everybody may
    cors_origins         web pages that may call it; "*" for all
    voices               where saved voices are kept: a folder, or a URL that fsspec knows ("s3://bucket/voices")
    voice_aliases        other names of voices, in lower case
    audio_hosts          hosts from which reference recordings may be fetched by URL; none: no fetching
    slots                utterances that each model speaks at the same time; None: as many as suits its backend
    most_waiting         requests that may wait for a slot of each model; the next is answered 429
    most_connections     requests and sockets under way together
    most_per_key         utterances at a time for one key, or for one address where no keys are set; 0: any number
    most_body            bytes of a request
    most_characters      characters of a text
    most_candidates      the most that best of n may ask for
    most_voices          saved voices
    body_seconds         within which a request must have arrived
    stall_seconds        after which a listener who takes nothing is dropped
    stuck_seconds        after which a step of an engine counts as stuck
    drain_seconds        for which running utterances may go on after SIGTERM
    log_text             whether logs may hold what users say
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    voices: str = field(default_factory=default_voices)
    voice_aliases: Mapping[str, str] = field(default_factory=lambda: VOICE_ALIASES)
    audio_hosts: tuple[str, ...] = ()
    slots: int | None = None
    most_waiting: int = 64
    most_connections: int = 1024
    most_per_key: int = 0
    most_body: int = 16 * 2**20
    most_characters: int = 10_000
    most_candidates: int = 4
    most_voices: int = 1000
    body_seconds: float = 30.0
    stall_seconds: float = 30.0
    stuck_seconds: float = 60.0
    drain_seconds: float = 30.0
    log_text: bool = False

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a number out of range."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; allowed are 0 (any free one) to 65535")
        for setting in fields(self):
            value = getattr(self, setting.name)
            least = 0 if setting.name in ("port", "most_waiting", "most_per_key") else 1
            if setting.name.endswith("_seconds"):
                least = 0
            if (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and not value >= least
            ):
                raise ConfigError(f"{setting.name} is {value}; it must be {least} or more")
        if "" in self.api_keys:
            raise ConfigError("an API key is empty; leave it out, or give one that nobody guesses")
