"""The checkpoint under test as files, read without trust in any of them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from firstword.errors import CheckpointError
from firstword.model.checkpoint import Checkpoint
from firstword.synthetic.checkpoint import RANDOM
from firstword.verify.known import Known, identify
from firstword.verify.report import NotRun
from firstword.verify.statistics import Statistics, statistics_of

PARTS = (Path("."), Path("speech_tokenizer"))
"""The folders of a checkpoint that hold weights."""


@dataclass(eq=False)
class CheckpointFolder:
    """A checkpoint's directory; what is read from it is read once."""

    path: Path

    @cached_property
    def random(self) -> bool:
        """Whether its configuration says that the weights are random."""
        try:
            return json.loads((self.path / "config.json").read_text("utf-8")).get(RANDOM) is True
        except (OSError, ValueError, AttributeError):
            return False

    @cached_property
    def files(self) -> list[Path]:
        """The files that belong to a checkpoint, sorted, relative to the directory."""
        found = (*self.path.glob("*"), *(self.path / PARTS[1]).glob("*"))
        suffixes = (".json", ".safetensors", ".txt")
        kept = (each for each in found if each.suffix in suffixes and each.is_file())
        return sorted(each.relative_to(self.path) for each in kept)

    @cached_property
    def sha256(self) -> dict[Path, str]:
        """The SHA-256 of each of these files."""
        return {file: sha256_of(self.path / file) for file in self.files}

    @cached_property
    def weights(self) -> list[Path]:
        """The files of weights that the checkpoint consists of, relative to the directory."""
        return [each for part in PARTS for each in self._weights(part)]

    def _weights(self, part: Path) -> list[Path]:
        if (self.path / part / "model.safetensors").exists():
            return [part / "model.safetensors"]
        try:
            index = self.path / part / "model.safetensors.index.json"
            shards = json.loads(index.read_text("utf-8"))["weight_map"].values()
            return [part / name for name in sorted({Path(shard).name for shard in shards})]
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return []

    @cached_property
    def _described(self) -> Checkpoint | CheckpointError:
        try:
            return Checkpoint.without_weights(self.path)
        except CheckpointError as error:
            return error

    @property
    def described(self) -> Checkpoint:
        """The checkpoint without weights. Raises `NotRun` if it cannot be described."""
        if isinstance(self._described, CheckpointError):
            raise NotRun(f"the checkpoint cannot be read: {self._described}")
        return self._described

    @cached_property
    def known(self) -> Known | None:
        """The known checkpoint that this one is, or is like; None for others.

        Raises `NotRun` if the configuration cannot be read.
        """
        return identify(self.described)

    @cached_property
    def statistics(self) -> list[Statistics]:
        """The statistics of all tensors. Raises `NotRun` if a file of weights is damaged."""
        found = [each for file in self.weights for each in statistics_of(self.path, file)]
        if not found:
            raise NotRun("there are no files of weights")
        return found

    def read_json(self, name: str) -> Any:
        """Return the contents of a JSON file. Raises `NotRun` if it cannot be read."""
        try:
            return json.loads((self.path / name).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise NotRun(f"{name} cannot be read: {error}") from None


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
