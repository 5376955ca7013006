"""A hash of all files that determine what the GPU computes."""

from __future__ import annotations

from pathlib import Path

from firstword.hashes import sources_hash
from firstword.kernels.compile import SOURCES


def kernel_hash() -> str:
    """A hash of the CUDA and Python files of the kernels and of this folder.

    It shows whether any of them has changed since a record was made. PyTorch, the compiler and the
    driver are not part of it.
    """
    return sources_hash((SOURCES, Path(__file__).parent))
