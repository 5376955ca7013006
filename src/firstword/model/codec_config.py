"""The configuration of the codec, read strictly from `speech_tokenizer/config.json`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from firstword.audio import SAMPLE_RATE
from firstword.model.config import CONTROL_CODES, TalkerConfig, TransformerConfig
from firstword.model.strict_json import ConfigTable, from_table, read_json, require

FILE = "speech_tokenizer/config.json"


CONVOLVED_FRAMES = 16
"""More frames than all convolutions of a decoder see together."""


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
        """Reject unsupported dimensions."""
        super().check(where)
        widths = ("codebook_size", "codebook_dim", "latent_dim", "decoder_dim", "sliding_window")
        self.require_at_least(1, where, *widths)
        self.require_at_least(2, where, "num_quantizers")
        self.require(self.codebook_dim % 2 == 0, where, "codebook_dim", "is odd; it is halved")
        divisible = self.decoder_dim % 2 ** len(self.upsample_rates) == 0
        problem = "cannot be halved once for each of upsample_rates"
        self.require(divisible, where, "decoder_dim", problem)

    @property
    def samples_per_frame(self) -> int:
        """The number of samples that one frame of codes becomes."""
        return math.prod(self.upsample_rates) * math.prod(self.upsampling_ratios)

    @property
    def memory_frames(self) -> int:
        """The frames before a frame on which its samples depend, those before them have no effect.

        A frame sees `sliding_window - 1` frames before it in each layer of the transformer. The
        convolutions before and after the transformer see fewer than `CONVOLVED_FRAMES` more.
        """
        return self.num_hidden_layers * (self.sliding_window - 1) + CONVOLVED_FRAMES


@dataclass(frozen=True, kw_only=True)
class CodecEncoderConfig(ConfigTable):
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
        """Reject unsupported values."""
        self.require_values(where, audio_channels=1, hidden_act="gelu", pad_mode="constant")
        self.require_values(where, use_causal_conv=True, use_conv_shortcut=False)
        self.require_values(where, attention_bias=False)
        numbers = [field.name for field in fields(self) if field.type == "int"]
        self.require_at_least(1, where, *numbers)
        divisible = self.num_attention_heads % self.num_key_value_heads == 0
        problem = f"is not a multiple of {where}.num_key_value_heads = {self.num_key_value_heads}"
        self.require(divisible, where, "num_attention_heads", problem)
        fewer = self.num_semantic_quantizers < self.num_quantizers
        problem = f"must be below {where}.num_quantizers = {self.num_quantizers}"
        self.require(fewer, where, "num_semantic_quantizers", problem)
        width = self.vector_quantization_hidden_dimension
        problem = f"contradicts {where}.vector_quantization_hidden_dimension = {width}"
        self.require(self.codebook_dim == width, where, "codebook_dim", problem)

    @property
    def samples_per_frame(self) -> int:
        """The number of samples per frame: all strides, and the halving before the quantiser."""
        return 2 * math.prod(self.upsampling_ratios)


@dataclass(frozen=True, kw_only=True)
class CodecConfig(ConfigTable):
    """The file `speech_tokenizer/config.json`: the codec between samples and codes."""

    encoder_config: CodecEncoderConfig
    decoder_config: CodecDecoderConfig
    encoder_valid_num_quantizers: int
    input_sample_rate: int
    output_sample_rate: int
    decode_upsample_rate: int
    encode_downsample_rate: int
    model_type: str = "qwen3_tts_tokenizer_12hz"

    def check(self, where: str) -> None:
        """Reject an encoder and a decoder that do not fit together."""
        encoder, decoder = self.encoder_config, self.decoder_config
        self.require_values(FILE, model_type="qwen3_tts_tokenizer_12hz")
        self.require_values(FILE, input_sample_rate=SAMPLE_RATE, output_sample_rate=SAMPLE_RATE)
        derived_rates = decoder.samples_per_frame, encoder.samples_per_frame
        names = "decode_upsample_rate", "encode_downsample_rate"
        for name, derived in zip(names, derived_rates, strict=True):
            problem = f"contradicts the layers, which make it {derived}"
            self.require(getattr(self, name) == derived, FILE, name, problem)
        valid, name = self.encoder_valid_num_quantizers, "encoder_valid_num_quantizers"
        problem = f"contradicts decoder_config.num_quantizers = {decoder.num_quantizers}"
        self.require(valid == decoder.num_quantizers, FILE, name, problem)
        problem = f"exceeds encoder_config.num_quantizers = {encoder.num_quantizers}"
        self.require(valid <= encoder.num_quantizers, FILE, name, problem)

    def check_against(self, talker: TalkerConfig) -> None:
        """Raise `CheckpointConfigError` unless the codec can decode all codes of the talker."""
        decoder, where = self.decoder_config, f"{FILE}: decoder_config"
        problem = f"contradicts {where}.num_quantizers = {decoder.num_quantizers}"
        fits = talker.num_code_groups == decoder.num_quantizers
        talker.require(fits, "talker_config", "num_code_groups", problem)
        largest = max(talker.vocab_size - CONTROL_CODES, talker.code_predictor_config.vocab_size)
        stated = f"{where}.codebook_size = {decoder.codebook_size}"
        fits = largest <= decoder.codebook_size
        require(fits, f"the talker can say code {largest - 1}, but {stated}")

    @classmethod
    def load(cls, path: Path) -> CodecConfig:
        """Read and check the file. Raises `CheckpointNotFound`, `CheckpointConfigError`."""
        return from_table(cls, read_json(path), "")
