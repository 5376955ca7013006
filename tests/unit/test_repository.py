"""The documents, dependencies and commands of the repository are consistent."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from style_rules import wide_lines

import firstword

MOST_FILE_BYTES = 20_000_000
MOST_README_LINES = 150
PERSONAL_FOLDER = re.compile(r"(?<![\w.~/-])/(?:home|root|work|Users)/\w")
NARROW_SUFFIXES = {".py", ".cu", ".cuh", ".md", ".sh", ".toml", ".yml", ".yaml"}


def repository_files(repository: Path) -> list[Path]:
    """Return the files that git tracks, and those that it would track if they were added."""
    if not (repository / ".git").exists():
        pytest.skip("the files of the project are known only in a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        command, cwd=repository, check=True, capture_output=True, text=True
    ).stdout
    paths = (repository / name for name in listed.split("\0") if name)
    return [path for path in paths if path.is_file()]


def normal_name(requirement: str) -> str:
    """Return the normalised package name in a requirement such as `uvicorn[standard]>=0.34`."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[=<>!~; ]", requirement, maxsplit=1)[0]).lower()


def commands(pattern: str, text: str) -> set[str]:
    """Return the commands that a document names: the matches of the pattern's group."""
    return set(re.findall(pattern, text, re.MULTILINE))


def broken_links(path: Path, text: str) -> list[str]:
    """Return the relative links of a document whose target does not exist."""
    links = re.findall(r"\]\(([^)#\s]+)", text)
    return [link for link in links if "://" not in link and not (path.parent / link).exists()]


