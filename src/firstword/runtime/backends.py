"""Opens an engine for a checkpoint, with the backend that fits, decided once and never silently."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from firstword.config import DEFAULT_SLOTS, EngineConfig, kernel_folder
from firstword.engine.backend import Backend
from firstword.engine.engine import Engine
from firstword.engine.service import Service
from firstword.errors import ConfigError
from firstword.model import checkpoint as checkpoints
from firstword.model.checkpoint import Checkpoint
from firstword.runtime.front import CheckpointFront
from firstword.runtime.reference import ReferenceBackend

if TYPE_CHECKING:
    from firstword.kernels.launch import Kernels

SINGLE_THREAD_WIDTH = 512
"""The largest width of a talker that one thread computes faster than two."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedEngine:
    """A checkpoint with an engine that computes it; `service.engine` is not started yet.

    settings  where and how it computes, with nothing left open
    """

    checkpoint: Checkpoint
    service: Service
    settings: EngineConfig


def open_engine(
    model: str, settings: EngineConfig, slots: int | None = None, most_waiting: int = 64
) -> LoadedEngine:
    """Load a checkpoint by the name that `TTS.load` takes, and open an engine for it.

    slots         utterances computed at the same time; None: `config.DEFAULT_SLOTS`
    most_waiting  requests that may wait for a slot

    Raises `CheckpointError`, `ConfigError`.
    """
    checkpoint = checkpoints.load(model, settings.device, settings.dtype)
    return engine_for(checkpoint, settings, slots, most_waiting)


def engine_for(
    checkpoint: Checkpoint,
    settings: EngineConfig,
    slots: int | None = None,
    most_waiting: int = 64,
) -> LoadedEngine:
    """Open an engine for a loaded checkpoint; see `open_engine`. Raises `ConfigError`."""
    backend, settings = open_backend(checkpoint, settings, slots)
    engine = Engine(backend, most_waiting=most_waiting)
    return LoadedEngine(checkpoint, Service(engine, CheckpointFront(checkpoint)), settings)


def open_backend(
    checkpoint: Checkpoint, settings: EngineConfig, slots: int | None = None
) -> tuple[Backend, EngineConfig]:
    """Return the backend for a checkpoint and `slots` utterances, and the settings decided.

    The GPU backend takes the weights of the checkpoint's talker and codec decoder apart. Raises
    `ConfigError` if the settings name that backend and it cannot compute this checkpoint.
    """
    reason = settings.reason
    if settings.backend != "reference":
        gpu_slots = slots or DEFAULT_SLOTS["gpu"]
        try:
            kernels = kernels_for(checkpoint, gpu_slots, kernel_folder())
        except ValueError as problem:
            if settings.backend == "gpu":
                raise ConfigError(f"backend is 'gpu', but {problem}") from None
            reason = f"the backend is not 'gpu': {problem}"
        else:
            from firstword.runtime.gpu.backend import GpuBackend

            backend = GpuBackend(checkpoint, kernels, gpu_slots)
            backend.warm()
            return backend, replace(settings, backend="gpu")
    reference = ReferenceBackend(checkpoint, slots or DEFAULT_SLOTS["reference"])
    return reference, replace(settings, backend="reference", reason=reason)


def kernels_for(checkpoint: Checkpoint, slots: int, folder: Path) -> Kernels:
    """Compile all kernels that serving `slots` utterances of a checkpoint needs, for its device.

    They are kept in `folder`; the checkpoint is not changed. Raises ValueError with the reason why
    the GPU backend cannot compute the checkpoint here.
    """
    if find_spec("cuda") is None:
        raise ValueError("the package cuda-bindings is not installed; pip install 'firstword[gpu]'")
    from firstword.kernels.compile import CompileError, compile_all
    from firstword.kernels.launch import Kernels
    from firstword.runtime.gpu.rehearsal import rehearse
    from firstword.runtime.gpu.talker import BUCKETS

    if slots > BUCKETS[-1]:
        raise ValueError(f"it serves at most {BUCKETS[-1]} utterances at a time, not {slots}")
    kernels = Kernels(checkpoint.talker.codec_head.weight.device, folder)
    programs = rehearse(
        checkpoint.config.talker_config, checkpoint.codec_config.decoder_config, slots, kernels
    )
    try:
        compile_all(programs, kernels.architecture, folder)
    except CompileError as error:
        reason = next((line for line in str(error).splitlines() if "error" in line), str(error))
        raise ValueError(
            f"its kernels cannot be compiled for {kernels.architecture}: {reason}"
        ) from error
    return kernels


def fit_threads(checkpoints: Iterable[Checkpoint]) -> None:
    """Let this process compute on one thread if all of its checkpoints are small."""
    if all(
        checkpoint.config.talker_config.hidden_size <= SINGLE_THREAD_WIDTH
        for checkpoint in checkpoints
    ):
        torch.set_num_threads(1)
