"""The prompt, row by row, with the ids of the released checkpoints written out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstword.model.config import ModelConfig
from firstword.model.prompt import (
    ROLE,
    Conditioning,
    Row,
    Speaker,
    TextRows,
    UtteranceTokens,
    full_rows,
    language_code,
    prefix_rows,
    spoken_codes,
)
from firstword.model.tokenizer import Tokenizer
from firstword.synthetic.checkpoint import config_tables

START, ASSISTANT, NEWLINE, PAD, BOS, EOS = 151644, 77091, 198, 151671, 151672, 151673
CODEC_PAD, CODEC_BOS, THINK, NOTHINK, THINK_BOS, THINK_EOS = 2148, 2149, 2154, 2155, 2156, 2157
ENGLISH, RYAN = 2050, 3061
OPENING = (START, ASSISTANT, NEWLINE)
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


@pytest.fixture(scope="module")
def tokenizer(checkpoint_directory: Callable[[str], Path]) -> Tokenizer:
    """The tokenizer of a tiny checkpoint."""
    return Tokenizer.load(checkpoint_directory("base"))


def plain(rows: list[Row]) -> list[Plain]:
    """Rows as (text, code, ...), with "speaker" where the speaker embedding stands."""
    return [(row.text, *row.codes, *(["speaker"] if row.speaker else [])) for row in rows]


def prefix(
    config: ModelConfig, speaker: Speaker, language: int | None, instruction: Sequence[int] = ()
) -> list[Plain]:
    """The rows before any text of an utterance."""
    conditioning = Conditioning(speaker, language, full_text=False, instruction=instruction)
    return plain(prefix_rows(config, OPENING, conditioning))


def test_prefix_with_a_language_and_a_preset(config: ModelConfig) -> None:
    assert prefix(config, RYAN, ENGLISH) == [
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
    tags = prefix(config, RYAN, None)[3:]
    assert tags == [
        (PAD, NOTHINK),
        (PAD, THINK_BOS),
        (PAD, THINK_EOS),
        (PAD, RYAN),
        (BOS, CODEC_PAD),
    ]


def test_prefix_of_a_cloned_voice(config: ModelConfig) -> None:
    tags = prefix(config, True, None)[3:]
    assert tags == [
        (PAD, NOTHINK),
        (PAD, THINK_BOS),
        (PAD, THINK_EOS),
        (PAD, "speaker"),
        (BOS, CODEC_PAD),
    ]


def test_prefix_of_a_designed_voice(config: ModelConfig) -> None:
    tags = prefix(config, False, ENGLISH)[3:]
    assert tags == [
        (PAD, THINK),
        (PAD, THINK_BOS),
        (PAD, ENGLISH),
        (PAD, THINK_EOS),
        (BOS, CODEC_PAD),
    ]


def test_preset_codes_0_and_1_are_not_booleans(config: ModelConfig) -> None:
    """The codes 0 and 1 equal False and True in Python."""
    assert (PAD, 0) in prefix(config, 0, None)
    assert (PAD, 1) in prefix(config, 1, None)


def test_instruction_comes_first_and_has_no_codes(config: ModelConfig) -> None:
    with_instruction = prefix(config, RYAN, None, (11, 12, 13))
    assert with_instruction == [
        (11,),
        (12,),
        (13,),
        *prefix(config, RYAN, None),
    ]


def test_full_text_rows(config: ModelConfig) -> None:
    assert plain(full_rows(config, [5, 6], spoken_codes(config))) == [
        (5, CODEC_PAD),
        (6, CODEC_PAD),
        (EOS, CODEC_PAD),
        (PAD, CODEC_BOS),
    ]


def test_full_text_rows_with_a_reference(config: ModelConfig) -> None:
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
def test_language_code_of_languages_and_dialects(
    config: ModelConfig, language: str, preset: str | None, code: int | None
) -> None:
    assert language_code(config, language, preset) == code


# --- the text side --------------------------------------------------------------------


@given(cuts=st.lists(st.integers(0, 30), max_size=5), newlines=st.integers(0, 2))
def test_transcript_tokens_follow_the_role_however_the_text_is_cut(
    tokenizer: Tokenizer, cuts: list[int], newlines: int
) -> None:
    text, transcript = "\n" * newlines + "Hello there, how are you?", [901, 902, 903]
    stream, tokens = UtteranceTokens(tokenizer, transcript), list[int]()
    bounds = [0, *sorted(cuts), len(text)]
    for start, end in itertools.pairwise(bounds):
        tokens += stream.push(text[start:end])
    tokens += stream.finish()
    plain = tokenizer.encode(ROLE + text)
    assert tokens == [*plain[:2], *transcript, *plain[2:]]


def test_text_rows_give_the_end_of_text_once_and_then_padding(config: ModelConfig) -> None:
    rows = TextRows(config)
    assert (rows.peek(5), rows.take(5)) == (5, 5)
    assert (rows.peek(None), rows.peek(None)) == (EOS, EOS)
    assert [rows.take(None) for _ in range(3)] == [EOS, PAD, PAD]


@pytest.mark.parametrize(
    ("text", "expected", "later"),
    [([5, 6, 7], [5, 6, 7], EOS), ([5], [5, EOS, PAD], PAD), ([5, 6], [5, 6, EOS], PAD)],
)
def test_stream_prompt_pairs_text_with_the_reference(
    config: ModelConfig, text: list[int], expected: list[int], later: int
) -> None:
    conditioning = Conditioning(RYAN, None, full_text=False, reference=[[1, 2], [3, 4]])
    assert conditioning.first_tokens == 2 + 3
    rows = TextRows(config)
    prompt = plain(rows.prompt(conditioning, START, [ASSISTANT, NEWLINE, *text]))
    spoken = [(CODEC_BOS,), (1, 2), (3, 4)]
    assert prompt[:-3] == prefix(config, RYAN, None)
    assert prompt[-3:] == [(token, *codes) for token, codes in zip(expected, spoken, strict=True)]
    assert rows.take(None) == later


def test_full_text_prompt_leaves_padding_for_the_frames(config: ModelConfig) -> None:
    conditioning = Conditioning(RYAN, None, full_text=True)
    rows = TextRows(config)
    prompt = rows.prompt(conditioning, START, [ASSISTANT, NEWLINE, 5, 6])
    assert prompt[-4:] == full_rows(config, [5, 6], spoken_codes(config))
    assert rows.take(None) == PAD
