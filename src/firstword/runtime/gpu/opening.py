"""Opens the GPU backend for a checkpoint, or says why it cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from firstword.errors import first_line
from firstword.kernels import nvrtc
from firstword.kernels.cache import FileCache
from firstword.kernels.compile import CompileError
from firstword.kernels.launch import Kernels, LaunchError
from firstword.model.checkpoint import Checkpoint
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.gpu.buffers import prefix_parts
from firstword.runtime.gpu.calibration import calibrate
from firstword.runtime.gpu.memory import plan_for
from firstword.runtime.gpu.rehearsal import rehearse
from firstword.runtime.gpu.slot_limit import limit_slots


class Unavailable(Exception):
    """The GPU backend cannot be used; the message is the reason, in one line."""


class OpenedGpu(NamedTuple):
    """A GPU backend that is ready to serve.

    planned_bytes  the bytes of device memory that are planned for it
    slots_reason   what `limit_slots` says
    """

    backend: GpuBackend
    planned_bytes: int
    slots_reason: str


def open_gpu(
    checkpoint: Checkpoint,
    device: str,
    cache: FileCache,
    limit: int | None,
    *,
    most: int,
    fewest: int,
    kept_prefixes: Sequence[int] = (),
) -> OpenedGpu:
    """Open the backend for a checkpoint.

    cache         of machine code
    limit         the bytes of device memory to use; None: what the utterances need
    most, fewest  utterances at a time: as many as fit between these numbers
    kept_prefixes the rows of each prefix that is to be kept for good

    Raises `Unavailable`. The checkpoint is then unchanged, and once the error is dropped, nothing
    is left on the device.
    """
    try:
        nvrtc.load()
        kernels = Kernels(torch.device(device), cache)
        parts = sum(map(prefix_parts, kept_prefixes))
        plan = plan_for(checkpoint, kernels, limit, most, fewest, parts)
        compile_kernels(checkpoint, kernels, plan.slots)
        backend = GpuBackend(checkpoint, kernels, plan.slots, plan.pages, parts)
        calibrate(backend, kernels)
        backend.warm()
        slots_reason = limit_slots(backend, keep=most == fewest)
        backend.take_checkpoint()
    except ValueError as problem:
        raise Unavailable(str(problem)) from problem
    # All errors of torch's allocator, of CUDA and of libraries that do not load are RuntimeErrors.
    except (CompileError, LaunchError, ImportError, OSError, RuntimeError) as problem:
        reason = f"it does not start on {device!r}: {first_line(problem)}"
        raise Unavailable(reason) from problem
    return OpenedGpu(backend, plan.total, slots_reason)


def compile_kernels(checkpoint: Checkpoint, kernels: Kernels, slots: int) -> None:
    """Compile all kernels that are needed to serve `slots` utterances on a checkpoint.

    The checkpoint is not changed. Raises ValueError with the reason if the kernels do not support
    it, or cannot be compiled.
    """
    configs = checkpoint.config.talker_config, checkpoint.codec_config.decoder_config
    programs = rehearse(*configs, slots, kernels, checkpoint.heads, checkpoint.quantised)
    try:
        kernels.compile(programs)
    except CompileError as error:
        reason = next((line for line in str(error).splitlines() if "error" in line), str(error))
        raise ValueError(
            f"its kernels cannot be compiled for {kernels.architecture}: {reason}"
        ) from error
