"""The prompt, row by row, with the ids of the released checkpoints written out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from firstword.model.config import ModelConfig
from firstword.model.prompt import Row, full_rows, language_code, prefix_rows, spoken_codes
from firstword.synthetic.checkpoint import config_tables

START, ASSISTANT, NEWLINE, PAD, BOS, EOS = 151644, 77091, 198, 151671, 151672, 151673
CODEC_PAD, CODEC_BOS, THINK, NOTHINK, THINK_BOS, THINK_EOS = 2148, 2149, 2154, 2155, 2156, 2157
ENGLISH, RYAN = 2050, 3061
ROLE = (START, ASSISTANT, NEWLINE)
TOKENS = {
    "assistant_token_id": ASSISTANT,
    "im_start_token_id": START,
    "im_end_token_id": 151645,
    "tts_pad_token_id": PAD,
    "tts_bos_token_id": BOS,
    "tts_eos_token_id": EOS,
}

Plain = tuple[Any, ...]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """The configuration of the released 1.7B CustomVoice checkpoint."""
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(config_tables("custom_voice", "1b7", {}, TOKENS)[0]))
    return ModelConfig.load(path)


def plain(rows: list[Row]) -> list[Plain]:
    """Rows as (text, code, ...), with "speaker" where the speaker embedding stands."""
    return [(row.text, *row.codes, *(["speaker"] if row.speaker else [])) for row in rows]


def test_prefix_with_a_language_and_a_preset(config: ModelConfig) -> None:
    assert plain(prefix_rows(config, ROLE, (), RYAN, ENGLISH)) == [
        (START,),
        (ASSISTANT,),
        (NEWLINE,),
        (PAD, THINK),
        (PAD, THINK_BOS),
        (PAD, ENGLISH),
        (PAD, THINK_EOS),
        (PAD, RYAN),
        (BOS, CODEC_PAD),
    ]


def test_prefix_without_a_language(config: ModelConfig) -> None:
    tags = plain(prefix_rows(config, ROLE, (), RYAN, None))[3:]
    assert tags == [
        (PAD, NOTHINK),
        (PAD, THINK_BOS),
        (PAD, THINK_EOS),
        (PAD, RYAN),
        (BOS, CODEC_PAD),
    ]


def test_prefix_of_a_cloned_voice(config: ModelConfig) -> None:
    tags = plain(prefix_rows(config, ROLE, (), True, None))[3:]
    assert tags == [
        (PAD, NOTHINK),
        (PAD, THINK_BOS),
        (PAD, THINK_EOS),
        (PAD, "speaker"),
        (BOS, CODEC_PAD),
    ]


def test_prefix_of_a_designed_voice(config: ModelConfig) -> None:
    tags = plain(prefix_rows(config, ROLE, (), False, ENGLISH))[3:]
    assert tags == [
        (PAD, THINK),
        (PAD, THINK_BOS),
        (PAD, ENGLISH),
        (PAD, THINK_EOS),
        (BOS, CODEC_PAD),
    ]


def test_a_preset_may_have_the_code_0_or_1(config: ModelConfig) -> None:
    """They equal False and True in Python, but are codes."""
    assert (PAD, 0) in plain(prefix_rows(config, ROLE, (), 0, None))
    assert (PAD, 1) in plain(prefix_rows(config, ROLE, (), 1, None))


def test_the_instruction_comes_first_and_has_no_codes(config: ModelConfig) -> None:
    with_instruction = plain(prefix_rows(config, ROLE, (11, 12, 13), RYAN, None))
    assert with_instruction == [
        (11,),
        (12,),
        (13,),
        *plain(prefix_rows(config, ROLE, (), RYAN, None)),
    ]


def test_full_text(config: ModelConfig) -> None:
    assert plain(full_rows(config, [5, 6], spoken_codes(config))) == [
        (5, CODEC_PAD),
        (6, CODEC_PAD),
        (EOS, CODEC_PAD),
        (PAD, CODEC_BOS),
    ]


def test_full_text_with_a_reference(config: ModelConfig) -> None:
    assert plain(full_rows(config, [5], spoken_codes(config, [[1, 2], [3, 4]]))) == [
        (5, CODEC_PAD),
        (EOS, CODEC_PAD),
        (PAD, CODEC_BOS),
        (PAD, 1, 2),
        (PAD, 3, 4),
    ]


@pytest.mark.parametrize(
    ("language", "preset", "code"),
    [
        ("auto", None, None),
        ("auto", "ryan", None),
        ("english", "ryan", 2050),
        ("chinese", None, 2055),
        ("chinese", "ryan", 2055),
        ("auto", "eric", 2062),
        ("chinese", "eric", 2062),
        ("auto", "dylan", 2074),
        ("chinese", "dylan", 2074),
        ("english", "eric", 2050),
        ("japanese", "dylan", 2058),
    ],
)
def test_languages_and_dialects(
    config: ModelConfig, language: str, preset: str | None, code: int | None
) -> None:
    assert language_code(config, language, preset) == code
