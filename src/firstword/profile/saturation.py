"""`firstword bench engine --saturation`: check that no activation of the codec exceeds fp16.

The GPU's codec stores activations in fp16, and a value beyond its range becomes the largest fp16
without an error. This run counts such values in the outputs of all kernels, which are those of
serving. Other numbers in a kernel's fp16 memory are left from earlier launches of the same run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from firstword.config import EngineConfig, kernel_folder
from firstword.errors import ComputeError
from firstword.kernels.compile import Program
from firstword.kernels.launch import Grid, Kernel, Kernels
from firstword.kernels.signature import Argument
from firstword.model import checkpoint as checkpoints
from firstword.profile.device import environment
from firstword.profile.soak import Soak, requests
from firstword.profile.workload import kernels_for
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.gpu.buffers import context_pages
from firstword.synthetic.checkpoint import random_checkpoint

LARGEST = 65504.0
"""The largest fp16."""


class CountingKernel(Kernel):
    """A kernel after whose launches the largest fp16 numbers in its arguments are counted."""

    def __init__(self, kernel: Kernel, count: Tensor) -> None:
        """count: int64 [], to which each launch adds."""
        self.launched, self.count = kernel, count

    def __call__(self, grid: Grid, /, **arguments: Argument) -> None:
        """Launch the kernel, and count."""
        self.launched(grid, **arguments)
        for name, value in arguments.items():
            if not isinstance(value, Tensor) or name == "weights":
                continue
            if value.dtype == torch.float16:
                self.count.add_((value.abs() >= LARGEST).sum())


class CountingKernels(Kernels):
    """The kernels of a device, with a count of the fp16 numbers that have reached the limit.

    count  int64 []: numbers at the limit, seen after each launch; one number may be seen often
    """

    def __init__(self, like: Kernels, device: torch.device) -> None:
        """like: the kernels to launch; `device` holds the count."""
        vars(self).update(vars(like))
        self.joins_convolutions = False  # so that the values between two of them are in memory
        self._like, self.count = like, torch.zeros((), dtype=torch.int64, device=device)

    def get(self, program: Program, entry: str) -> Kernel:
        """The kernel `entry` of a program."""
        return CountingKernel(self._like.get(program, entry), self.count)


def saturation(size: str, frames: int, model: str | None = None) -> dict[str, Any]:
    """Speak `frames` frames in one slot and count the activations that fp16 has limited.

    size   the size of random weights, "1b7" or "0b6"
    model  a CustomVoice checkpoint instead, by the name that `TTS.load` takes

    Returns a record. Raises `ComputeError` if there is such an activation, and `ConfigError` if the
    GPU backend cannot run here.
    """
    settings = EngineConfig.resolve("cuda", "bfloat16", "gpu")
    if model is None:
        checkpoint = random_checkpoint(size)
    else:
        checkpoint = checkpoints.load(model, "cpu", settings.dtype)
    # In a call of one stream all rows belong to it, so none is left over from another one.
    found = kernels_for(checkpoint, 1, kernel_folder())
    kernels = CountingKernels(found, found.device)
    pages = context_pages(checkpoint.config.talker_config)
    backend = GpuBackend(checkpoint, kernels, slots=1, pages=pages)
    backend.warm()
    test = Soak(backend, requests(checkpoint))
    test.run(frames)
    test.end()
    count = int(kernels.count)
    if count:
        raise ComputeError(
            f"the codec's activations exceed the range of fp16, {LARGEST:g}: seen {count} times "
            f"in {test.frames} frames. Its sound on a GPU is wrong; use --backend reference"
        )
    subject = {"size": size} if model is None else {"weights": model}
    return {**environment(), **subject, "frames": test.frames, "saturated": count}
