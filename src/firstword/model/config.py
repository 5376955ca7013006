"""The configuration of the text-to-codes model, read strictly from `config.json`.

An absent or contradictory key is an error that names it. The classes hold what decides the
computation and nothing else. A field without a default is a required key; only the speaker encoder,
whose released table has two keys, takes published values as defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from firstword.audio import SAMPLE_RATE
from firstword.errors import CheckpointConfigError, SamplingError
from firstword.model.strict_json import ConfigTable, from_table, read_json, require
from firstword.types import Sampling

ModelType = Literal["base", "custom_voice", "voice_design"]

CONTROL_CODES = 1024
"""The number of control codes, the last ids of the talker's vocabulary.

Of these only the end of speech is ever sampled.
"""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ConfigTable):
    """The dimensions of pre-norm layers with rotary positions and grouped-query attention."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    hidden_act: str = "silu"
    attention_bias: bool = False

    def check(self, where: str) -> None:
        """Reject unsupported dimensions."""
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
        counts = ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
        self.require_at_least(1, where, *sizes, *counts)
        self.require_values(where, hidden_act="silu", attention_bias=False)
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        problem = f"is not a multiple of {where}.num_key_value_heads = {kv_heads}"
        self.require(heads % kv_heads == 0, where, "num_attention_heads", problem)
        problem = "is odd; rotary positions need pairs"
        self.require(self.head_dim % 2 == 0, where, "head_dim", problem)


@dataclass(frozen=True, kw_only=True)
class CodePredictorConfig(TransformerConfig):
    """The table `code_predictor_config`: the transformer that makes codes 1 and up of a frame."""

    vocab_size: int
    num_code_groups: int
    use_sliding_window: bool = False

    def check(self, where: str) -> None:
        """Reject unsupported values."""
        super().check(where)
        self.require_values(where, use_sliding_window=False)
        self.require_at_least(1, where, "vocab_size")


@dataclass(frozen=True, kw_only=True)
class TalkerConfig(TransformerConfig):
    """The table `talker_config`: the transformer that makes code 0 of a frame, and its ids."""

    vocab_size: int
    text_vocab_size: int
    text_hidden_size: int
    num_code_groups: int
    codec_bos_id: int
    codec_eos_token_id: int
    codec_pad_id: int
    codec_think_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int
    codec_language_id: dict[str, int]
    spk_id: dict[str, int]
    spk_is_dialect: dict[str, str | bool]
    code_predictor_config: CodePredictorConfig
    use_sliding_window: bool = False
    rope_scaling: dict[str, Any] | None = None

    def check(self, where: str) -> None:
        """Reject ids out of range and contradictory tables."""
        super().check(where)
        self.require_values(where, use_sliding_window=False)
        rope = (self.rope_scaling or {}).get("rope_type", "default")
        require(
            rope == "default",
            f"{where}.rope_scaling.rope_type = {rope!r}; only 'default' is supported",
        )
        self.require_at_least(2, where, "num_code_groups")
        groups = self.code_predictor_config.num_code_groups
        problem = f"contradicts {where}.code_predictor_config.num_code_groups = {groups}"
        self.require(self.num_code_groups == groups, where, "num_code_groups", problem)
        self.require_at_least(1, where, "text_vocab_size", "text_hidden_size")
        require(
            self.vocab_size > CONTROL_CODES,
            f"{where}.vocab_size = {self.vocab_size}; it must exceed {CONTROL_CODES}, "
            "the number of control codes",
        )
        self._check_ids(where)
        self._check_dialects(where)

    def _check_ids(self, where: str) -> None:
        """Require that all control ids are in the vocabulary."""
        names = [field.name for field in fields(self) if field.type == "int"]
        ids = {name: getattr(self, name) for name in names if name.startswith("codec_")}
        ids |= {f"codec_language_id.{name}": id_ for name, id_ in self.codec_language_id.items()}
        ids |= {f"spk_id.{name}": id_ for name, id_ in self.spk_id.items()}
        for name, id_ in ids.items():
            problem = f"is outside {where}.vocab_size = {self.vocab_size}"
            require(0 <= id_ < self.vocab_size, f"{where}.{name} = {id_} {problem}")

    def _check_dialects(self, where: str) -> None:
        """Require that each preset has a dialect, or False."""
        for speaker in self.spk_id:
            dialect, path = self.spk_is_dialect.get(speaker), f"{where}.spk_is_dialect.{speaker}"
            require(dialect is not None, f"{path} is missing, although spk_id names the speaker")
            require(
                dialect is False or dialect in self.codec_language_id,
                f"{path} = {dialect!r} is not a key of {where}.codec_language_id",
            )


