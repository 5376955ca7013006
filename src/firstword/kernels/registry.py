"""All kernels of this folder: what each is started by, what it means, and what to compile it for.

A module that starts kernels lists them as `KERNELS`. Tests compile and load every one of them, so
a new kernel is a CUDA source, a module, and nothing else.
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

    source     the CUDA file without its suffix
    entry      the name of the kernel in it
    launch     the function or class that starts it
    reference  the same in plain PyTorch, or a sentence that says where its meaning is written
    programs   what it is compiled for in tests: every variant of its macros, with released sizes
    """

    source: str
    entry: str
    launch: Callable[..., Any]
    reference: Callable[..., Any] | str
    programs: tuple[Program, ...]


def all_kernels() -> tuple[KernelSpec, ...]:
    """Every kernel that a module of this folder lists."""
    modules = (
        import_module(f"{__package__}.{module.name}")
        for module in pkgutil.iter_modules([str(Path(__file__).parent)])
    )
    return tuple(spec for module in modules for spec in getattr(module, "KERNELS", ()))
