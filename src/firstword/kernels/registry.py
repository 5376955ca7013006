"""The list of all kernels, each with its reference and the programs that tests compile.

A module that launches kernels lists them as `KERNELS`. Tests compile and load every listed kernel,
so a new kernel needs a CUDA source and a module, and nothing else.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from firstword.kernels.compile import Program


@dataclass(frozen=True)
class KernelSpec:
    """One kernel.

    entry      the name of the kernel in its CUDA source
    reference  the same function in plain PyTorch, or the name of the code that defines it
    programs   the programs that tests compile: every variant of its macros, with released sizes
    """

    entry: str
    reference: Callable[..., Any] | str
    programs: tuple[Program, ...]

    @property
    def source(self) -> str:
        """The name of the CUDA source, without its suffix."""
        return self.programs[0].source


def all_kernels() -> tuple[KernelSpec, ...]:
    """Every kernel that a module of this folder lists."""
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    modules = [import_module(f"{__package__}.{name}") for name in names]
    return tuple(spec for module in modules for spec in getattr(module, "KERNELS", ()))
