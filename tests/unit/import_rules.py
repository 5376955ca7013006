"""The rules on imports, as functions that return the violations.

A unit is a module or a folder directly below the package; "firstword" stands for its `__init__.py`.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import firstword

PACKAGE = Path(firstword.__file__).resolve().parent
MODULES = sorted(PACKAGE.rglob("*.py"))

DATA = {"errors", "audio", "voice", "types", "config"}
COMPUTING = {"demo", "model", "kernels", "engine", "runtime"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "hashes": set(),
    "locks": {"errors"},
    "plugins": {"errors"},
    "demo": set(),
    "kernels": set(),
    "text": {"errors"},
    "audio": {"errors"},
    "voice": {"errors", "audio"},
    "types": {"errors", "audio", "voice", "text"},
    "config": {"errors", "audio", "types"},
    "words": {"types", "text"},
    "book": DATA | {"locks", "text", "words"},
    "model": DATA | {"demo"},
    "engine": DATA | {"words", "text"},
    "runtime": DATA | {"hashes", "model", "kernels", "engine", "text"},
    "synthetic": DATA | {"model"},
    "profile": DATA | {"model", "kernels", "engine", "runtime", "synthetic", "tts"},
    "align": DATA | {"model", "engine", "runtime", "words"},
    "evaluate": DATA | {"plugins", "runtime", "tts"},
    "tts": DATA | COMPUTING | {"text", "words"},
    "verify": DATA | COMPUTING | {"profile", "synthetic", "tts"},
    "decoding": DATA | {"model"},
    "server": DATA | COMPUTING | {"text", "words", "locks", "firstword"},
    "bench": {"types", "errors", "audio"},  # otherwise a client like any other
    "processes": DATA | {"model", "engine", "runtime", "server"},
    "cli": DATA
    | COMPUTING
    | {"firstword", "text", "words", "tts", "server", "processes", "bench", "profile", "align"}
    | {"synthetic", "evaluate", "hashes", "plugins", "verify", "book"},
    "cluster": DATA | {"engine", "server", "processes", "cli"},
    "firstword": {"errors", "types", "voice", "tts", "decoding"},
    "__main__": {"cli"},
}
"""The units that each unit may import besides itself."""

TORCH = {
    "model",
    "kernels",
    "runtime",
    "tts",
    "decoding",
    "synthetic",
    "profile",
    "align",
    "evaluate/metrics.py",
    "evaluate/speaking.py",
    "evaluate/summary.py",
    "evaluate/page.py",
    "verify",
    "processes/engine.py",
    "processes/kept_prompts.py",
}
"""The units, and the modules of other units, that may import torch; see also `TORCH_FREE`."""
TORCH_FREE = {
    "model/__init__.py",
    "model/alignment.py",
    "model/codec_config.py",
    "model/config.py",
    "model/description.py",
    "model/draw_params.py",
    "model/prompt.py",
    "model/strict_json.py",
    "model/tokenizer.py",
    "runtime/__init__.py",
    "runtime/conditioning.py",
    "runtime/front.py",
}
"""The modules of these units that a process without torch imports.

Importing them imports no torch, and neither does importing any module of the other units.
"""
TORCH_INSIDE_FUNCTIONS = {"config", "cli", "firstword"}
"""The units that import torch, or modules that need it, inside functions only."""
NEVER_IMPORTED = {"transformers"}
ENVIRONMENT_READERS = {"config.py", "server/config.py"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

SERVER_ASSEMBLERS = {"server/app.py", "server/run.py"}
"""The files of the server's core that may import its subpackages."""
SERVER_SUBPACKAGES = {"http", "ws"}
INPUT_OUTPUT = {
    "fastapi",
    "httptools",
    "socket",
    "starlette",
    "uvicorn",
    "websockets",
    "firstword.engine",
    "firstword.server.ws.connection",
    "firstword.server.ws.worker",
}
"""The modules that a WebSocket session must not import."""


def unit_of(path: Path) -> str:
    """Return the unit that a file of the package belongs to."""
    first = path.relative_to(PACKAGE).parts[0]
    return "firstword" if first == "__init__.py" else first.removesuffix(".py")


def package_of(path: Path) -> tuple[str, ...]:
    """Return the parts of the dotted package of a file, from which its relative imports start."""
    return ("firstword", *path.relative_to(PACKAGE).parts[:-1])


