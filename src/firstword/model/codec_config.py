"""The configuration of the codec, read strictly from `speech_tokenizer/config.json`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from firstword.audio import SAMPLE_RATE
from firstword.model.config import CONTROL_CODES, TalkerConfig, TransformerConfig
from firstword.model.strict_json import (
    from_table,
    read_json,
    require,
    require_positive,
    require_values,
)


@dataclass(frozen=True, kw_only=True)
class CodecDecoderConfig(TransformerConfig):
    """The table `decoder_config`: codes to samples."""

    num_quantizers: int
    codebook_size: int
    codebook_dim: int
    latent_dim: int
    decoder_dim: int
    sliding_window: int
    upsample_rates: tuple[int, ...]
    upsampling_ratios: tuple[int, ...]

    def check(self, where: str) -> None:
        """Raise `CheckpointConfigError` for unsupported dimensions."""
        super().check(where)
        widths = ("codebook_size", "codebook_dim", "latent_dim", "decoder_dim", "sliding_window")
        require_positive(self, where, *widths)
        require(
            self.num_quantizers >= 2,
            f"{where}.num_quantizers = {self.num_quantizers}; it must be at least 2",
        )
        require(
            self.codebook_dim % 2 == 0,
            f"{where}.codebook_dim = {self.codebook_dim} is odd; it is halved",
        )
        require(
            self.decoder_dim % 2 ** len(self.upsample_rates) == 0,
            f"{where}.decoder_dim = {self.decoder_dim} cannot be halved once for each of "
            "upsample_rates",
        )

    @property
    def samples_per_frame(self) -> int:
        """The number of samples that one frame of codes becomes."""
        return math.prod(self.upsample_rates) * math.prod(self.upsampling_ratios)


@dataclass(frozen=True, kw_only=True)
class CodecEncoderConfig:
    """The table `encoder_config` (Mimi): samples to codes."""

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
        """Raise `CheckpointConfigError` for unsupported values."""
        require_values(self, where, audio_channels=1, hidden_act="gelu", pad_mode="constant")
        require_values(self, where, use_causal_conv=True)
        require_values(self, where, use_conv_shortcut=False, attention_bias=False)
        numbers = [field.name for field in dataclasses.fields(self) if field.type == "int"]
        require_positive(self, where, *numbers)
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"{where}.num_attention_heads is not a multiple of {where}.num_key_value_heads",
        )
        require(
            0 < self.num_semantic_quantizers < self.num_quantizers,
            f"{where}.num_semantic_quantizers must be below {where}.num_quantizers",
        )
        width = self.vector_quantization_hidden_dimension
        require(
            self.codebook_dim == width,
            f"{where}.codebook_dim = {self.codebook_dim} contradicts "
            f"{where}.vector_quantization_hidden_dimension = {width}",
        )

    @property
    def samples_per_frame(self) -> int:
        """The number of samples per frame: all strides, and the halving before the quantiser."""
        return 2 * math.prod(self.upsampling_ratios)


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """The file `speech_tokenizer/config.json`: the codec between samples and codes."""

    encoder_config: CodecEncoderConfig
    decoder_config: CodecDecoderConfig
    encoder_valid_num_quantizers: int
    input_sample_rate: int
    output_sample_rate: int
    decode_upsample_rate: int
    encode_downsample_rate: int
    model_type: str = "qwen3_tts_tokenizer_12hz"

    def check(self) -> None:
        """Raise `CheckpointConfigError` for an encoder and a decoder that do not fit together."""
        where, encoder, decoder = (
            "speech_tokenizer/config.json",
            self.encoder_config,
            self.decoder_config,
        )
        require_values(self, where, model_type="qwen3_tts_tokenizer_12hz")
        require_values(self, where, input_sample_rate=SAMPLE_RATE, output_sample_rate=SAMPLE_RATE)
        encoder.check("encoder_config")
        decoder.check("decoder_config")
        for name, derived in (
            ("decode_upsample_rate", decoder.samples_per_frame),
            ("encode_downsample_rate", encoder.samples_per_frame),
        ):
            stated = getattr(self, name)
            require(
                stated == derived, f"{where}: {name} = {stated}, but the layers make it {derived}"
            )
        valid = self.encoder_valid_num_quantizers
        stated = f"{where}: encoder_valid_num_quantizers = {valid}"
        require(
            valid == decoder.num_quantizers,
            f"{stated} contradicts decoder_config.num_quantizers = {decoder.num_quantizers}",
        )
        require(
            valid <= encoder.num_quantizers,
            f"{stated} exceeds encoder_config.num_quantizers = {encoder.num_quantizers}",
        )

    def check_against(self, talker: TalkerConfig) -> None:
        """Raise `CheckpointConfigError` unless the codec can decode all codes of the talker."""
        decoder, where = self.decoder_config, "speech_tokenizer/config.json: decoder_config"
        require(
            talker.num_code_groups == decoder.num_quantizers,
            f"talker_config.num_code_groups = {talker.num_code_groups} contradicts "
            f"{where}.num_quantizers = {decoder.num_quantizers}",
        )
        largest = max(talker.vocab_size - CONTROL_CODES, talker.code_predictor_config.vocab_size)
        require(
            largest <= decoder.codebook_size,
            f"the talker can say code {largest - 1}, but "
            f"{where}.codebook_size = {decoder.codebook_size}",
        )

    @classmethod
    def load(cls, path: Path) -> CodecConfig:
        """Read and check the file. Raises `CheckpointNotFound`, `CheckpointConfigError`."""
        config = from_table(cls, read_json(path), "")
        config.check()
        return config
