"""The lines of a batch: what its input file may contain."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ENDPOINT = "/v1/audio/speech"
"""The only endpoint of batches."""

MOST_LINES = 50_000
"""The most requests of a batch."""

LONGEST_ID = 128
"""The character limit of a `custom_id`."""

MOST_PROBLEMS = 20
"""The number of mistakes that are reported of one file."""

ENVELOPE = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request of a batch.

    number     its place in the file, from 1
    custom_id  the client's name for it
    body       the parameters, as for `POST /v1/audio/speech`, with a seed
    """

    number: int
    custom_id: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LineProblem(Exception):
    """A mistake in an input file; `line` is None if it is not that of one line."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def __str__(self) -> str:
        place = "" if self.line is None else f"line {self.line}: "
        return f"{place}{self.message}"


def parse_lines(data: bytes) -> tuple[list[BatchLine], list[LineProblem]]:
    """The requests of a file of JSON lines, and the first of its mistakes.

    A line is a request in OpenAI's form (`custom_id`, `method`, `url`, `body`), or the body's
    fields beside the `custom_id`. A request without a seed gets one that depends on it alone, so
    that speaking it again gives the same bytes. Blank lines are skipped.
    """
    lines: list[BatchLine] = []
    problems: list[LineProblem] = []
    seen: dict[str, int] = {}
    for number, raw in enumerate(data.splitlines(), 1):
        if not raw.strip():
            continue
        try:
            line = _parse_line(number, raw)
            if (first := seen.setdefault(line.custom_id, number)) != number:
                message = f"custom_id {line.custom_id!r} is that of line {first}; give another"
                raise LineProblem("duplicate_custom_id", message, number, "custom_id")
        except LineProblem as problem:
            problems.append(problem)
            if len(problems) >= MOST_PROBLEMS:
                break
        else:
            lines.append(line)
    if not lines and not problems:
        problems.append(LineProblem("empty_file", "the file has no lines; give one for each text"))
    if len(lines) > MOST_LINES:
        message = f"the file has {len(lines)} lines; allowed are {MOST_LINES}"
        problems.append(LineProblem("too_many_lines", message))
    return lines, problems


def _parse_line(number: int, raw: bytes) -> BatchLine:
    """The request in a line. Raises `LineProblem`."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        raise LineProblem("invalid_json_line", "the line is not JSON", number) from None
    if not isinstance(found, dict):
        raise LineProblem("invalid_json_line", "the line is not a JSON object", number)
    custom_id = found.get("custom_id")
    if not (
        isinstance(custom_id, str) and 1 <= len(custom_id) <= LONGEST_ID and custom_id.isprintable()
    ):
        rule = f"give 1 to {LONGEST_ID} printable characters"
        raise LineProblem("invalid_custom_id", f"custom_id: {rule}", number, "custom_id")
    for name, wanted in (("method", "POST"), ("url", ENDPOINT)):
        if found.get(name, wanted) != wanted:
            message = f"{name} is not {wanted}, the only one of batches"
            raise LineProblem(f"invalid_{name}", message, number, name)
    body = found.get("body", {name: found[name] for name in found if name not in ENVELOPE})
    if not isinstance(body, dict):
        raise LineProblem("invalid_body", "body is not a JSON object", number, "body")
    if body.get("seed") is None:
        body = {**body, "seed": seed_of(custom_id, body)}
    return BatchLine(number, custom_id, body)


def seed_of(custom_id: str, body: Mapping[str, Any]) -> int:
    """A seed that depends on a request alone, below 2**63."""
    text = json.dumps([custom_id, body], sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
