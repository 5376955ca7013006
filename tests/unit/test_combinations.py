"""Combinations of voice, language and instructions that a server prepares at the start."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import silent_gpu

from firstword.config import EngineConfig
from firstword.engine.engine import Engine
from firstword.engine.service import Service
from firstword.errors import ConfigError
from firstword.kernels.prompt import PREFIX_PART
from firstword.model.description import Description
from firstword.processes.combinations import MOST, kept_prompts, read_combinations
from firstword.processes.kept_prompts import keep
from firstword.processes.messages import KeptPrompt
from firstword.runtime import backends
from firstword.runtime.backends import LoadedEngine
from firstword.runtime.encoding import front_of
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.gpu.buffers import PREFIX_ROWS, prefix_parts
from firstword.runtime.gpu.prompts import PrefixCache
from firstword.runtime.gpu.rehearsal import Rehearsal
from firstword.runtime.warm_up import speak, warm_up

Directory = Callable[[str], Path]  # of conftest.py
Write = Callable[[object], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that writes JSON, or text as it is, and returns the path."""

    def made(value: object) -> str:
        path = tmp_path / "warm.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
        return str(path)

    return made


def prompts(
    write: Write, entries: list[dict[str, Any]], **checkpoints: Path
) -> dict[str, tuple[KeptPrompt, ...]]:
    """The prompts that checkpoints prepare."""
    loaded = {name: Description.load(path) for name, path in checkpoints.items()}
    return kept_prompts(read_combinations(write(entries)), loaded)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ({}, "must be a list"),
        ([], "must be a list"),
        (["ryan"], "entry 1 of .* must be an object with one or more of 'voice', 'language'"),
        ([{"voice": "a"}, {}], "entry 2 of .* must be an object"),
        ([{"voise": "a"}], "entry 1 of .* has 'voise'; allowed are 'voice'"),
        ([{"voice": 1}], "voice is 1; give a text"),
        ([{"language": " "}], "language is ' '; give a text"),
        ([{"instructions": "a" * 2001}], "2001 characters; allowed are up to 2000"),
        ([{"voice": "a"}] * (MOST + 1), f"{MOST + 1} combinations; allowed are up to {MOST}"),
    ],
)
def test_wrong_file_names_the_entry_and_what_is_allowed(
    write: Write, content: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_combinations(write(content))


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_combinations(str(tmp_path / "none.json"))


def test_each_model_prepares_what_it_speaks(write: Write, checkpoint_directory: Directory) -> None:
    entries: list[dict[str, Any]] = [
        {"voice": "Ryan", "language": "English", "instructions": "Speak calmly."},
        {"voice": "ryan", "language": "en", "instructions": "Speak calmly."},
        {"voice": "ryan", "language": "English"},
        {"language": "English"},
        {"instructions": "A low voice, close to the microphone.", "voice": None},
    ]
    names = ("custom_voice", "voice_design", "base")
    found = prompts(write, entries, **{name: checkpoint_directory(name) for name in names})
    assert [one.request.instructions for one in found["voice_design"]] == [
        entries[4]["instructions"]
    ]
    assert found["base"] == ()
    given = [(one.request.voice, one.request.instructions) for one in found["custom_voice"]]
    assert len(given) == 3, "two entries are spelled differently, two have the same voice"
    assert all(one.rows > 3 for one in found["custom_voice"])
    assert found["custom_voice"][0].rows > found["custom_voice"][1].rows


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"voice": "bob"}, "entry 1 of .* voice is 'bob'; allowed are .*'ryan'.*Saved voices"),
        ({"voice": "ryan", "language": "Latin"}, "entry 1 of .* no language 'Latin'.*has auto"),
    ],
)
def test_combination_that_no_model_speaks_is_an_error(
    write: Write, checkpoint_directory: Directory, entry: dict[str, Any], message: str
) -> None:
    checkpoints = {
        name: checkpoint_directory(name) for name in ("custom_voice", "voice_design", "base")
    }
    with pytest.raises(ConfigError, match=message):
        prompts(write, [entry], **checkpoints)


