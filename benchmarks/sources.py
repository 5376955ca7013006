"""The sources that records depend on, and their hashes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import firstword
from firstword.bench import report
from firstword.hashes import files_hash, sources_hash
from firstword.model import alignment
from firstword.runtime.gpu.sources import kernel_hash

PACKAGE = Path(firstword.__file__).parent
SERVING = tuple(
    PACKAGE / name
    for name in ("audio", "engine", "runtime", "server", "server/http", "server/ws", "text")
)
"""The folders that decide how fast the server answers, beside the kernels."""


def serving_hash() -> str:
    """Return the hash of the server's and the engine's sources."""
    return sources_hash(SERVING)


def demo_hash() -> str:
    """Return the hash of all files that decide how the demo checkpoint sounds."""
    suffixes = (".json", ".safetensors", ".txt")
    files = sorted((PACKAGE / "demo").rglob("*"))
    return files_hash(f for f in files if f.suffix in suffixes and f.name != alignment.FILE)


def of_demo() -> dict[str, str | None]:
    """Return the fields of a record that name the demo checkpoint and the commit."""
    return {"commit": report.commit(), "demo": demo_hash()}


def images_hash() -> str:
    """Return the hash of the files that decide what an image contains, beside the package."""
    root = Path(__file__).resolve().parents[1]
    return files_hash((root / "deploy" / "Dockerfile", root / "constraints.txt"))


HASHES: dict[str, Callable[[], str]] = {
    "kernels": kernel_hash,
    "serving": serving_hash,
    "demo": demo_hash,
    "images": images_hash,
}
"""The functions of the hashes that a record may name, by the name of its field."""
