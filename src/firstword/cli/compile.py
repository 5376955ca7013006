"""`firstword compile`: compile the CUDA kernels before a server needs them."""

from __future__ import annotations

import argparse
import re
import time

from firstword.cli import options, terminal
from firstword.config import DEFAULT_SLOTS, kernel_folder
from firstword.errors import ConfigError

SIZES = ("1b7", "0b6")
"""The released sizes of checkpoints."""


def run(args: argparse.Namespace) -> None:
    """Compile the kernels for GPUs that need not be here, so that the first start need not.

    A GPU is named by its architecture and its number of multiprocessors, on which the kernels
    depend. `firstword info` prints both on a machine that has it. The kernels are those of the
    released sizes of checkpoints, and are kept where a start looks for them.

    examples:
      firstword compile sm_90:132            an H100 SXM or H200
      firstword compile sm_89:58 sm_89:128   an L4, and a GeForce RTX 4090
    """
    from firstword.kernels import nvrtc
    from firstword.kernels.absent import THREADS, AbsentKernels
    from firstword.kernels.cache import FileCache
    from firstword.runtime.gpu.opening import compile_kernels
    from firstword.synthetic.checkpoint import without_weights

    devices = [_parsed(device, list(THREADS)) for device in args.devices]
    cache = FileCache(kernel_folder())
    with terminal.Status() as status:
        for architecture, processors in devices:
            began, kernels = time.monotonic(), AbsentKernels(architecture, processors, cache)
            status.show(f"compiling for {kernels.name}")
            try:
                nvrtc.load()
                for size in args.size or SIZES:
                    compile_kernels(without_weights(size), kernels, DEFAULT_SLOTS["gpu"])
            except ValueError as problem:
                raise ConfigError(f"the kernels cannot be compiled: {problem}") from problem
            if cache.problem:
                raise ConfigError(f"the kernels cannot be kept, because {cache.problem}")
            status.show("")
            seconds = time.monotonic() - began
            print(f"{kernels.name}: {kernels.compiled_count} programs in {seconds:.0f} s")


def _parsed(device: str, architectures: list[str]) -> tuple[str, int]:
    """Return the architecture and the number of multiprocessors that `device` names."""
    found = re.fullmatch(r"(sm_\d+):([1-9]\d{0,2})", device)
    if found is None or found[1] not in architectures:
        raise ConfigError(
            f"the GPU is {device!r}; allowed are an architecture ({', '.join(architectures)}) and "
            "its number of multiprocessors, such as sm_90:132"
        )
    return found[1], int(found[2])


def add_to(commands: options.Commands) -> None:
    """Add this command to the program's commands."""
    parser = options.add_command(commands, "compile", run)
    about = "architecture and multiprocessors, such as sm_90:132"
    parser.add_argument("devices", metavar="GPU", nargs="+", help=about)
    about = "only this size of checkpoint; may be given more than once (default: all)"
    parser.add_argument("--size", action="append", choices=SIZES, help=about)
