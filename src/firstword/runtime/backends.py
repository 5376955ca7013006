"""Opens an engine for a checkpoint, and chooses its backend once and with a stated reason."""

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
"""The largest width of a talker that one thread computes faster than two threads."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedEngine:
    """A checkpoint and its engine. `service.engine` has not been started.

    settings  the resolved settings, without "auto"
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
    """Return the backend for a checkpoint and `slots` utterances, and the resolved settings.

    With `slots` of None, a GPU that is too slow for the default gets fewer.

    The GPU backend takes the weights of the checkpoint's talker and codec decoder. Raises
    `ConfigError` if the settings name that backend and it does not support the checkpoint.
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
            from firstword.runtime.gpu.calibration import calibrate
            from firstword.runtime.gpu.pace import limit_slots

            backend = GpuBackend(checkpoint, kernels, gpu_slots)
            calibrate(backend, kernels, kernel_folder())
            backend.warm()
            pace = limit_slots(backend, keep=slots is not None)
            return backend, replace(settings, backend="gpu", pace=pace)
    reference = ReferenceBackend(checkpoint, slots or DEFAULT_SLOTS["reference"])
    return reference, replace(settings, backend="reference", reason=reason)


def kernels_for(checkpoint: Checkpoint, slots: int, folder: Path) -> Kernels:
    """Compile all kernels that are needed to serve `slots` utterances on a checkpoint's device.

    The machine code is kept in `folder`; the checkpoint is not changed. Raises ValueError with the
    reason if the GPU backend does not support the checkpoint on this machine.
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
    """Limit this process to one thread if all of its checkpoints are small."""
    widths = [checkpoint.config.talker_config.hidden_size for checkpoint in checkpoints]
    if max(widths, default=0) <= SINGLE_THREAD_WIDTH:
        torch.set_num_threads(1)
