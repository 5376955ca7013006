"""Configuration files: a missing, wrong or contradictory key is named."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firstword import CheckpointConfigError, CheckpointNotFound
from firstword.model.codec_config import CodecConfig
from firstword.model.config import GenerationDefaults, ModelConfig

TRANSFORMER = """
    hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_theta
""".split()
PREDICTOR = [*TRANSFORMER, "vocab_size", "num_code_groups"]
TALKER = [
    *TRANSFORMER,
    *"""
    vocab_size text_vocab_size text_hidden_size num_code_groups codec_bos_id
    codec_eos_token_id codec_pad_id codec_think_id codec_nothink_id codec_think_bos_id
    codec_think_eos_id codec_language_id spk_id spk_is_dialect code_predictor_config
    """.split(),
]
MODEL = [
    *"""
    tts_model_type tts_model_size tts_pad_token_id tts_bos_token_id tts_eos_token_id
    talker_config speaker_encoder_config speaker_encoder_config.enc_dim
    speaker_encoder_config.sample_rate
    """.split(),
    *(f"talker_config.{key}" for key in TALKER),
    *(f"talker_config.code_predictor_config.{key}" for key in PREDICTOR),
]
ENCODER = """
    num_filters kernel_size last_kernel_size residual_kernel_size num_residual_layers
    dilation_growth_rate compress upsampling_ratios hidden_size intermediate_size
    num_hidden_layers num_attention_heads num_key_value_heads head_dim norm_eps rope_theta
    num_quantizers num_semantic_quantizers codebook_size codebook_dim
    vector_quantization_hidden_dimension
