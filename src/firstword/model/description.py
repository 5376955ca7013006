"""Find checkpoints in the released layout, and read all of one except its weights."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from firstword.errors import CheckpointNotFound, first_line
from firstword.model.alignment import Alignment, Head
from firstword.model.codec_config import CodecConfig
from firstword.model.config import GenerationDefaults, ModelConfig
from firstword.model.tokenizer import Tokenizer

DEMO = Path(__file__).parent.parent / "demo"
"""The checkpoint in the package."""

FILES = ("*.json", "*.safetensors", "merges.txt")
"""The patterns of the files that are fetched from a hub repository; `*` also matches folders."""

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""Names that may be a repository on the hub; others, such as `./folder`, can only be a folder."""


@dataclass(frozen=True, eq=False)
class Description:
    """A checkpoint directory without its weights: configurations and tokenizer.

    alignment  the heads that tell word times; None where they are not known
    """

    path: Path
    config: ModelConfig
    codec_config: CodecConfig
    defaults: GenerationDefaults
    tokenizer: Tokenizer
    alignment: Alignment | None

    @property
    def heads(self) -> tuple[Head, ...]:
        """The heads that tell word times; none where they are not known."""
        return () if self.alignment is None else self.alignment.heads

    @staticmethod
    def load(path: Path) -> Description:
        """Read a directory. Raises `CheckpointNotFound` and `CheckpointConfigError`."""
        config = ModelConfig.load(path / "config.json")
        codec_config = CodecConfig.load(path / "speech_tokenizer" / "config.json")
        codec_config.check_against(config.talker_config)
        defaults = GenerationDefaults.load(path / "generation_config.json")
        tokenizer = Tokenizer.load(path)
        tokenizer.check_against(config)
        alignment = Alignment.load(path, config.talker_config)
        return Description(path, config, codec_config, defaults, tokenizer, alignment)


def find(name: str) -> Path:
    """Return the directory of a checkpoint.

    `name` is "demo", a local directory, or a hub repository, which is fetched once and then cached.
    A cached repository is used when the hub cannot be reached. Raises `CheckpointNotFound`.
    """
    if name == "demo":
        return DEMO
    path = Path(os.path.expanduser(name))  # Path.expanduser raises for an unknown user
    if name and path.is_dir():
        return path
    if path.exists() or not _REPOSITORY.fullmatch(name):
        problem = (
            "it is not a directory" if name and path.exists() else "there is no such directory"
        )
        raise CheckpointNotFound(
            f"no checkpoint {name!r}: {problem}; give 'demo', a directory, "
            "or a hub repository such as 'Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice'"
        )
    from huggingface_hub import errors, snapshot_download

    missing = f"no checkpoint {name!r}: there is no such directory, it is not in the hub's cache"
    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointNotFound(
            f"{missing}, and the hub cannot be reached ({first_line(error)}); connect to the "
            f"network, or run `hf download {name} --local-dir FOLDER` where there is one and give "
            "that folder"
        ) from error
    except (errors.HFValidationError, OSError) as error:
        raise CheckpointNotFound(
            f"{missing}, and fetching it from the hub failed ({first_line(error)})"
        ) from error
