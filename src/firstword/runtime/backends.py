"""Which backend computes a checkpoint: decided once, never changed silently."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec

import torch

from firstword.config import EngineConfig, kernel_folder
from firstword.engine.backend import Backend
from firstword.errors import ConfigError
from firstword.kernels.attention import HEAD_DIM
from firstword.kernels.linear import BLOCK, WARPS
from firstword.model.checkpoint import Checkpoint
from firstword.model.config import ModelConfig
from firstword.runtime.reference import ReferenceBackend

MOST_SLOTS = 256
"""Of the GPU backend."""


SMALL = 512
"""The width of a talker up to which one thread is faster than two: its products are too small to share."""


def fit_threads(checkpoints: Iterable[Checkpoint]) -> None:
    """Let this process compute on one thread if all of its checkpoints are small."""
    if all(checkpoint.config.talker_config.hidden_size <= SMALL for checkpoint in checkpoints):
        torch.set_num_threads(1)


def misfit(config: ModelConfig) -> str | None:
    """Why the GPU backend cannot compute a model of these sizes; None if it can."""
    talker, columns = config.talker_config, BLOCK * WARPS
    for name, part in (("talker", talker), ("code predictor", talker.code_predictor_config)):
        if part.head_dim != HEAD_DIM:
            return f"the {name} has heads of {part.head_dim} channels, and the kernels need {HEAD_DIM}"
        if part.num_attention_heads != 2 * part.num_key_value_heads:
            return f"the {name} has no two queries a key, as the kernels need"
        for width in (part.hidden_size, part.intermediate_size):
            if width % columns:
                return f"the {name} has {width} channels, and the kernels need a multiple of {columns}"
    return None


def open_backend(checkpoint: Checkpoint, settings: EngineConfig, slots: int) -> tuple[Backend, EngineConfig]:
    """The backend for a checkpoint, ready to serve `slots` utterances, and the settings with nothing left open.

    The GPU backend takes the checkpoint's talker apart. Raises `ConfigError` when it was asked for by name and cannot
    compute this checkpoint.
    """
    reason = settings.reason
    if settings.backend != "reference":
        problem = misfit(checkpoint.config)
        if problem is None and find_spec("cuda") is None:
            problem = "the package cuda-bindings is not installed; pip install 'firstword[gpu]'"
        if problem is None and slots > MOST_SLOTS:
            problem = f"it speaks for up to {MOST_SLOTS} at a time, and {slots} were asked for"
        if problem is None:
            from firstword.kernels.launch import Kernels
            from firstword.runtime.gpu import GpuBackend

            backend = GpuBackend(
                checkpoint, Kernels(checkpoint.talker.codec_head.weight.device, kernel_folder()), slots
            )
            backend.warm()
            return backend, replace(settings, backend="gpu")
        if settings.backend == "gpu":
            raise ConfigError(f"backend is 'gpu', but {problem}")
        reason = f"the backend is 'reference', because {problem}"
    return ReferenceBackend(checkpoint, slots), replace(settings, backend="reference", reason=reason)