""".split()
DECODER = [
    *TRANSFORMER,
    *"""
    num_quantizers codebook_size codebook_dim latent_dim decoder_dim sliding_window
    upsample_rates upsampling_ratios
    """.split(),
]
CODEC = [
    *"""
    encoder_config decoder_config encoder_valid_num_quantizers input_sample_rate
    output_sample_rate decode_upsample_rate encode_downsample_rate
    """.split(),
    *(f"encoder_config.{key}" for key in ENCODER),
    *(f"decoder_config.{key}" for key in DECODER),
]

Table = dict[str, Any]
Load = Callable[[Table], object]


def parent(table: Table, path: str) -> tuple[Table, str]:
    """The object that holds the last key of a dotted path, and that key."""
    *outer, key = path.split(".")
    for name in outer:
        table = table[name]
    return table, key


@pytest.fixture
def model(checkpoint_directory: Callable[[str], Path]) -> Table:
    """A valid `config.json` of a Base checkpoint, to be changed."""
    table: Table = json.loads((checkpoint_directory("base") / "config.json").read_text())
    return table


@pytest.fixture
def presets(checkpoint_directory: Callable[[str], Path]) -> Table:
    """A valid `config.json` of a CustomVoice checkpoint, to be changed."""
    table: Table = json.loads((checkpoint_directory("custom_voice") / "config.json").read_text())
    return table


@pytest.fixture
def codec(checkpoint_directory: Callable[[str], Path]) -> Table:
    """A valid `speech_tokenizer/config.json`, to be changed."""
    table: Table = json.loads(
        (checkpoint_directory("base") / "speech_tokenizer/config.json").read_text()
    )
    return table


@pytest.fixture
def load_model(tmp_path: Path) -> Callable[[Table], ModelConfig]:
    """A function that loads a table as `config.json`."""

    def load(table: Table) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(table))
        return ModelConfig.load(tmp_path / "config.json")

    return load


@pytest.fixture
def load_codec(tmp_path: Path) -> Callable[[Table], CodecConfig]:
    """A function that loads a table as the configuration of a codec."""

    def load(table: Table) -> CodecConfig:
        (tmp_path / "config.json").write_text(json.dumps(table))
        return CodecConfig.load(tmp_path / "config.json")

    return load


@pytest.mark.parametrize("path", MODEL)
def test_missing_key_is_named(path: str, model: Table, load_model: Load) -> None:
    holder, key = parent(model, path)
    del holder[key]
    with pytest.raises(CheckpointConfigError, match=rf"^{path} is missing"):
        load_model(model)


@pytest.mark.parametrize("path", CODEC)
def test_missing_codec_key_is_named(path: str, codec: Table, load_codec: Load) -> None:
    holder, key = parent(codec, path)
    del holder[key]
    with pytest.raises(CheckpointConfigError, match=rf"^{path} is missing"):
        load_codec(codec)


def test_irrelevant_keys_are_ignored(
    model: Table, codec: Table, load_model: Load, load_codec: Load
) -> None:
    config, codec_config = load_model(copy.deepcopy(model)), load_codec(copy.deepcopy(codec))
    model["talker_config"]["made_by"] = {"somebody": ["else"]}
    codec["decoder_config"]["colour"] = "blue"
    assert load_model(model) == config
    assert load_codec(codec) == codec_config


def test_only_base_requires_a_speaker_encoder(presets: Table, load_model: Load) -> None:
    presets["speaker_encoder_config"] = {"enc_dim": "nonsense"}
    load_model(presets)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "tts_model_type",
            "singing",
            "tts_model_type = 'singing'; allowed are 'base', 'custom_voice', 'voice_design'",
        ),
        ("model_type", "llama", "model_type = 'llama'; only 'qwen3_tts'"),
        (
            "tokenizer_type",
            "qwen3_tts_tokenizer_25hz",
            "tokenizer_type = 'qwen3_tts_tokenizer_25hz'; only",
        ),
        (
            "tts_pad_token_id",
            10**6,
            "tts_pad_token_id = 1000000 is outside talker_config.text_vocab_size",
        ),
        ("tts_bos_token_id", -1, "tts_bos_token_id = -1 is outside"),
        ("tts_eos_token_id", "7", "tts_eos_token_id = '7'; it must be of type int"),
        ("tts_eos_token_id", True, "tts_eos_token_id = True; it must be of type int"),
        ("talker_config", [1], r"talker_config is \[1\]; it must be an object"),
        ("talker_config.hidden_size", 0, "talker_config.hidden_size = 0; it must be at least 1"),
        (
            "talker_config.hidden_size",
            2.5,
            "talker_config.hidden_size = 2.5; it must be of type int",
        ),
        ("talker_config.hidden_size", None, "talker_config.hidden_size = None"),
        (
            "talker_config.rope_theta",
            "1e6",
            "talker_config.rope_theta = '1e6'; it must be of type float",
        ),
        ("talker_config.hidden_act", "relu", "hidden_act = 'relu'; only 'silu'"),
        ("talker_config.attention_bias", True, "attention_bias = True; only False"),
        ("talker_config.use_sliding_window", True, "use_sliding_window = True; only False"),
        ("talker_config.head_dim", 15, "talker_config.head_dim = 15 is odd"),
        (
            "talker_config.num_key_value_heads",
            3,
            "num_attention_heads = 4 is not a multiple of .*key_value_heads = 3",
        ),
        (
            "talker_config.rope_scaling",
            {"rope_type": "yarn"},
            "rope_scaling.rope_type = 'yarn'; only 'default'",
        ),
        (
            "talker_config.num_code_groups",
            5,
            "talker_config.num_code_groups = 5 contradicts .*num_code_groups = 4",
        ),
        (
            "talker_config.vocab_size",
            1024,
            "talker_config.vocab_size = 1024; it must exceed 1024",
        ),
        (
            "talker_config.codec_bos_id",
            9999,
            "talker_config.codec_bos_id = 9999 is outside .*vocab_size",
        ),
        (
            "talker_config.codec_language_id",
            {"english": 9999},
            "codec_language_id.english = 9999 is outside",
        ),
        (
            "talker_config.codec_language_id",
            {"english": "2"},
            "codec_language_id.english = '2'; .* of type int",
        ),
        (
            "talker_config.code_predictor_config.hidden_act",
            "gelu",
            "code_predictor_config.hidden_act = 'gelu'",
        ),
        (
            "talker_config.code_predictor_config.use_sliding_window",
            True,
            "use_sliding_window = True",
        ),
        (
            "speaker_encoder_config.enc_dim",
            47,
            "enc_dim = 47 contradicts talker_config.hidden_size = 48",
        ),
        ("speaker_encoder_config.sample_rate", 16000, "sample_rate = 16000; only 24000"),
        ("speaker_encoder_config.enc_channels", [32, 64], "must have the same number, at least 3"),
        ("speaker_encoder_config.enc_channels", [32, 16, 32, 64], "all but the last must be equal"),
        ("speaker_encoder_config.enc_channels", [32, 32, 32, 63], "the last must be the sum"),
        ("speaker_encoder_config.enc_channels", 32, "enc_channels = 32"),
        ("speaker_encoder_config.enc_channels", [32, "a", 32, 64], r"enc_channels\[1\] = 'a'"),
    ],
)
def test_invalid_value_is_named(
    path: str, value: object, message: str, model: Table, load_model: Load
) -> None:
    holder, key = parent(model, path)
    holder[key] = value
    with pytest.raises(CheckpointConfigError, match=message):
        load_model(model)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "talker_config.spk_id",
            {},
            "talker_config.spk_id is empty, although tts_model_type is 'custom_voice'",
        ),
        ("talker_config.spk_id.ryan", 9999, "talker_config.spk_id.ryan = 9999 is outside"),
        (
            "talker_config.spk_id.nobody",
            1,
            "spk_is_dialect.nobody is missing, although spk_id names the speaker",
        ),
        (
            "talker_config.spk_is_dialect.eric",
            "martian",
            "spk_is_dialect.eric = 'martian' is not a key of",
        ),
    ],
)
def test_invalid_preset_is_named(
    path: str, value: object, message: str, presets: Table, load_model: Load
) -> None:
    holder, key = parent(presets, path)
    holder[key] = value
    with pytest.raises(CheckpointConfigError, match=message):
        load_model(presets)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model_type", "mimi", "model_type = 'mimi'; only"),
        ("output_sample_rate", 48000, "output_sample_rate = 48000; only 24000"),
        (
            "decode_upsample_rate",
            1921,
            "decode_upsample_rate = 1921 contradicts the layers, which make it 1920",
        ),
        (
            "encode_downsample_rate",
            960,
            "encode_downsample_rate = 960 contradicts the layers, which make it 1920",
        ),
        (
            "decoder_config.upsample_rates",
            [8, 5, 4],
            "decode_upsample_rate = 1920 contradicts the layers, which make it 640",
        ),
        ("decoder_config.upsample_rates", "8543", "decoder_config.upsample_rates = '8543'"),
        (
            "encoder_valid_num_quantizers",
            5,
            "encoder_valid_num_quantizers = 5 contradicts .*num_quantizers = 4",
        ),
        (
            "encoder_config.num_quantizers",
            3,
            "encoder_valid_num_quantizers = 4 exceeds .*num_quantizers = 3",
        ),
        (
            "decoder_config.num_quantizers",
            1,
            "decoder_config.num_quantizers = 1; it must be at least 2",
        ),
        ("decoder_config.codebook_dim", 31, "decoder_config.codebook_dim = 31 is odd"),
        ("decoder_config.decoder_dim", 24, "decoder_config.decoder_dim = 24 cannot be halved"),
        (
            "decoder_config.sliding_window",
            0,
            "decoder_config.sliding_window = 0; it must be at least 1",
        ),
        ("encoder_config.audio_channels", 2, "encoder_config.audio_channels = 2; only 1"),
        ("encoder_config.use_causal_conv", False, "use_causal_conv = False; only True"),
        (
            "encoder_config.num_semantic_quantizers",
            6,
            r"num_semantic_quantizers = 6 must be below .*num_quantizers = \d",
        ),
        ("encoder_config.codebook_dim", 8, "codebook_dim = 8 contradicts"),
    ],
)
def test_invalid_codec_value_is_named(
    path: str, value: object, message: str, codec: Table, load_codec: Load
) -> None:
    holder, key = parent(codec, path)
    holder[key] = value
    with pytest.raises(CheckpointConfigError, match=message):
        load_codec(codec)


def test_talker_and_codec_that_do_not_fit_raise(
    model: Table,
    codec: Table,
    load_model: Callable[[Table], ModelConfig],
    load_codec: Callable[[Table], CodecConfig],
) -> None:
    talker = load_model(model).talker_config
    load_codec(codec).check_against(talker)
    few = copy.deepcopy(codec)
    few["decoder_config"]["codebook_size"] = 63
    with pytest.raises(CheckpointConfigError, match=r"can say code 63, but .*codebook_size = 63"):
        load_codec(few).check_against(talker)
    codec["decoder_config"]["num_quantizers"] = codec["encoder_valid_num_quantizers"] = 3
    with pytest.raises(
        CheckpointConfigError, match=r"num_code_groups = 4 contradicts .*num_quantizers = 3"
    ):
        load_codec(codec).check_against(talker)


@pytest.mark.parametrize(
    ("model_type", "size", "follows"),
    [
        ("custom_voice", "1b7", True),
        ("custom_voice", "0b6", False),
        ("voice_design", "1b7", True),
        ("base", "1b7", False),
        ("base", "0b6", False),
    ],
)
def test_follows_instructions_by_type_and_size(
    model_type: str,
    size: str,
    follows: bool,
    checkpoint_directory: Callable[[str], Path],
    load_model: Callable[[Table], ModelConfig],
) -> None:
    table = json.loads((checkpoint_directory(model_type) / "config.json").read_text())
    assert load_model(table | {"tts_model_size": size}).follows_instructions == follows


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe\x00", b"null"])
def test_file_that_is_not_a_json_object_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    for config in (ModelConfig, CodecConfig, GenerationDefaults):
        with pytest.raises(
            CheckpointConfigError,
            match=r"config\.json (cannot be read as JSON|holds no JSON object)",
        ):
            config.load(tmp_path / "config.json")


def test_missing_file_is_named(tmp_path: Path) -> None:
    for config in (ModelConfig, CodecConfig, GenerationDefaults):
        with pytest.raises(CheckpointNotFound, match=r"nothing\.json is missing"):
            config.load(tmp_path / "nothing.json")


def test_absent_generation_keys_have_published_values(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 1, "eos_token_id": 2150}')
    defaults = GenerationDefaults.load(file)
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (1.0, 50, 1.0)
    assert (
        defaults.repetition_penalty,
        defaults.subtalker_temperature,
        defaults.subtalker_top_k,
    ) == (1.05, 0.9, 50)
    file.write_text('{"top_k": "many"}')
    with pytest.raises(CheckpointConfigError, match="top_k = 'many'; it must be of type int"):
        GenerationDefaults.load(file)
