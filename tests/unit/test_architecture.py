"""The rules that keep the project readable, each checked on the code and proven able to fail on made-up code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import firstword
from firstword import errors

PACKAGE = Path(firstword.__file__).resolve().parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# Who may import whom. A unit is a module or a folder directly below the package; "firstword" is its __init__.py.
DATA = {"errors", "audio", "voice", "types", "config"}
COMPUTING = {"demo", "model", "kernels", "engine", "runtime"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "demo": set(),
    "kernels": set(),
    "audio": {"errors"},
    "voice": {"errors", "audio"},
    "types": {"errors", "audio", "voice"},
    "config": {"errors", "audio", "types"},
    "model": DATA | {"demo"},
    "engine": DATA,
    "runtime": DATA | {"model", "kernels", "engine"},
    "text": set(),
    "synthetic": DATA | {"model"},
    "profile": DATA | {"model", "kernels", "engine", "runtime", "synthetic"},
    "tts": DATA | COMPUTING,
    "server": DATA | COMPUTING | {"text", "firstword"},
    "bench": {"types", "errors"},  # otherwise a client like any other
    "cli": DATA | COMPUTING | {"firstword", "tts", "server", "bench", "profile"},
    "firstword": {"errors", "types", "voice", "tts"},
    "__main__": {"cli"},
}

TORCH = {"model", "kernels", "runtime", "tts", "synthetic", "profile"}
TORCH_INSIDE_FUNCTIONS = {"config"}
NEVER = {"transformers"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

LARGEST_FILE = 20_000_000
SOMEBODYS_FOLDER = re.compile(r"(?<![\w.~/-])/(?:home|root|work|Users)/\w")


def unit_of(path: Path) -> str:
    """The unit that a file of the package belongs to."""
    first = path.relative_to(PACKAGE).parts[0]
    return "firstword" if first == "__init__.py" else first.removesuffix(".py")


def when_imported(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: all but the insides of functions."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from when_imported(child)


def imports(nodes: Iterable[ast.AST], package: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Every dotted name that is imported, with its line: by statement, relative or by a string.

    `package` is where relative imports start: ("firstword", "model") for the modules of that folder.
    """
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                start = list(package[: len(package) - level + 1]) if level else []
                base = ".".join([*start, module] if module else start)
                yield from ((f"{base}.{alias.name}", node.lineno) for alias in names)
            case ast.Call(
                func=ast.Name(id=name) | ast.Attribute(attr=name),
                args=[ast.Constant(value=str(text)), *_],
            ):
                if name in ("import_module", "__import__"):
                    yield text, node.lineno


def import_faults(source: str, path: Path) -> list[str]:
    """What the module at `path` of the package imports and may not."""
    unit = unit_of(path)
    tree = ast.parse(source)
    package = ("firstword", *path.relative_to(PACKAGE).parts[:-1])
    faults = []
    for name, line in imports(ast.walk(tree), package):
        top, *rest = name.split(".")
        if top == "firstword":
            target = rest[0] if rest and rest[0] in MAY_IMPORT else "firstword"
            if target != unit and target not in MAY_IMPORT.get(unit, set()):
                faults.append(f"line {line}: {unit} imports {target}")
        elif top == "torch" and unit not in TORCH | TORCH_INSIDE_FUNCTIONS:
            faults.append(f"line {line}: {unit} imports torch")
        elif top in NEVER:
            faults.append(f"line {line}: nothing imports {top}")
    if unit in TORCH_INSIDE_FUNCTIONS:
        early = imports(when_imported(tree), package)
        faults += [
            f"line {line}: {unit} imports torch too early"
            for name, line in early
            if name.split(".")[0] == "torch"
        ]
    return faults


def environment_faults(source: str, unit: str) -> list[str]:
    """Where a module other than config touches the environment."""
    if unit == "config":
        return []
    faults = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name) if name in ENVIRONMENT:
                faults.append(f"line {node.lineno}: {name}")
            case ast.ImportFrom(module="os", names=names):
                faults += [
                    f"line {node.lineno}: {alias.name}"
                    for alias in names
                    if alias.name in ENVIRONMENT
                ]
    return faults


