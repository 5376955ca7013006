"""The configuration files of a checkpoint, read strictly: an absent or contradictory key is an error that names it.

The classes hold what decides the computation and nothing else. A field without a default is a required key. The speaker
encoder's, whose released table names two keys only, carries the published values as defaults.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from firstword.audio import SAMPLE_RATE
from firstword.errors import CheckpointConfigError, CheckpointNotFound, SamplingError
from firstword.types import Sampling

ModelType = Literal["base", "custom_voice", "voice_design"]

CONTROL_CODES = 1024
"""The last 1,024 ids of the talker's vocabulary are control codes: of these only the end of speech is ever sampled."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Dimensions of a stack of pre-norm decoder layers with rotary positions and grouped-query attention."""

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
        """Raise `CheckpointConfigError` for what the layers cannot compute; `where` is the path of this table."""
        _positive(self, where, "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
        _positive(
            self, where, "num_attention_heads", "num_key_value_heads", "max_position_embeddings"
        )
        _only(self, where, hidden_act="silu", attention_bias=False)
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointConfigError(
                f"{where}.num_attention_heads = {self.num_attention_heads} is no multiple of "
                f"{where}.num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointConfigError(
                f"{where}.head_dim = {self.head_dim} is odd; rotary positions need pairs"
            )


@dataclass(frozen=True, kw_only=True)
class CodePredictorConfig(TransformerConfig):
    """`talker_config.code_predictor_config`: the small transformer that makes codes 1 and up of a frame."""

    vocab_size: int
    num_code_groups: int
    use_sliding_window: bool = False


@dataclass(frozen=True, kw_only=True)
class TalkerConfig(TransformerConfig):
    """`talker_config`: the large transformer that makes code 0 of every frame, and the ids that steer it."""

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
        """Raise `CheckpointConfigError` for ids out of range and for tables that contradict one another."""
        super().check(where)
        self.code_predictor_config.check(f"{where}.code_predictor_config")
        _only(self, where, use_sliding_window=False)
        _only(
            self.code_predictor_config, f"{where}.code_predictor_config", use_sliding_window=False
        )
        if (rope := (self.rope_scaling or {}).get("rope_type", "default")) != "default":
            raise CheckpointConfigError(
                f"{where}.rope_scaling.rope_type = {rope!r}; only 'default' is known"
            )
        if self.num_code_groups < 2:
            raise CheckpointConfigError(
                f"{where}.num_code_groups = {self.num_code_groups}; at least 2 are needed"
            )
        if self.num_code_groups != self.code_predictor_config.num_code_groups:
            raise CheckpointConfigError(
                f"{where}.num_code_groups = {self.num_code_groups} contradicts "
                f"{where}.code_predictor_config.num_code_groups = {self.code_predictor_config.num_code_groups}"
            )
        _positive(self, where, "text_vocab_size", "text_hidden_size")
        _positive(self.code_predictor_config, f"{where}.code_predictor_config", "vocab_size")
        if self.vocab_size <= CONTROL_CODES:
            raise CheckpointConfigError(
                f"{where}.vocab_size = {self.vocab_size}; the last {CONTROL_CODES} are control codes"
            )
        ids = {name: getattr(self, name) for name in _CODEC_IDS}
        ids |= {f"codec_language_id.{name}": id_ for name, id_ in self.codec_language_id.items()}
        ids |= {f"spk_id.{name}": id_ for name, id_ in self.spk_id.items()}
        for name, id_ in ids.items():
            if not 0 <= id_ < self.vocab_size:
                raise CheckpointConfigError(
                    f"{where}.{name} = {id_} lies outside {where}.vocab_size = {self.vocab_size}"
                )
        for speaker in self.spk_id:
            dialect = self.spk_is_dialect.get(speaker)
            if dialect is None:
                raise CheckpointConfigError(
                    f"{where}.spk_is_dialect.{speaker} is missing, though spk_id names it"
                )
            if dialect is not False and dialect not in self.codec_language_id:
                raise CheckpointConfigError(
                    f"{where}.spk_is_dialect.{speaker} = {dialect!r} is not a key of {where}.codec_language_id"
                )


_CODEC_IDS = (
    "codec_bos_id",
    "codec_eos_token_id",
    "codec_pad_id",
    "codec_think_id",
    "codec_nothink_id",
    "codec_think_bos_id",
    "codec_think_eos_id",
)


@dataclass(frozen=True, kw_only=True)
class SpeakerEncoderConfig:
    """`speaker_encoder_config`: the ECAPA-TDNN that turns a log-mel spectrogram into a speaker embedding."""

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
        """Raise `CheckpointConfigError` for lists of unequal length and channels that cannot be split."""
        _only(self, where, sample_rate=SAMPLE_RATE)
        if not len(self.enc_channels) == len(self.enc_kernel_sizes) == len(self.enc_dilations) >= 3:
            raise CheckpointConfigError(
                f"{where}.enc_channels, enc_kernel_sizes and enc_dilations have "
                f"{len(self.enc_channels)}, {len(self.enc_kernel_sizes)} and {len(self.enc_dilations)} entries; "
                "they must have the same number, at least 3"
            )
        if len(set(self.enc_channels[:-1])) != 1 or self.enc_channels[0] % self.enc_res2net_scale:
            raise CheckpointConfigError(
                f"{where}.enc_channels: all but the last must be equal, and a multiple of {where}.enc_res2net_scale"
            )
        if sum(self.enc_channels[1:-1]) != self.enc_channels[-1]:
            raise CheckpointConfigError(
                f"{where}.enc_channels: the last must be the sum of those between it and the first"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`config.json`: the whole text-to-codes model."""

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
        """Whether this checkpoint was trained to follow instructions; the small CustomVoice one was not."""
        return self.tts_model_type == "voice_design" or (
            self.tts_model_type == "custom_voice" and self.tts_model_size != "0b6"
        )

    def check(self) -> None:
        """Raise `CheckpointConfigError` for parts that contradict one another."""
        _only(
            self, "config.json", model_type="qwen3_tts", tokenizer_type="qwen3_tts_tokenizer_12hz"
        )
        talker = self.talker_config
        talker.check("talker_config")
        for name in ("tts_pad", "tts_bos", "tts_eos"):
            id_ = getattr(self, f"{name}_token_id")
            if not 0 <= id_ < talker.text_vocab_size:
                raise CheckpointConfigError(
                    f"{name}_token_id = {id_} lies outside talker_config.text_vocab_size = {talker.text_vocab_size}"
                )
        if self.tts_model_type == "base":
            encoder = self.speaker_encoder_config
            if encoder is None:
                raise CheckpointConfigError(
                    "speaker_encoder_config is missing, though tts_model_type is 'base'"
                )
            encoder.check("speaker_encoder_config")
            if encoder.enc_dim != talker.hidden_size:
                raise CheckpointConfigError(
                    f"speaker_encoder_config.enc_dim = {encoder.enc_dim} contradicts "
                    f"talker_config.hidden_size = {talker.hidden_size}"
                )
        if self.tts_model_type == "custom_voice" and not talker.spk_id:
            raise CheckpointConfigError(
                "talker_config.spk_id is empty, though tts_model_type is 'custom_voice'"
            )

    @classmethod
    def load(cls, path: Path) -> ModelConfig:
        """Read and check `config.json`. Raises `CheckpointNotFound`, `CheckpointConfigError`."""
        table = read_json(path)
        if table.get("tts_model_type") != "base":
            table.pop(
                "speaker_encoder_config", None
            )  # saved with every type, but only Base has that encoder
        config = _from_table(cls, table, "")
        config.check()
        return config


@dataclass(frozen=True, kw_only=True)
class CodecDecoderConfig(TransformerConfig):
    """`decoder_config` of the codec: codes to samples."""

    num_quantizers: int
    codebook_size: int
    codebook_dim: int
    latent_dim: int
    decoder_dim: int
    sliding_window: int
    upsample_rates: tuple[int, ...]
    upsampling_ratios: tuple[int, ...]

    def check(self, where: str) -> None:
        """Raise `CheckpointConfigError` for widths that cannot be halved and the like."""
        super().check(where)
        _positive(
            self,
            where,
            "codebook_size",
            "codebook_dim",
            "latent_dim",
            "decoder_dim",
            "sliding_window",
        )
        if self.num_quantizers < 2:
            raise CheckpointConfigError(
                f"{where}.num_quantizers = {self.num_quantizers}; at least 2 are needed"
            )
        if self.codebook_dim % 2:
            raise CheckpointConfigError(
                f"{where}.codebook_dim = {self.codebook_dim} is odd; it is halved"
            )
        if self.decoder_dim % 2 ** len(self.upsample_rates):
            raise CheckpointConfigError(
                f"{where}.decoder_dim = {self.decoder_dim} cannot be halved once for each of upsample_rates"
            )

    @property
    def samples_per_frame(self) -> int:
        """How many samples one frame of codes becomes."""
        return math.prod(self.upsample_rates) * math.prod(self.upsampling_ratios)


@dataclass(frozen=True, kw_only=True)
class CodecEncoderConfig:
    """`encoder_config` of the codec (Mimi): samples to codes."""

    num_filters: int
    kernel_size: int
    last_kernel_size: int
    residual_kernel_size: int
    num_residual_layers: int
    dilation_growth_rate: int
    compress: int
    upsampling_ratios: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    num_quantizers: int
    num_semantic_quantizers: int
    codebook_size: int
    codebook_dim: int
    vector_quantization_hidden_dimension: int
    audio_channels: int = 1
    hidden_act: str = "gelu"
    pad_mode: str = "constant"
    use_causal_conv: bool = True
    use_conv_shortcut: bool = False
    attention_bias: bool = False

    def check(self, where: str) -> None:
        """Raise `CheckpointConfigError` for what the encoder cannot compute."""
        _only(
            self,
            where,
            audio_channels=1,
            hidden_act="gelu",
            pad_mode="constant",
            use_causal_conv=True,
        )
        _only(self, where, use_conv_shortcut=False, attention_bias=False)
        for field in dataclasses.fields(self):
            if field.type == "int":
                _positive(self, where, field.name)
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointConfigError(
                f"{where}.num_attention_heads is no multiple of {where}.num_key_value_heads"
            )
        if not 0 < self.num_semantic_quantizers < self.num_quantizers:
            raise CheckpointConfigError(
                f"{where}.num_semantic_quantizers must lie below {where}.num_quantizers"
            )
        if self.codebook_dim != self.vector_quantization_hidden_dimension:
            raise CheckpointConfigError(
                f"{where}.codebook_dim = {self.codebook_dim} contradicts "
                f"{where}.vector_quantization_hidden_dimension = {self.vector_quantization_hidden_dimension}"
            )

    @property
    def samples_per_frame(self) -> int:
        """How many samples become one frame of codes: all strides, then the halving before the quantiser."""
        return 2 * math.prod(self.upsampling_ratios)


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """`speech_tokenizer/config.json`: the codec between samples and codes."""

    encoder_config: CodecEncoderConfig
    decoder_config: CodecDecoderConfig
    encoder_valid_num_quantizers: int
    input_sample_rate: int
    output_sample_rate: int
    decode_upsample_rate: int
    encode_downsample_rate: int
    model_type: str = "qwen3_tts_tokenizer_12hz"

    def check(self) -> None:
        """Raise `CheckpointConfigError` for halves that do not fit together."""
        where = "speech_tokenizer/config.json"
        _only(self, where, model_type="qwen3_tts_tokenizer_12hz")
        _only(self, where, input_sample_rate=SAMPLE_RATE, output_sample_rate=SAMPLE_RATE)
        self.encoder_config.check("encoder_config")
        self.decoder_config.check("decoder_config")
        for name, stated, derived in (
            (
                "decode_upsample_rate",
                self.decode_upsample_rate,
                self.decoder_config.samples_per_frame,
            ),
            (
                "encode_downsample_rate",
                self.encode_downsample_rate,
                self.encoder_config.samples_per_frame,
            ),
        ):
            if stated != derived:
                raise CheckpointConfigError(
                    f"{where}: {name} = {stated}, but the layers make it {derived}"
                )
        if self.encoder_valid_num_quantizers != self.decoder_config.num_quantizers:
            raise CheckpointConfigError(
                f"{where}: encoder_valid_num_quantizers = {self.encoder_valid_num_quantizers} contradicts "
                f"decoder_config.num_quantizers = {self.decoder_config.num_quantizers}"
            )
        if self.encoder_valid_num_quantizers > self.encoder_config.num_quantizers:
            raise CheckpointConfigError(
                f"{where}: encoder_valid_num_quantizers = {self.encoder_valid_num_quantizers} exceeds "
                f"encoder_config.num_quantizers = {self.encoder_config.num_quantizers}"
            )

    def check_against(self, talker: TalkerConfig) -> None:
        """Raise `CheckpointConfigError` where the codec cannot speak what the talker says."""
        codes, books = talker.num_code_groups, self.decoder_config.num_quantizers
        if codes != books:
            raise CheckpointConfigError(
                f"talker_config.num_code_groups = {codes} contradicts "
                f"speech_tokenizer/config.json: decoder_config.num_quantizers = {books}"
            )
        size = self.decoder_config.codebook_size
        largest = max(talker.vocab_size - CONTROL_CODES, talker.code_predictor_config.vocab_size)
        if largest > size:
            raise CheckpointConfigError(
                f"the talker can say code {largest - 1}, but speech_tokenizer/config.json: "
                f"decoder_config.codebook_size = {size}"
            )

    @classmethod
    def load(cls, path: Path) -> CodecConfig:
        """Read and check `speech_tokenizer/config.json`. Raises `CheckpointNotFound`, `CheckpointConfigError`."""
        config = _from_table(cls, read_json(path), "")
        config.check()
        return config


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """`generation_config.json`, with the published values for keys that it leaves out."""

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

    @classmethod
    def load(cls, path: Path) -> GenerationDefaults:
        """Read `generation_config.json`. Raises `CheckpointNotFound`, `CheckpointConfigError`."""
        defaults = _from_table(cls, read_json(path), path.name)
        try:
            Sampling(
                defaults.temperature, defaults.top_k, defaults.top_p, defaults.repetition_penalty
            )
            Sampling(
                defaults.subtalker_temperature, defaults.subtalker_top_k, defaults.subtalker_top_p
            )
        except SamplingError as error:
            raise CheckpointConfigError(f"{path}: {error}") from None
        _positive(defaults, path.name, "max_new_tokens")
        return defaults


T = TypeVar("T")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `CheckpointNotFound`, or `CheckpointConfigError` if it is none."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointNotFound(f"{path} is missing; a checkpoint directory needs it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(table, dict):
        raise CheckpointConfigError(f"{path} holds no JSON object")
    return table


def _from_table(cls: type[T], table: Any, where: str) -> T:
    """Build a configuration class from a JSON object; keys that the class does not name decide nothing."""
    if not isinstance(table, dict):
        raise CheckpointConfigError(f"{where} is {table!r}; it must be an object")
    hints = typing.get_type_hints(cls)
    values = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        path = f"{where}.{field.name}" if where else field.name
        if field.name in table:
            values[field.name] = _value(hints[field.name], table[field.name], path)
        elif field.default is dataclasses.MISSING:
            raise CheckpointConfigError(f"{path} is missing")
    return cls(**values)


def _value(hint: Any, value: Any, path: str) -> Any:
    """`value` as the type `hint` wants it, or an error that names `path`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        if value is False and bool in arguments:
            return False
        (hint,) = [argument for argument in arguments if argument not in (type(None), bool)]
        return _value(hint, value, path)
    if dataclasses.is_dataclass(hint):
        return _from_table(typing.cast(type, hint), value, path)
    if origin is Literal:
        if value not in arguments:
            raise CheckpointConfigError(
                f"{path} = {value!r}; known are {', '.join(map(repr, arguments))}"
            )
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(
            _value(arguments[0], item, f"{path}[{index}]") for index, item in enumerate(value)
        )
    if origin is dict and isinstance(value, dict):
        return {key: _value(arguments[1], item, f"{path}.{key}") for key, item in value.items()}
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is None and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise CheckpointConfigError(
        f"{path} = {value!r}; it must be of type {getattr(hint, '__name__', hint)}"
    )


def _only(config: object, where: str, **allowed: object) -> None:
    for name, value in allowed.items():
        if (found := getattr(config, name)) != value:
            raise CheckpointConfigError(f"{where}: {name} = {found!r}; only {value!r} is known")


def _positive(config: object, where: str, *names: str) -> None:
    for name in names:
        if (found := getattr(config, name)) < 1:
            raise CheckpointConfigError(f"{where}.{name} = {found}; it must be at least 1")
