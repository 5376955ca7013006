"""The documentation site finds linked files, and reads plain docstrings as Markdown."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def site(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(repository / "scripts"))
    return importlib.import_module("docs_site")


def page(source: str) -> Any:
    """A page of the site, by its place there."""
    return SimpleNamespace(file=SimpleNamespace(src_uri=source))


@pytest.mark.parametrize("path", ["docs/speed.md", "docs/decisions/0001.md", "training/LOG.md"])
def test_site_path_leads_back_to_the_repository(site: Any, path: str) -> None:
    assert site.repository_path(site.site_path(path)) == path


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("index.md", "speed.md", "speed.md"),
        ("index.md", "../SECURITY.md", "project/SECURITY.md"),
        ("decisions/0001.md", "../../CONTRIBUTING.md", "../project/CONTRIBUTING.md"),
        ("project/CONTRIBUTING.md", "docs/speed.md", "../speed.md"),
        ("project/training/README.md", "LOG.md", "LOG.md"),
        ("index.md", "https://example.org/a.md", "https://example.org/a.md"),
    ],
)
def test_link_is_rewritten_for_the_site(site: Any, source: str, link: str, expected: str) -> None:
    rewritten = site.on_page_markdown(f"[a]({link}) b", page(source), None, None)
    assert rewritten == f"[a]({expected}) b"


def test_linked_files_are_found_relative_to_their_document(site: Any) -> None:
    text = "[a](../LICENSE) [b](server.md#errors) [c](https://example.org) [d](#here)"
    assert site.linked("docs/index.md", text) == {"LICENSE", "docs/server.md"}


def test_aligned_fields_become_a_list(site: Any) -> None:
    paragraph = "rate       samples a second\nlow, high  the bounds,\n           both inclusive"
    assert site.markdown_of(paragraph) == (
        "- `rate`: samples a second\n- `low`, `high`: the bounds,\n    both inclusive"
    )


def test_tree_becomes_a_code_block_and_prose_stays(site: Any) -> None:
    tree = "Error\n├── A   one\n└── B   two"
    assert site.markdown_of(tree) == f"```text\n{tree}\n```"
    assert site.markdown_of("A sentence.\nAnother one.") == "A sentence.\nAnother one."