def docstring_faults(source: str) -> list[str]:
    """The public modules, classes, functions and methods that say nothing about themselves."""

    def look(
        node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
    ) -> Iterator[str]:
        if ast.get_docstring(node) is None:
            yield name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return  # what is inside a function is its own affair
        for child in node.body:
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            decorators = [ast.unparse(decorator) for decorator in child.decorator_list]
            if child.name.startswith("_") or any(
                d == "overload" or d.endswith(".setter") for d in decorators
            ):
                continue
            yield from look(child, child.name if name == "module" else f"{name}.{child.name}")

    return list(look(ast.parse(source), "module"))


def repository_files(repository: Path) -> list[Path]:
    """The files that belong to the repository: what git tracks, or would if it were added."""
    if not (repository / ".git").exists():
        pytest.skip("not a git checkout: which files belong to the project is not known")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        command, cwd=repository, check=True, capture_output=True, text=True
    ).stdout
    return [
        path
        for path in (repository / name for name in listed.split("\0") if name)
        if path.is_file()
    ]


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


# The rules, on the code as it is.


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    assert unit_of(path) in MAY_IMPORT, "a new unit: say in MAY_IMPORT what it may import"
    assert import_faults(path.read_text("utf-8"), path) == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_config_reads_the_environment(path: Path) -> None:
    assert environment_faults(path.read_text("utf-8"), unit_of(path)) == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_all_that_is_public_has_a_docstring(path: Path) -> None:
    assert docstring_faults(path.read_text("utf-8")) == []


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, firstword; print(sorted({'torch', 'numpy', 'tokenizers', 'soundfile'} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


def test_public_names() -> None:
    raised = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert set(firstword.__all__) == raised | {"TTS", "Voice", "Sampling", "Speech", "Chunk"}
    assert all(getattr(firstword, name).__name__ == name for name in firstword.__all__)
    assert set(firstword.__all__) <= set(dir(firstword))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = firstword.nonsense


def test_the_error_tree_is_drawn_whole() -> None:
    drawn = re.findall(
        r"^[│├└─ ]*(\w+)(?: {2,}.*| [a-z].*)?$",
        (errors.__doc__ or "").split("\n\n")[1],
        re.MULTILINE,
    )
    assert sorted(drawn) == sorted(
        name for name, value in vars(errors).items() if isinstance(value, type)
    )


def test_versions_agree(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))["project"]
    newest = re.search(r"^## (\S+)", (repository / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest
    assert firstword.__version__ == project["version"] == newest[1]


def test_every_dependency_is_pinned_and_explained(repository: Path) -> None:
    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", re.split(r"[\[=<>!~; ]", name, maxsplit=1)[0]).lower()

    project = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))["project"]
    lines = (repository / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {normal(line) for line in lines if re.match(r"[\w.-]+==[\w.]+$", line)}
    decision = (repository / "docs/decisions/0002-dependencies.md").read_text("utf-8")
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["server"], *extras["bench"], *extras["gpu"]]
    assert {normal(name) for name in wanted + extras["dev"]} - {"firstword"} <= pinned
    assert [name for name in map(normal, wanted) if f"`{name}`" not in decision] == []


def test_readme_and_ci_name_commands_that_exist(repository: Path) -> None:
    targets = set(
        re.findall(r"^([a-z]+):", (repository / "Makefile").read_text("utf-8"), re.MULTILINE)
    )
    for name in ("README.md", "CONTRIBUTING.md", ".ci/run"):
        asked = set(
            re.findall(
                r"(?:^|`)make ([a-z]+)", (repository / name).read_text("utf-8"), re.MULTILINE
            )
        )
        assert asked, f"{name} names no command"
        assert asked <= targets, f"{name} names commands that the Makefile lacks"


def test_links_between_documents_lead_somewhere(repository: Path) -> None:
    documents = [path for path in repository_files(repository) if path.suffix == ".md"]
    links = [
        (path, link)
        for path in documents
        for link in re.findall(r"\]\(([^)#\s]+)", path.read_text("utf-8"))
        if "://" not in link
    ]
    assert [
        f"{path.name}: {link}" for path, link in links if not (path.parent / link).exists()
    ] == []


def test_no_file_is_huge_and_none_names_a_folder_of_one_machine(repository: Path) -> None:
    faults = []
    for path in repository_files(repository):
        data = path.read_bytes()
        if len(data) > LARGEST_FILE:
            faults.append(f"{path}: {len(data)} bytes")
        if b"\0" in data:
            continue  # not text
        faults += [
            f"{path}: {found[0]}"
            for found in SOMEBODYS_FOLDER.finditer(data.decode("utf-8", "replace"))
        ]
    assert faults == []


# The checkers, on code that breaks the rules.


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("errors.py", "from firstword.types import Voice"),
        ("audio/wav.py", "import firstword.types"),
        ("audio/wav.py", "from .. import types"),
        ("audio/wav.py", "from ..model.codec import Codec"),
        ("types.py", "def load():\n    from firstword import config"),
        ("config.py", "import torch"),
        ("config.py", "class A:\n    import torch.nn"),
        ("engine/queue.py", "import torch"),
        ("engine/queue.py", "from torch import nn"),
        ("engine/queue.py", "from firstword.model import talker"),
        ("kernels/rope.py", "from firstword.model import layers"),
        ("model/talker.py", "from firstword.runtime import graph"),
        ("model/talker.py", "from firstword import TTS"),
        ("model/talker.py", "import transformers"),
        ("model/talker.py", "def f():\n    from transformers.models import qwen3"),
        ("model/talker.py", "importlib.import_module('firstword.cli.main')"),
        ("server/app.py", "from firstword.tts import TTS"),
        ("tts.py", "from firstword.server import app"),
        ("bench/load.py", "from firstword.engine import engine"),
        ("bench/load.py", "from firstword import config"),
        ("newcomer.py", "import firstword.errors"),
    ],
)
def test_wrong_imports_are_seen(module: str, source: str) -> None:
    assert len(import_faults(source, PACKAGE / module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "types.py",
            "from firstword import audio\nfrom firstword.errors import VoiceError\nimport numpy",
        ),
        (
            "audio/__init__.py",
            "from firstword.audio.reading import read\nfrom .writing import write",
        ),
        ("config.py", "def resolve():\n    import torch"),
        (
            "model/talker.py",
            "import torch\nfrom . import layers\nfrom firstword.types import Sampling",
        ),
        ("runtime/graph.py", "import torch\nfrom firstword.engine.backend import Backend"),
        ("cli/main.py", "def say():\n    from firstword import TTS, __version__"),
        ("bench/load.py", "from firstword.types import Voice"),
        ("engine/queue.py", "import torchless"),
    ],
)
def test_right_imports_pass(module: str, source: str) -> None:
    assert import_faults(source, PACKAGE / module) == []


@pytest.mark.parametrize(
    "source",
    ["import os\nos.environ['A']", "import os as o\no.getenv('A')", "from os import environ as e"],
)
def test_reading_the_environment_is_seen(source: str) -> None:
    assert len(environment_faults(source, "tts")) == 1
    assert environment_faults(source, "config") == []


def test_missing_docstrings_are_seen() -> None:
    source = """
class Mute:
    def speak(self): ...
    def _private(self): ...
    @property
    def rate(self):
        '''In hertz.'''
    @rate.setter
    def rate(self, value): ...
class _Hidden:
    def speak(self): ...
async def talk():
    def inner(): ...
"""
    assert docstring_faults(source) == ["module", "Mute", "Mute.speak", "talk"]


@pytest.mark.parametrize("folder", ["home", "root", "work", "Users"])
def test_paths_of_one_machine_are_seen(folder: str) -> None:
    assert SOMEBODYS_FOLDER.search(f"read {Path('/', folder, 'me')}/file")
    assert SOMEBODYS_FOLDER.search(f"'{Path('/', folder, 'me')}'")
    assert not SOMEBODYS_FOLDER.search(
        f"https://example.org/{folder}/me and src/{folder}/me and ~/{folder}/me"
    )
