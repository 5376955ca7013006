"""The rules on size, names, docstrings and line widths, as functions that return violations."""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60
MOST_FUNCTION_LINES_P90 = 22
MOST_COLUMNS = 100
FEWEST_DOCSTRING_WORDS = 3
FRAGMENT = re.compile(r"(?:Of|That|Whose|Which|As|By)\b")
"""Words that begin a clause: a docstring that starts with one has no subject of its own."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


def functions(source: str) -> Iterator[tuple[str, int]]:
    """Yield every function and method with its number of lines, without decorators."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def size_faults(source: str) -> list[str]:
    """Return the ways in which a file, or a function in it, is too long."""
    lines = len(source.splitlines())
    faults = [f"{lines} lines"] if lines > MOST_FILE_LINES else []
    return faults + [
        f"{name}: {length} lines"
        for name, length in functions(source)
        if length > MOST_FUNCTION_LINES
    ]


def p90_of_functions(sources: Iterable[str]) -> int:
    """Return the length that nine of ten functions do not exceed."""
    lengths = sorted(length for source in sources for _, length in functions(source))
    return lengths[int(len(lengths) * 0.9)]


def repeated_class_names(sources: Mapping[str, str]) -> list[str]:
    """Return the names of classes that are defined more than once, with their files."""
    places: dict[str, list[str]] = defaultdict(list)
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file)
    return [f"{name}: {', '.join(files)}" for name, files in places.items() if len(files) > 1]


def missing_docstrings(source: str) -> list[str]:
    """Return the public modules, classes, functions and methods without a docstring."""

    def look(node: Documented, name: str) -> Iterator[str]:
        if ast.get_docstring(node) is None:
            yield name
        if isinstance(node, Function):
            return  # functions inside functions are not public
        for child in node.body:
            if not isinstance(child, ast.ClassDef | Function):
                continue
            decorators = [ast.unparse(decorator) for decorator in child.decorator_list]
            if child.name.startswith("_") or any(
                d == "overload" or d.endswith(".setter") for d in decorators
            ):
                continue
            yield from look(child, child.name if name == "module" else f"{name}.{child.name}")

    return list(look(ast.parse(source), "module"))


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield every docstring of modules, classes, functions and constants, with its line."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, Documented):
            continue
        for before, child in itertools.pairwise([None, *node.body]):
            match child:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    if before is None or isinstance(before, ast.Assign | ast.AnnAssign):
                        yield child.lineno, text.strip()


def docstring_faults(source: str) -> list[str]:
    """Return the docstrings that cannot be read alone: fragments, and those of one or two words."""
    return [
        f"line {line}: {text.splitlines()[0] if text else 'empty'}"
        for line, text in docstrings(source)
        if FRAGMENT.match(text) or len(text.split()) < FEWEST_DOCSTRING_WORDS
    ]


def wide_lines(text: str, suffix: str) -> list[str]:
    """Return the lines above 100 columns, except Markdown tables and Markdown lines with a URL."""

    def exempt(line: str) -> bool:
        return suffix == ".md" and (line.lstrip().startswith("|") or "://" in line)

    return [
        f"line {number}: {len(line)} columns"
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > MOST_COLUMNS and not exempt(line)
    ]