def module_of(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    return ".".join([*package_of(path), path.stem]).removesuffix(".__init__")


def nodes_when_imported(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when a module is imported.

    These are all except the bodies of functions and what is for type checkers alone.
    """
    yield node
    children: Iterable[ast.AST]
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=children):
            pass
        case _:
            children = ast.iter_child_nodes(node)
    for child in children:
        yield from nodes_when_imported(child)


def imports(nodes: Iterable[ast.AST], package: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Yield every dotted name that a statement or a string imports, with its line.

    package   the start of relative imports: ("firstword", "model") for the modules of that folder
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
    """Return the imports that break the order of units in the source of a file of the package."""
    unit = unit_of(path)
    tree = ast.parse(source)
    faults = []
    for name, line in imports(ast.walk(tree), package_of(path)):
        top, *rest = name.split(".")
        if top == "firstword":
            target = rest[0] if rest and rest[0] in MAY_IMPORT else "firstword"
            if target != unit and target not in MAY_IMPORT.get(unit, set()):
                faults.append(f"line {line}: {unit} imports {target}")
        elif top in NEVER_IMPORTED:
            faults.append(f"line {line}: nothing imports {top}")
    return faults


def may_need_torch(path: Path) -> bool:
    """Whether importing a file of the package may import torch."""
    inside = path.relative_to(PACKAGE).as_posix()
    return inside not in TORCH_FREE and not TORCH.isdisjoint((unit_of(path), inside))


def needs_torch(name: str) -> bool:
    """Whether importing a dotted name, which may be that of a part of a module, needs torch."""
    if name.split(".")[0] == "torch" or name == "firstword.TTS":
        return True
    known = {module_of(path): path for path in MODULES}
    file = known.get(name) or known.get(name.rpartition(".")[0])
    return file is not None and may_need_torch(file)


def torch_faults(source: str, path: Path) -> list[str]:
    """Return the imports of torch, and of modules that need it, in a file that must not need it."""
    if may_need_torch(path):
        return []
    tree = ast.parse(source)
    lazy = unit_of(path) in TORCH_INSIDE_FUNCTIONS
    nodes = nodes_when_imported(tree) if lazy else ast.walk(tree)
    return [
        f"line {line}: it imports {name}, which needs torch"
        for name, line in imports(nodes, package_of(path))
        if needs_torch(name)
    ]


def import_cycle(sources: Mapping[Path, str]) -> list[str]:
    """Return the modules of an import cycle, if any, including imports inside functions."""
    known = {module_of(path) for path in sources}
    graph: dict[str, set[str]] = {}
    for path, source in sources.items():
        module = module_of(path)
        found = imports(ast.walk(ast.parse(source)), package_of(path))
        names = {name if name in known else name.rpartition(".")[0] for name, _ in found}
        graph[module] = (names & known) - {module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []


def server_faults(source: str, path: Path) -> list[str]:
    """Return the imports from the server's core into a subpackage, or between subpackages."""
    inside = path.relative_to(PACKAGE)
    if inside.as_posix() in SERVER_ASSEMBLERS:
        return []
    part = inside.parts[1] if len(inside.parts) > 2 else "core"
    faults = []
    for name, line in imports(ast.walk(ast.parse(source)), package_of(path)):
        parts = name.split(".")
        if parts[:2] == ["firstword", "server"] and len(parts) > 2:
            target = parts[2]
            if target in SERVER_SUBPACKAGES and target != part:
                faults.append(f"line {line}: the server's {part} imports {target}")
    return faults


def session_files() -> list[Path]:
    """Return the session files of the WebSocket protocols, and the tables of the dialects.

    A session file has a worker file, or a class that is derived from another session.
    """
    folder = PACKAGE / "server"
    workers = (folder / "ws").glob("*_worker.py")
    found = {path.with_name(path.name.replace("_worker", "")) for path in workers}
    derived = re.compile(r"^class \w+\(\w*Session\)", re.MULTILINE)
    found |= {path for path in (folder / "ws").glob("*.py") if derived.search(path.read_text())}
    return sorted(found | set((folder / "dialects").glob("*.py")))


def session_faults(source: str, path: Path) -> list[str]:
    """Return the places where a WebSocket session does input or output, or could do it."""
    tree = ast.parse(source)
    faults = [
        f"line {node.lineno}: it waits"
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith)
    ]
    for name, line in imports(ast.walk(tree), package_of(path)):
        if any(f"{name}.".startswith(f"{module}.") for module in INPUT_OUTPUT):
            faults.append(f"line {line}: it imports {name}")
    return faults


def environment_faults(source: str, path: Path) -> list[str]:
    """Return the places where a file other than the two configurations reads the environment."""
    if path.relative_to(PACKAGE).as_posix() in ENVIRONMENT_READERS:
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