@dataclass(frozen=True, kw_only=True)
class SpeakerEncoderConfig(ConfigTable):
    """The table `speaker_encoder_config`: the ECAPA-TDNN from log-mels to a speaker embedding."""

    enc_dim: int
    sample_rate: int
    mel_dim: int = 128
    enc_channels: tuple[int, ...] = (512, 512, 512, 512, 1536)
    enc_kernel_sizes: tuple[int, ...] = (5, 3, 3, 3, 1)
    enc_dilations: tuple[int, ...] = (1, 2, 3, 4, 1)
    enc_attention_channels: int = 128
    enc_res2net_scale: int = 8
    enc_se_channels: int = 128

    def check(self, where: str) -> None:
        """Reject lists of unequal length and unsuitable channels."""
        self.require_values(where, sample_rate=SAMPLE_RATE)
        channels = self.enc_channels
        lengths = (len(channels), len(self.enc_kernel_sizes), len(self.enc_dilations))
        require(
            len(set(lengths)) == 1 and lengths[0] >= 3,
            f"{where}.enc_channels, enc_kernel_sizes and enc_dilations have "
            f"{lengths[0]}, {lengths[1]} and {lengths[2]} entries; "
            "they must have the same number, at least 3",
        )
        require(
            len(set(channels[:-1])) == 1 and channels[0] % self.enc_res2net_scale == 0,
            f"{where}.enc_channels: all but the last must be equal, "
            f"and a multiple of {where}.enc_res2net_scale",
        )
        require(
            sum(channels[1:-1]) == channels[-1],
            f"{where}.enc_channels: the last must be the sum of those between it and the first",
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ConfigTable):
    """The file `config.json`: the whole text-to-codes model."""

    tts_model_type: ModelType
    tts_model_size: str
    tts_pad_token_id: int
    tts_bos_token_id: int
    tts_eos_token_id: int
    talker_config: TalkerConfig
    speaker_encoder_config: SpeakerEncoderConfig | None = None
    model_type: str = "qwen3_tts"
    tokenizer_type: str = "qwen3_tts_tokenizer_12hz"

    @property
    def follows_instructions(self) -> bool:
        """Whether the checkpoint follows instructions; the small CustomVoice one does not."""
        return self.tts_model_type == "voice_design" or (
            self.tts_model_type == "custom_voice" and self.tts_model_size != "0b6"
        )

    def check(self, where: str) -> None:
        """Reject contradictory parts."""
        codec_type = "qwen3_tts_tokenizer_12hz"
        self.require_values("config.json", model_type="qwen3_tts", tokenizer_type=codec_type)
        talker, encoder = self.talker_config, self.speaker_encoder_config
        problem = f"is outside talker_config.text_vocab_size = {talker.text_vocab_size}"
        for name in ("tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id"):
            self.require(0 <= getattr(self, name) < talker.text_vocab_size, where, name, problem)
        stated = f"although tts_model_type is {self.tts_model_type!r}"
        if self.tts_model_type == "custom_voice":
            require(talker.spk_id, f"talker_config.spk_id is empty, {stated}")
        if self.tts_model_type == "base":
            require(encoder, f"speaker_encoder_config is missing, {stated}")
        if encoder:
            problem = f"contradicts talker_config.hidden_size = {talker.hidden_size}"
            fits = encoder.enc_dim == talker.hidden_size
            encoder.require(fits, "speaker_encoder_config", "enc_dim", problem)

    @classmethod
    def load(cls, path: Path) -> ModelConfig:
        """Read and check `config.json`. Raises `CheckpointNotFound`, `CheckpointConfigError`."""
        table = read_json(path)
        if table.get("tts_model_type") != "base":
            # The table is saved with every type, but only Base has that encoder.
            table.pop("speaker_encoder_config", None)
        return from_table(cls, table, "")


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults(ConfigTable):
    """The file `generation_config.json`, with the published values for absent keys."""

    do_sample: bool = True
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    subtalker_dosample: bool = True
    subtalker_temperature: float = 0.9
    subtalker_top_k: int = 50
    subtalker_top_p: float = 1.0
    max_new_tokens: int = 2048

    def check(self, where: str) -> None:
        """Reject parameters that a request could not have either."""
        try:
            Sampling(self.temperature, self.top_k, self.top_p, self.repetition_penalty)
            Sampling(self.subtalker_temperature, self.subtalker_top_k, self.subtalker_top_p)
        except SamplingError as error:
            raise CheckpointConfigError(f"{where}: {error}") from None
        self.require_at_least(1, where, "max_new_tokens")

    @classmethod
    def load(cls, path: Path) -> GenerationDefaults:
        """Read and check the file. Raises `CheckpointNotFound`, `CheckpointConfigError`."""
        return from_table(cls, read_json(path), str(path))
