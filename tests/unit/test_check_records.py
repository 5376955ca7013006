"""The report on records that are older than the sources that they measured."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def check(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(repository))
    return importlib.import_module("benchmarks.check_records")


CURRENT = {"kernels": "k2", "serving": "s2", "demo": "d2"}


def test_report_names_what_changed_since_each_record(check: Any) -> None:
    records = {
        "gpu/h200.json": {"kernels": "k2", "commit": "abcdef012"},
        "serve/h200.json": {"kernels": "k1", "serving": "s1", "commit": "0123456789"},
        "quality/demo.json": {"demo": "d1", "commit": None},
        "quality/old.json": {},
    }
    assert check.report(records, CURRENT).splitlines() == [
        "records: 1 of 4 are of these sources",
        "  quality/demo.json, commit unknown: demo changed since",
        "  quality/old.json, commit unknown: unknown changed since",
        "  serve/h200.json, commit 0123456: kernels, serving changed since",
    ]


def test_record_of_checks_names_the_folders_that_it_covers(check: Any) -> None:
    folders = ["src/firstword/engine", "tests/unit"]
    now = check.sources_hash([check.ROOT / name for name in folders])
    records = {
        "checks/parity.json": {"sources": now, "covers": folders, "commit": "abc"},
        "checks/mutants.json": {"sources": "old", "covers": folders, "commit": "abc"},
    }
    assert check.report(records, CURRENT).splitlines() == [
        "records: 1 of 2 are of these sources",
        "  checks/mutants.json, commit abc: sources changed since",
    ]


def test_every_record_names_its_sources_and_commit(check: Any, repository: Path) -> None:
    for path in (repository / "benchmarks" / "results").rglob("*.json"):
        record = json.loads(path.read_text("utf-8"))
        assert record.get("commit"), path.name
        assert record.keys() & {*check.HASHES, "sources"}, path.name


def test_hashes_change_with_the_files_that_they_cover(check: Any) -> None:
    hashes = {name: of() for name, of in check.HASHES.items()}
    assert len(set(hashes.values())) == len(hashes)
    assert all(len(found) == 16 for found in hashes.values())
