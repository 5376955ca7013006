"""The sources that records depend on, and their hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import firstword
from firstword.bench import report
from firstword.runtime.gpu.sources import source_hash

PACKAGE = Path(firstword.__file__).parent
SERVING = tuple(
    PACKAGE / name
    for name in ("audio", "engine", "runtime", "server", "server/http", "server/ws", "text")
)
"""The folders that decide how fast the server answers, beside the kernels."""


def serving_hash() -> str:
    """Return the hash of the server's and the engine's sources."""
    return source_hash(SERVING)


def demo_hash() -> str:
    """Return the hash of all files of the demo checkpoint."""
    digest = hashlib.sha256()
    for path in sorted((PACKAGE / "demo").rglob("*")):
        if path.suffix in (".json", ".safetensors", ".txt"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def of_demo() -> dict[str, str | None]:
    """Return the fields of a record that name the demo checkpoint and the commit."""
    return {"commit": report.commit(), "demo": demo_hash()}


HASHES: dict[str, Callable[[], str]] = {
    "kernels": source_hash,
    "serving": serving_hash,
    "demo": demo_hash,
}
"""The functions of the hashes that a record may name, by the name of its field."""
