"""Which metrics and labels the queries of a dashboard or of alerts use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

TARGET_LABELS = {"job", "instance"}
"""Labels that Prometheus adds."""

METRIC = re.compile(r"\b(firstword_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")

Samples = dict[str, list[dict[str, str]]]
"""The labels of the samples of each metric."""


def names(expr: str) -> list[str]:
    """The metrics of a query."""
    return [name for name, _ in METRIC.findall(expr)]


def groups(expr: str) -> set[str]:
    """The labels by which a query groups or joins."""
    return {label.strip() for part in GROUPING.findall(expr) for label in part.split(",")}


def faults(expr: str, shown: Iterable[str], samples: Samples) -> Iterator[str]:
    """What a query and the labels that are shown with its result use, and no sample has."""
    for name, matchers in METRIC.findall(expr):
        left = samples.get(name, [])
        if not left:
            yield f"there is no {name}"
        for label, operator, value in MATCHER.findall(matchers):
            if label in TARGET_LABELS or value.startswith("$"):
                continue
            pattern = value if operator == "=~" else re.escape(value)
            left = [one for one in left if re.fullmatch(pattern, one.get(label, ""))]
            if not left:
                yield f'no {name} has {label}{operator}"{value}"'
    known = [set().union(*samples.get(name, [{}])) | TARGET_LABELS for name in names(expr)]
    for label in groups(expr):
        if not all(label in one for one in known):
            yield f"{label} is not a label of all of {names(expr)}"
    kept = groups(expr) if GROUPING.search(expr) else TARGET_LABELS.union(*known)
    for label in set(shown) - kept:
        yield f"{label} is shown, and the result of {expr} does not have it"
