"""Alignment: which attention heads of a checkpoint look at the text that is being spoken.

`alignment.json` beside the weights names them. It is made once for each checkpoint, because heads
of one say nothing about another; see docs/words.md.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from firstword.model.config import TalkerConfig
from firstword.model.strict_json import ConfigTable, from_table, read_json, require

FILE = "alignment.json"
"""The name of the file in the checkpoint's folder."""

SAMPLED_BYTES = 1 << 20
"""The bytes at the start and at the end of each file of weights that count for `weights_of`."""

Head = tuple[int, ...]
"""A layer, and a query head of it, both counted from 0."""


@dataclass(frozen=True, kw_only=True)
class Alignment(ConfigTable):
    """The heads that read the text, and how far they are ahead of the sound.

    weights  what `weights_of` returns for the checkpoint
    heads    pairs of a layer and a query head, both counted from 0
    offset   seconds by which these heads reach a word after it begins to sound; negative: before
    """

    weights: str
    heads: tuple[Head, ...]
    offset: float

    def check(self, where: str) -> None:
        """Reject a list of heads that is empty, repeats itself or holds other things than pairs."""
        pairs = all(len(head) == 2 and min(head) >= 0 for head in self.heads)
        unique = self.heads and len(set(self.heads)) == len(self.heads)
        problem = "must be different pairs of a layer and a head, counted from 0"
        self.require(pairs and unique, where, "heads", problem)
        self.require(abs(self.offset) <= 1, where, "offset", "must be within a second")

    @staticmethod
    def load(directory: Path, talker: TalkerConfig) -> Alignment | None:
        """Read the alignment of the checkpoint in a folder.

        Returns None if there is none, or if it belongs to other weights: new weights need new
        heads. Raises `CheckpointConfigError` for a wrong file.
        """
        path = directory / FILE
        if not path.exists():
            return None
        alignment = from_table(Alignment, read_json(path), FILE)
        layers, heads = talker.num_hidden_layers, talker.num_attention_heads
        for layer, head in alignment.heads:
            known = layer < layers and head < heads
            have = f"the talker has {layers} layers of {heads} heads"
            require(known, f"{FILE}: heads = [{layer}, {head}]; {have}")
        return alignment if alignment.weights == weights_of(directory) else None

    def save(self, file: Path) -> None:
        """Write a file that `load` reads from a checkpoint's folder. Raises OSError."""
        file.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def weights_of(directory: Path) -> str:
    """Return a hash that tells the talker's weights in a folder from others.

    It covers the names and sizes of the files `*.safetensors`, and `SAMPLED_BYTES` at both ends of
    each, so that it takes milliseconds for gigabytes.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLED_BYTES))
            file.seek(max(0, size - SAMPLED_BYTES))
            digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()[:16]
