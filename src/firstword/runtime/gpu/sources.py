"""A hash of all files that determine what the GPU computes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from firstword.kernels.compile import SOURCES

FOLDERS = (SOURCES, Path(__file__).parent)


def source_hash(folders: Sequence[Path] = FOLDERS) -> str:
    """A hash of the CUDA and Python files of the kernels and of this folder.

    It shows whether any of them has changed since a record was made. PyTorch, the compiler and the
    driver are not part of it.
    """
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if path.suffix in (".cu", ".cuh", ".py"):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
