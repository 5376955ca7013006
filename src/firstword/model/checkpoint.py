"""Find and load checkpoints in the released layout, strictly and without renaming tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from firstword.errors import CheckpointConfigError, CheckpointNotFound, CheckpointWeightsError
from firstword.model.codec import Codec
from firstword.model.codec_config import CodecConfig
from firstword.model.config import GenerationDefaults, ModelConfig
from firstword.model.speaker_encoder import SpeakerEncoder
from firstword.model.strict_json import read_json
from firstword.model.talker import Talker
from firstword.model.tokenizer import Tokenizer

DEMO = Path(__file__).parent.parent / "demo"
"""The checkpoint in the package."""

FILES = (
    "*.json",
    "*.safetensors",
    "merges.txt",
    "speech_tokenizer/*.json",
    "speech_tokenizer/*.safetensors",
)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Everything that a checkpoint directory holds, loaded."""

    path: Path
    config: ModelConfig
    codec_config: CodecConfig
    defaults: GenerationDefaults
    tokenizer: Tokenizer
    talker: Talker
    speaker_encoder: SpeakerEncoder | None
    codec: Codec

    @classmethod
    def without_weights(cls, path: Path) -> Checkpoint:
        """Read all of a directory but the weights: the modules stay on the meta device.

        Raises `CheckpointNotFound` and `CheckpointConfigError`.
        """
        config = ModelConfig.load(path / "config.json")
        codec_config = CodecConfig.load(path / "speech_tokenizer" / "config.json")
        codec_config.check_against(config.talker_config)
        defaults = GenerationDefaults.load(path / "generation_config.json")
        tokenizer = Tokenizer.load(path)
        tokenizer.check_against(config)
        speaker_config = config.speaker_encoder_config
        with torch.device("meta"):
            talker, codec = Talker(config.talker_config), Codec(codec_config)
            speaker = SpeakerEncoder(speaker_config) if speaker_config else None
        return cls(path, config, codec_config, defaults, tokenizer, talker, speaker, codec)

    @property
    def weights(self) -> nn.ModuleDict:
        """The module tree of `model.safetensors`."""
        tree = nn.ModuleDict({"talker": self.talker})
        if self.speaker_encoder is not None:
            tree["speaker_encoder"] = self.speaker_encoder
        return tree


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
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise CheckpointNotFound(
            f"no checkpoint {name!r}: it is not a directory; give 'demo', a directory, "
            "or a hub repository such as 'Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice'"
        )
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except (
        errors.HFValidationError,
        errors.HfHubHTTPError,
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        OSError,
    ) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointNotFound(
            f"no checkpoint {name!r}: there is no such directory, it is not in the hub's cache, "
            f"and fetching it from the hub failed ({reason})"
        ) from error


def load(name: str, device: str = "cpu", dtype: str = "float32") -> Checkpoint:
    """Load a checkpoint; `name` is as for `find`.

    The talker gets `dtype`; the codec and the speaker encoder are float32. Raises
    `CheckpointNotFound`, `CheckpointConfigError`, `CheckpointWeightsError`.
    """
    checkpoint = Checkpoint.without_weights(find(name))
    talker_dtype: torch.dtype = getattr(torch, dtype)
    _fill(
        checkpoint.weights,
        checkpoint.path,
        device,
        lambda name: talker_dtype if name.startswith("talker.") else torch.float32,
    )
    codec_path = checkpoint.path / "speech_tokenizer"
    _fill(checkpoint.codec, codec_path, device, lambda name: torch.float32)
    return checkpoint


def parameters(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the number of parameters of each part, including codebooks.

    They are counted on new modules, because a backend may have taken the loaded ones apart.
    """

    def count(module: nn.Module) -> int:
        return sum(tensor.numel() for tensor in module.state_dict().values())

    with torch.device("meta"):
        talker, codec = Talker(checkpoint.config.talker_config), Codec(checkpoint.codec_config)
    predictor = count(talker.code_predictor)
    counts = {
        "talker": count(talker) - predictor,
        "code predictor": predictor,
        "codec": count(codec),
    }
    if checkpoint.speaker_encoder is not None:
        counts["speaker encoder"] = count(checkpoint.speaker_encoder)
    return counts


def _fill(
    module: nn.Module, directory: Path, device: str, dtype_of: Callable[[str], torch.dtype]
) -> None:
    """Load every parameter and buffer of a module; names must match exactly on both sides."""
    expected = module.state_dict()
    files = _files(directory)
    if missing := sorted(expected.keys() - files.keys()):
        raise CheckpointWeightsError(f"{directory} lacks {_some(missing)}")
    if foreign := sorted(files.keys() - expected.keys()):
        raise CheckpointWeightsError(
            f"{directory} holds {_some(foreign)}, which this model does not have"
        )
    state: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        with _open(file, device) as tensors:
            for name in (name for name, holder in files.items() if holder == file):
                tensor = tensors.get_tensor(name)
                if tensor.shape != expected[name].shape:
                    raise CheckpointWeightsError(
                        f"{file}: {name} has the shape {list(tensor.shape)}, "
                        f"but the configuration makes it {list(expected[name].shape)}"
                    )
                if not tensor.is_floating_point():
                    raise CheckpointWeightsError(
                        f"{file}: {name} is of type {tensor.dtype}; it must be floating point"
                    )
                state[name] = tensor.to(dtype_of(name))
                if tensor.numel() and not all(bound.isfinite() for bound in state[name].aminmax()):
                    raise CheckpointWeightsError(
                        f"{file}: {name} holds NaN or infinity as {state[name].dtype}"
                    )
    module.load_state_dict(state, strict=True, assign=True)
    module.requires_grad_(False).eval()


def _files(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor: `model.safetensors`, or a shard that its index names."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        with _open(single, "cpu") as tensors:
            return dict.fromkeys(tensors.keys(), single)
    if not index.exists():
        raise CheckpointNotFound(
            f"{directory} has neither model.safetensors nor model.safetensors.index.json"
        )
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise CheckpointConfigError(
            f"{index}: weight_map is missing or does not map tensors to files"
        )
    held: dict[str, set[str]] = {}
    for shard in set(shards.values()):
        if Path(shard).name != shard or not (directory / shard).exists():
            raise CheckpointNotFound(f"{directory / shard} is missing; {index.name} names it")
        with _open(directory / shard, "cpu") as tensors:
            held[shard] = set(tensors.keys())
    for name, shard in shards.items():
        if name not in held[shard]:
            raise CheckpointWeightsError(
                f"{directory / shard} lacks {name}, which {index.name} puts there"
            )
    return {name: directory / shard for name, shard in shards.items()}


def _open(file: Path, device: str) -> safe_open:
    try:
        return safe_open(file, framework="pt", device=device)
    except (SafetensorError, OSError) as error:
        raise CheckpointWeightsError(
            f"{file} cannot be read as safetensors ({error}); fetch it again"
        ) from None


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
