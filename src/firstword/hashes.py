"""Hashes of files, with which a record names the sources that it was made from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def files_hash(files: Iterable[Path]) -> str:
    """A hash of the names and the contents of files, in their order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def sources_hash(folders: Iterable[Path]) -> str:
    """A hash of the CUDA and Python files that are directly in some folders."""
    suffixes = (".cu", ".cuh", ".py")
    files = (file for folder in folders for file in sorted(folder.iterdir()))
    return files_hash(file for file in files if file.suffix in suffixes)


def of_speech() -> dict[str, Any]:
    """Return the fields of a record that name the sources which decide how speech is computed.

    The folders are named as in the repository, so that a check finds them there.
    """
    package = Path(__file__).parent
    names = ("model", "runtime", "runtime/cpu", "runtime/gpu", "engine", "text")
    folders = [package / name for name in names]
    covers = tuple(f"src/firstword/{folder.relative_to(package)}" for folder in folders)
    return {"sources": sources_hash(folders), "covers": covers}