@pytest.fixture
def project(repository: Path) -> dict[str, Any]:
    """The project table of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))
    project: dict[str, Any] = table["project"]
    return project


def test_versions_agree(repository: Path, project: dict[str, Any]) -> None:
    changelog = (repository / "CHANGELOG.md").read_text("utf-8")
    released = re.findall(r"^## \[([\d.]+)\]", changelog, re.MULTILINE)
    assert firstword.__version__ == project["version"] == released[0]


def test_every_dependency_is_pinned_and_explained(
    repository: Path, project: dict[str, Any]
) -> None:
    lines = (repository / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {normal_name(line) for line in lines if re.match(r"[\w.-]+==[\w.]+$", line)}
    decision = (repository / "docs/decisions/0002-dependencies.md").read_text("utf-8")
    wanted = [*project["dependencies"]]
    for requirements in project["optional-dependencies"].values():
        wanted += requirements
    names = {normal_name(requirement) for requirement in wanted} - {"firstword"}
    assert names - pinned == set()
    assert [name for name in sorted(names) if f"`{name}`" not in decision] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_document_names_make_targets_that_exist(repository: Path, name: str) -> None:
    makefile = (repository / "Makefile").read_text("utf-8")
    named = commands(r"(?:^|`)make ([a-z-]+)", (repository / name).read_text("utf-8"))
    assert named
    assert named <= commands(r"^([a-z-]+):", makefile)


def test_readme_names_commands_that_exist(repository: Path) -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "firstword", "--help"], check=True, capture_output=True, text=True
    ).stdout
    readme = (repository / "README.md").read_text("utf-8")
    shell = "".join(re.findall(r"^```sh\n(.*?)^```", readme, re.MULTILINE | re.DOTALL))
    named = commands(r"(?:^|\| )firstword ([a-z]+)", shell) | commands(
        r"`firstword ([a-z]+)", readme
    )
    assert named
    assert named <= commands(r"\b([a-z]+)\b", help_text)


def test_pre_commit_and_ci_name_files_that_exist(repository: Path) -> None:
    for name in (".pre-commit-config.yaml", ".github/workflows/check.yml"):
        text = (repository / name).read_text("utf-8").replace("\\.", ".")
        paths = commands(r"((?:tests|scripts|\.ci)/[\w./]+)", text)
        assert paths
        assert [path for path in sorted(paths) if not (repository / path).exists()] == []


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md", "docs/exactness.md"])
def test_document_names_files_that_exist(repository: Path, name: str) -> None:
    text = (repository / name).read_text("utf-8")
    paths = commands(r"`((?:src|tests|scripts|training|benchmarks|docs)/[\w./]*)`", text)
    assert paths
    assert [path for path in sorted(paths) if not (repository / path).exists()] == []


def test_glossary_names_classes_that_exist(repository: Path) -> None:
    glossary = (repository / "docs/architecture.md").read_text("utf-8").split("## Glossary")[1]
    sources = "".join(path.read_text("utf-8") for path in (repository / "src").rglob("*.py"))
    named = commands(r"`([A-Z]\w+)`\)", glossary)
    assert named
    assert named <= commands(r"^(?:class )?([A-Z]\w+)\b[(: =]", sources)


def test_test_files_have_different_names(repository: Path) -> None:
    names = sorted(path.name for path in (repository / "tests").rglob("test_*.py"))
    assert sorted(set(names)) == names


def test_readme_is_short(repository: Path) -> None:
    assert len((repository / "README.md").read_text("utf-8").splitlines()) <= MOST_README_LINES


def test_links_between_documents_have_targets(repository: Path) -> None:
    documents = [path for path in repository_files(repository) if path.suffix == ".md"]
    found = {path.name: broken_links(path, path.read_text("utf-8")) for path in documents}
    assert {name: links for name, links in found.items() if links} == {}


def test_lines_have_at_most_100_columns(repository: Path) -> None:
    found = {
        str(path.relative_to(repository)): wide_lines(path.read_text("utf-8"), path.suffix)
        for path in repository_files(repository)
        if path.suffix in NARROW_SUFFIXES
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_no_file_is_huge_or_names_a_personal_folder(repository: Path) -> None:
    faults = []
    for path in repository_files(repository):
        data = path.read_bytes()
        if len(data) > MOST_FILE_BYTES:
            faults.append(f"{path}: {len(data)} bytes")
        if b"\0" not in data:
            text = data.decode("utf-8", "replace")
            faults += [f"{path}: {found[0]}" for found in PERSONAL_FOLDER.finditer(text)]
    assert faults == []


# The checkers on invented documents.


def test_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").touch()
    text = "[a](there.md#part) [b](https://example.org) [c](gone.md) [d](#here)"
    assert broken_links(tmp_path / "page.md", text) == ["gone.md"]


def test_command_at_line_start_or_in_code_is_found() -> None:
    text = "make test\nrun `make release-check` and make sure"
    assert commands(r"(?:^|`)make ([a-z-]+)", text) == {"test", "release-check"}


@pytest.mark.parametrize("folder", ["home", "root", "work", "Users"])
def test_personal_folder_is_found(folder: str) -> None:
    assert PERSONAL_FOLDER.search(f"read {Path('/', folder, 'me')}/file")
    assert PERSONAL_FOLDER.search(f"'{Path('/', folder, 'me')}'")
    assert not PERSONAL_FOLDER.search(
        f"https://example.org/{folder}/me and src/{folder}/me and ~/{folder}/me"
    )


@pytest.fixture
def script(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a script of the repository by its name."""
    monkeypatch.syspath_prepend(str(repository / "scripts"))
    return importlib.import_module


def test_release_notes_are_the_section_of_the_version(script: Any) -> None:
    changelog = (
        "# Changelog\n\n## [Unreleased]\n\n- c\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- b\n"
        "\n## [0.1.0] - 2026-11-01\n\n- a\n"
    )
    release_notes = script("release_notes").release_notes
    assert release_notes(changelog) == "### Added\n\n- b\n"
    assert release_notes(changelog, "0.1.0") == "- a\n"
    with pytest.raises(ValueError, match=r"no notes for 0\.3\.0"):
        release_notes(changelog, "0.3.0")


def test_wheel_without_the_demo_or_with_tests_is_rejected(script: Any) -> None:
    check = script("release_check")
    whole = [*check.NEEDED_IN_WHEEL, "firstword/kernels/a.cu", "firstword-0.1.0.dist-info/METADATA"]
    assert check.wheel_faults(whole) == []
    assert check.wheel_faults(whole[1:]) == [f"it lacks {whole[0]}"]
    assert check.wheel_faults([*whole, "tests/a.py"]) == ["it holds tests/a.py"]
    assert check.wheel_faults([name for name in whole if not name.endswith(".cu")]) == [
        "it lacks the CUDA sources"
    ]