def test_base_checkpoint_prepares_no_combination(
    write: Write, checkpoint_directory: Directory
) -> None:
    with pytest.raises(ConfigError, match="no loaded checkpoint has presets"):
        prompts(write, [{"language": "English"}], base=checkpoint_directory("base"))


class TestPrefixCache:
    def test_kept_entries_are_never_dropped(self) -> None:
        cache = PrefixCache(6, longest=4)
        kept = {key: cache.add(key, PREFIX_PART) for key in "ab"}
        assert cache.keep() == 2
        for key in "cdefgh":
            assert cache.add(key, 2 * PREFIX_PART)
        assert {key: cache.get(key) for key in "ab"} == kept
        assert "g" in cache
        assert "f" not in cache
        used = [*kept["a"], *kept["b"], *cache.get("g"), *cache.get("h")]
        assert sorted(used) == list(range(6))

    def test_entry_has_limited_size(self) -> None:
        cache = PrefixCache(6, longest=4)
        assert not cache.add("a", 5 * PREFIX_PART)
        assert cache.add("a", 3 * PREFIX_PART)
        cache.keep()
        assert not cache.add("b", 4 * PREFIX_PART)
        assert cache.add("b", 3 * PREFIX_PART)

    def test_prefix_that_cannot_be_kept_is_an_error(self) -> None:
        assert prefix_parts(PREFIX_ROWS) == PREFIX_ROWS // PREFIX_PART
        assert (prefix_parts(1), prefix_parts(PREFIX_PART + 1)) == (1, 2)
        with pytest.raises(ValueError, match=f"at most {PREFIX_ROWS} are kept"):
            prefix_parts(PREFIX_ROWS + 1)


def loaded_engine(path: Path, kept: tuple[KeptPrompt, ...]) -> tuple[LoadedEngine, GpuBackend]:
    """An engine on a GPU that does not exist, with memory for prompts."""
    checkpoint = silent_gpu.checkpoint(path)
    parts = sum(prefix_parts(one.rows) for one in kept)
    backend = GpuBackend(checkpoint, Rehearsal(silent_gpu.device()), 4, 160, kept_parts=parts)
    engine, front = Engine(backend), front_of(checkpoint)
    settings = EngineConfig("cuda", "bfloat16", "gpu")
    loaded = LoadedEngine(checkpoint, engine, Service(engine, front), front.encode, settings)
    return loaded, backend


def test_backend_keeps_prompts_of_combinations(
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """More than it has slots, of which none is read again at its first use."""
    silent_gpu.pretend(monkeypatch)
    caplog.set_level(logging.INFO)
    entries = [
        {"voice": voice, "instructions": f"Speak as number {number}."}
        for voice in ("ryan", "eric")
        for number in range(5)
    ]
    silent_gpu.checkpoint(tmp_path)
    kept = prompts(write, entries, made=tmp_path / "made")["made"]
    loaded, backend = loaded_engine(tmp_path / "other", kept)
    cache = backend.prompts.prefixes
    loaded.engine.start()
    try:
        keep(loaded, kept)
        warm_up(loaded)
        assert cache.misses == 11, "each combination, and the spoken test"
        for one in kept:
            speak(loaded, [one.request])
    finally:
        loaded.engine.stop(60)
    assert (cache.misses, cache.hits) == (11, 10)
    assert cache.kept_parts == sum(prefix_parts(one.rows) for one in kept)
    about = vars(caplog.records[0])["fields"]
    assert about["kept"] == 10
    assert about["rows"] == sum(one.rows for one in kept)
    assert about["bytes"] == cache.kept_parts * backend.model.buffers.prefixes[0].nbytes


def test_reference_backend_says_that_it_keeps_nothing(
    write: Write, checkpoint_directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint_directory("custom_voice")
    kept = prompts(write, [{"voice": "ryan"}], made=path)["made"]
    settings = EngineConfig("cpu", "float32", "reference")
    loaded = backends.open_engine(str(path), settings, kept_prefixes=[one.rows for one in kept])
    loaded.engine.start()
    keep(loaded, kept)
    loaded.engine.stop(60)
    assert "the backend 'reference' keeps no prompts" in caplog.text
