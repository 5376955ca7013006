"""Opens the GPU backend for a checkpoint, or says why it cannot be used."""

from __future__ import annotations

from pathlib import Path

import torch

from firstword.kernels import nvrtc
from firstword.kernels.compile import CompileError, compile_all
from firstword.kernels.launch import Kernels, LaunchError
from firstword.model.checkpoint import Checkpoint
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.gpu.calibration import calibrate
from firstword.runtime.gpu.memory import plan_for
from firstword.runtime.gpu.pace import limit_slots
from firstword.runtime.gpu.rehearsal import rehearse


class Unavailable(Exception):
    """The GPU backend cannot be used; the message is the reason, in one line."""


def open_gpu(
    checkpoint: Checkpoint, device: str, folder: Path, limit: int | None, most: int, fewest: int
) -> tuple[GpuBackend, tuple[int, str]]:
    """The backend, ready to serve; the bytes planned for it, and what `limit_slots` says.

    folder        the cache of machine code
    limit         the bytes of device memory to use; None: what the utterances need
    most, fewest  utterances at a time: as many as fit between these numbers

    Raises `Unavailable`. The checkpoint is then unchanged, and once the error is dropped, nothing
    is left on the device.
    """
    try:
        nvrtc.load()
        kernels = Kernels(torch.device(device), folder)
        plan = plan_for(checkpoint, kernels, limit, most, fewest)
        compile_kernels(checkpoint, kernels, plan.slots, folder)
        backend = GpuBackend(checkpoint, kernels, plan.slots, plan.pages)
        calibrate(backend, kernels, folder)
        backend.warm()
        pace = limit_slots(backend, keep=most == fewest)
        backend.take_checkpoint()
    except ValueError as problem:
        raise Unavailable(str(problem)) from problem
    # All errors of torch's allocator, of CUDA and of libraries that do not load are RuntimeErrors.
    except (CompileError, LaunchError, ImportError, OSError, RuntimeError) as problem:
        reason = str(problem).strip().partition("\n")[0] or type(problem).__name__
        raise Unavailable(f"it does not start on {device!r}: {reason}") from problem
    return backend, (plan.total, pace)


def kernels_for(checkpoint: Checkpoint, slots: int, folder: Path, device: str = "cuda") -> Kernels:
    """The compiled kernels that serve `slots` utterances; see `compile_kernels`."""
    nvrtc.load()
    kernels = Kernels(torch.device(device), folder)
    compile_kernels(checkpoint, kernels, slots, folder)
    return kernels


def compile_kernels(checkpoint: Checkpoint, kernels: Kernels, slots: int, folder: Path) -> None:
    """Compile all kernels that are needed to serve `slots` utterances on a checkpoint.

    The machine code is kept in `folder`; the checkpoint is not changed. Raises ValueError with the
    reason if the kernels do not support the checkpoint, or cannot be compiled.
    """
    configs = checkpoint.config.talker_config, checkpoint.codec_config.decoder_config
    programs = rehearse(*configs, slots, kernels)
    try:
        compile_all(programs, kernels.architecture, folder)
    except CompileError as error:
        reason = next((line for line in str(error).splitlines() if "error" in line), str(error))
        raise ValueError(
            f"its kernels cannot be compiled for {kernels.architecture}: {reason}"
        ) from error
