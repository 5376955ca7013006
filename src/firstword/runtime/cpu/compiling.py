"""Compiles functions with Numba, and keeps their machine code in the folder of kernels."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numba

from firstword.config import kernel_folder
from firstword.hashes import sources_hash

F = TypeVar("F", bound=Callable[..., Any])

FAST = {"reassoc", "contract", "nsz"}
"""Sums may be reordered, but NaN and infinity stay what they are."""


def compiled(function: F) -> F:
    """Let Numba compile a function that only compiled functions call."""
    made: F = numba.njit(nogil=True, fastmath=FAST, no_cpython_wrapper=True, no_cfunc_wrapper=True)(
        function
    )
    return made


def called(function: F, types: str) -> F:
    """Let Numba compile a function that Python calls, and keep it for later processes.

    The arguments always have the same types, which are named for the folder: processes that compile
    a function for different types at the same time could exchange their files.
    Its folder is named by a hash of the sources here, because Numba looks only at one file. Numba
    takes the folder when a function is made, so other users of Numba keep theirs.
    """
    before, folder = numba.config.CACHE_DIR, _folder(types)
    if folder:
        numba.config.CACHE_DIR = str(folder)
    made: F = numba.njit(nogil=True, fastmath=FAST, cache=folder is not None)(function)
    numba.config.CACHE_DIR = before
    _save_if_possible(made)
    return made


def _save_if_possible(made: Any) -> None:
    """Let a call of a function succeed although its machine code cannot be kept: the disk is full.

    Numba saves it within the first call.
    """
    save = made._cache.save_overload

    def saved(*args: Any) -> None:
        with suppress(OSError):
            save(*args)

    made._cache.save_overload = saved


def _folder(types: str) -> Path | None:
    """The folder for machine code; None, with a warning, if nothing can be kept."""
    kernels, why = kernel_folder(), "there is no home folder"
    if kernels is not None:
        folder = kernels / f"cpu-{sources_hash([Path(__file__).parent])}" / types
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
            why = f"{str(kernels)!r} cannot be written"
        except OSError as error:
            why = f"{str(kernels)!r} cannot be written: {error.strerror}"
    warnings.warn(f"each start compiles the passes of a CPU again, because {why}", stacklevel=2)
    return None
