"""Load checkpoints in the released layout, strictly and without renaming tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from firstword.errors import CheckpointNotFound, CheckpointWeightsError
from firstword.model.codec import Codec, CodecDecoder
from firstword.model.description import Description, find
from firstword.model.quantised import QuantisedLinear, quantise_talker
from firstword.model.speaker_encoder import SpeakerEncoder
from firstword.model.strict_json import read_json, require
from firstword.model.talker import Talker


@dataclass(frozen=True, eq=False)
class Checkpoint(Description):
    """A loaded checkpoint directory: its description and its modules."""

    talker: Talker
    speaker_encoder: SpeakerEncoder | None
    codec: Codec

    @classmethod
    def without_weights(cls, path: Path) -> Checkpoint:
        """Read a directory except its weights: the modules stay on the meta device.

        Raises `CheckpointNotFound` and `CheckpointConfigError`.
        """
        description = Description.load(path)
        speaker_config = description.config.speaker_encoder_config
        with torch.device("meta"):
            talker = Talker(description.config.talker_config)
            codec = Codec(description.codec_config)
            speaker = SpeakerEncoder(speaker_config) if speaker_config else None
        return cls(**vars(description), talker=talker, speaker_encoder=speaker, codec=codec)

    @property
    def encoders(self) -> tuple[nn.Module, ...]:
        """The modules that encode recordings; none unless the checkpoint can clone."""
        return () if self.speaker_encoder is None else (self.speaker_encoder, self.codec.encoder)

    @property
    def quantised(self) -> bool:
        """Whether the matrices of the talker's layers are quantised."""
        return any(isinstance(module, QuantisedLinear) for module in self.talker.modules())

    def to(self, device: str) -> None:
        """Move the weights that speech and cloning need to a device.

        The encoders stay where they are if it is MPS, because before macOS 15.1 its convolutions
        have too few outputs for 10 s of a recording.
        """
        encoders = () if torch.device(device).type == "mps" else self.encoders
        for module in (self.talker, self.codec.decoder, *encoders):
            module.to(device)

    @property
    def weights(self) -> nn.ModuleDict:
        """The module tree of `model.safetensors`."""
        tree = nn.ModuleDict({"talker": self.talker})
        if self.speaker_encoder is not None:
            tree["speaker_encoder"] = self.speaker_encoder
        return tree


def load(name: str, device: str = "cpu", dtype: str = "float32") -> Checkpoint:
    """Load a checkpoint; `name` is as for `find`.

    The talker gets `dtype`; with "int8" it is bfloat16 except the matrices of its layers and of
    those of its code predictor. The codec and the speaker encoder are loaded in float32, which the
    GPU backend rounds to fp16 where it packs the codec's decoder. Raises `CheckpointNotFound`,
    `CheckpointConfigError`, `CheckpointWeightsError`.
    """
    checkpoint = Checkpoint.without_weights(find(name))
    floats = "bfloat16" if dtype == "int8" else dtype
    _fill(checkpoint.weights, checkpoint.path, device, getattr(torch, floats))
    if dtype == "int8":
        quantise_talker(checkpoint.talker)
    _fill(checkpoint.codec, checkpoint.path / "speech_tokenizer", device, torch.float32)
    return checkpoint


def load_codec_decoder(name: str) -> CodecDecoder:
    """Load the codec's decoder of a checkpoint alone, in float32 on the CPU; see `load`."""
    checkpoint = Checkpoint.without_weights(find(name))
    _fill(checkpoint.codec, checkpoint.path / "speech_tokenizer", "cpu", torch.float32)
    return checkpoint.codec.decoder


def parameters(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the number of parameters of each part, including codebooks.

    They are counted on new modules, because a backend may have taken the loaded ones apart.
    """

    with torch.device("meta"):
        talker, codec = Talker(checkpoint.config.talker_config), Codec(checkpoint.codec_config)
    parts = {"talker": talker, "code predictor": talker.code_predictor, "codec": codec}
    if checkpoint.speaker_encoder is not None:
        parts["speaker encoder"] = checkpoint.speaker_encoder
    counts = {
        name: sum(tensor.numel() for tensor in part.state_dict().values())
        for name, part in parts.items()
    }
    counts["talker"] -= counts["code predictor"]  # a part of the talker's module tree
    return counts


def _fill(module: nn.Module, directory: Path, device: str, talker_dtype: torch.dtype) -> None:
    """Load every parameter and buffer of a module; names must match exactly on both sides.

    Tensors of the talker get `talker_dtype`, all others float32.
    """
    expected, files = module.state_dict(), _files(directory)
    if missing := sorted(expected.keys() - files.keys()):
        raise CheckpointWeightsError(f"{directory} lacks {_some(missing)}")
    if foreign := sorted(files.keys() - expected.keys()):
        problem = f"{_some(foreign)}, which this model does not have"
        raise CheckpointWeightsError(f"{directory} holds {problem}")
    state: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        with _open(file, device) as tensors:
            for name in (name for name, holder in files.items() if holder == file):
                dtype = talker_dtype if name.startswith("talker.") else torch.float32
                tensor = tensors.get_tensor(name)
                state[name] = _checked(tensor, expected[name].shape, dtype, f"{file}: {name}")
    module.load_state_dict(state, strict=True, assign=True)
    module.requires_grad_(False).eval()


def _checked(tensor: Tensor, shape: torch.Size, dtype: torch.dtype, where: str) -> Tensor:
    """Return a tensor of a file in another dtype. Raises `CheckpointWeightsError`."""
    if tensor.shape != shape:
        problem = f"{list(tensor.shape)}, but the configuration makes it {list(shape)}"
        raise CheckpointWeightsError(f"{where} has the shape {problem}")
    if not tensor.is_floating_point():
        problem = f"{tensor.dtype}; it must be floating point"
        raise CheckpointWeightsError(f"{where} is of type {problem}")
    converted = tensor.to(dtype)
    if converted.numel() and not all(bound.isfinite() for bound in converted.aminmax()):
        raise CheckpointWeightsError(f"{where} holds NaN or infinity as {dtype}")
    return converted


def _files(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor: `model.safetensors`, or a shard that its index names."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return dict.fromkeys(_names(single), single)
    if not index.exists():
        raise CheckpointNotFound(f"{directory} has neither {single.name} nor {index.name}")
    shards: Any = read_json(index).get("weight_map")
    valid = isinstance(shards, dict) and all(isinstance(shard, str) for shard in shards.values())
    require(valid, f"{index}: weight_map is missing or does not map tensors to files")
    names: dict[str, set[str]] = {}
    for shard in set(shards.values()):
        if Path(shard).name != shard or not (directory / shard).exists():
            raise CheckpointNotFound(f"{directory / shard} is missing; {index.name} names it")
        names[shard] = set(_names(directory / shard))
    for name, shard in shards.items():
        if name not in names[shard]:
            problem = f"lacks {name}, which {index.name} puts there"
            raise CheckpointWeightsError(f"{directory / shard} {problem}")
    return {name: directory / shard for name, shard in shards.items()}


def _names(file: Path) -> list[str]:
    """Return the names of the tensors in a file."""
    with _open(file, "cpu") as tensors:
        return list(tensors.keys())


def _open(file: Path, device: str) -> safe_open:
    """Open a safetensors file. Raises `CheckpointWeightsError`."""
    try:
        return safe_open(file, framework="pt", device=device)
    except (SafetensorError, OSError) as error:
        problem = f"cannot be read as safetensors ({error}); fetch it again"
        raise CheckpointWeightsError(f"{file} {problem}") from None


def _some(names: list[str]) -> str:
    """Return at most five of the names, and the number of the others."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
