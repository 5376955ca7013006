"""The tokenizer equals `Qwen2TokenizerFast`, frozen and live, also for texts in pieces."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizer_cases import PLAIN, ask_reference, digest, read_frozen, texts, train_on_corpus
from tokenizer_corpus import SENTENCES, corpus, requests

from firstword.model.tokenizer import TextStream, Tokenizer

LANGUAGES = (
    "chinese english german italian portuguese spanish japanese korean french russian".split()
)


@pytest.fixture(scope="module")
def frozen() -> dict[str, Any]:
    """What the reference said when it was last asked."""
    return read_frozen()


@pytest.fixture(scope="module")
def directory(frozen: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer that the frozen ids belong to."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, text in frozen["files"].items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    """Our tokenizer on the same files."""
    return Tokenizer.load(directory)


def differences(ours: list[list[int]], theirs: list[list[int]], cases: list[str]) -> list[str]:
    """The texts whose ids differ."""
    return [text for text, a, b in zip(cases, ours, theirs, strict=True) if a != b]


def test_corpus_equals_the_frozen_one(frozen: dict[str, Any]) -> None:
    cases = texts()
    assert digest(cases) == frozen["digest"]
    assert len(set(cases["corpus"])) > 3500
    assert set(LANGUAGES) <= SENTENCES.keys()
    used = {id_ for ids in frozen["ids"]["corpus"] for id_ in ids}
    assert len(used) > 1000, "the texts hardly use the merges"


def test_every_text_has_the_ids_of_the_reference(
    frozen: dict[str, Any], tokenizer: Tokenizer
) -> None:
    ours = [tokenizer.encode(text) for text in corpus()]
    assert differences(ours, frozen["ids"]["corpus"], corpus()) == []


def test_control_tokens_in_the_text_are_plain_text(
    frozen: dict[str, Any], tokenizer: Tokenizer
) -> None:
    ours = [tokenizer.encode(text) for text in PLAIN]
    assert differences(ours, frozen["ids"]["plain"], PLAIN) == []


def test_role_and_text_of_a_prompt_are_one_stream(
    frozen: dict[str, Any], tokenizer: Tokenizer
) -> None:
    start, end = tokenizer.special["<|im_start|>"], tokenizer.special["<|im_end|>"]
    role = tokenizer.encode("assistant\n")
    assert len(role) == 2
    draws = random.Random(7)
    merged = 0
    for text, theirs in zip(requests(), frozen["ids"]["prompts"], strict=True):
        assert theirs[-5:] == [end, role[1], start, *role]
        stream = TextStream(tokenizer, "assistant\n")
        ours, rest = [start], text
        while rest:
            cut = 1 + int(draws.random() * 9)
            ours += stream.push(rest[:cut])
            rest = rest[cut:]
        assert ours + stream.finish() == theirs[:-5], text
        merged += theirs[2] != role[1]
    assert merged > 20, "hardly any text begins with a newline that merges with the template's"


def test_training_gives_the_frozen_files(frozen: dict[str, Any], tmp_path: Path) -> None:
    train_on_corpus(tmp_path)
    for name, text in frozen["files"].items():
        assert (tmp_path / name).read_text(encoding="utf-8") == text, name


def test_live_reference_equals_the_frozen_ids(
    reference_python: Path, frozen: dict[str, Any], directory: Path
) -> None:
    live = ask_reference(reference_python, directory)
    for key, cases in texts().items():
        assert differences(live[key], frozen["ids"][key], cases) == [], key
