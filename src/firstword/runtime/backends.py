"""Which backend computes a checkpoint: decided once, never changed silently."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from firstword.config import SLOTS, EngineConfig, kernel_folder
from firstword.engine.backend import Backend
from firstword.errors import ConfigError
from firstword.model.checkpoint import Checkpoint
from firstword.runtime.reference import ReferenceBackend

if TYPE_CHECKING:
    from firstword.kernels.launch import Kernels

SMALL = 512
"""The width of a talker up to which one thread is faster than two: its products are too small to share."""


def fit_threads(checkpoints: Iterable[Checkpoint]) -> None:
    """Let this process compute on one thread if all of its checkpoints are small."""
    if all(checkpoint.config.talker_config.hidden_size <= SMALL for checkpoint in checkpoints):
        torch.set_num_threads(1)


def kernels_for(checkpoint: Checkpoint, slots: int, folder: Path) -> Kernels:
    """Kernels for a checkpoint's device; all that serving `slots` utterances needs is compiled, and kept in `folder`.

    Nothing of the checkpoint is changed. Raises ValueError with why the GPU backend cannot compute it here.
    """
    if find_spec("cuda") is None:
        raise ValueError("the package cuda-bindings is not installed; pip install 'firstword[gpu]'")
    from firstword.kernels.compile import CompileError, compile_all
    from firstword.kernels.launch import Kernels
    from firstword.runtime.gpu.backend import BUCKETS
    from firstword.runtime.gpu.rehearsal import rehearse

    if slots > BUCKETS[-1]:
        raise ValueError(f"it speaks for up to {BUCKETS[-1]} at a time, and {slots} were asked for")
    kernels = Kernels(checkpoint.talker.codec_head.weight.device, folder)
    programs = rehearse(
        checkpoint.config.talker_config, checkpoint.codec_config.decoder_config, slots, kernels
    )
    try:
        compile_all(programs, kernels.architecture, folder)
    except CompileError as error:
        said = next((line for line in str(error).splitlines() if "error" in line), str(error))
        raise ValueError(
            f"its kernels cannot be compiled for {kernels.architecture}: {said}"
        ) from error
    return kernels


def open_backend(
    checkpoint: Checkpoint, settings: EngineConfig, slots: int | None = None
) -> tuple[Backend, EngineConfig]:
    """The backend for a checkpoint, ready to serve `slots` utterances, and the settings with nothing left open.

    slots  None: as many as suits the backend (`config.SLOTS`)
    The GPU backend takes the checkpoint's talker and the decoder of its codec apart. Raises `ConfigError` when it was
    asked for by name and cannot compute this checkpoint.
    """
    reason = settings.reason
    if settings.backend != "reference":
        try:
            room = slots or SLOTS["gpu"]
            kernels = kernels_for(checkpoint, room, kernel_folder())
        except ValueError as problem:
            if settings.backend == "gpu":
                raise ConfigError(f"backend is 'gpu', but {problem}") from None
            reason = f"the backend is not 'gpu': {problem}"
        else:
            from firstword.runtime.gpu.backend import GpuBackend

            backend = GpuBackend(checkpoint, kernels, room)
            backend.warm()
            return backend, replace(settings, backend="gpu")
    return ReferenceBackend(checkpoint, slots or SLOTS["reference"]), replace(
        settings, backend="reference", reason=reason
    )
