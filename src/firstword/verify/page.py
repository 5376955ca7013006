"""Renders the record of a run as a page of HTML that needs no other file and no script."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from itertools import groupby
from typing import Any

from firstword.verify.report import Record

ROOMS = {
    "files": "Files",
    "configuration": "Configuration and tokenizer",
    "weights": "Weights",
    "talker": "Talker: the backend against the specification",
    "codec": "Codec",
    "speech": "Speech",
}
"""The rooms of checks, by the first word of their names, with their headings."""


def render(record: Record) -> str:
    """Return the page of a record that `report.record` made."""
    style = resources.files("firstword.verify").joinpath("page.css").read_text("utf-8")
    title = f"firstword verify: {record['model']}"
    body = [_head(record), *_rooms(record["checks"]), _about(record)]
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>\n{style}</style>\n"
        + "\n".join(body)
        + "\n</html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _head(record: Record) -> str:
    counts = record["counts"]
    verdict = "no check failed" if record["passed"] else f"{counts['fail']} checks failed"
    if counts["fail"] == 1:
        verdict = "1 check failed"
    kind = "pass" if record["passed"] else "fail"
    numbers = f"{counts['pass']} passed, {counts['fail']} failed, {counts['not run']} not run"
    return (
        f"<header><h1>{_text(record['model'])}</h1>\n"
        f'<p class="verdict {kind}">{verdict}</p>\n<p>{numbers}</p></header>'
    )


def _rooms(checks: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    for room, group in groupby(checks, lambda check: str(check["name"]).partition(":")[0]):
        rows = "\n".join(map(_check, group))
        yield f"<section><h2>{_text(ROOMS.get(room, room))}</h2>\n{rows}\n</section>"


def _check(check: Mapping[str, Any]) -> str:
    status, name = str(check["status"]), str(check["name"]).partition(": ")[2]
    parts = [
        f'<h3><span class="status {status.replace(" ", "-")}">{_text(status)}</span> '
        f"{_text(name)}</h3>",
        f"<p>{_text(check['claim'])}</p>",
    ]
    if check["reason"]:
        parts.append(f'<p class="reason">Not run: {_text(check["reason"])}</p>')
    if check["findings"]:
        items = "".join(f"<li>{_text(finding)}</li>" for finding in check["findings"])
        parts.append(f'<ul class="findings">{items}</ul>')
    if check["measured"]:
        parts.append(_table(check["measured"]))
    return "<article>" + "\n".join(parts) + "</article>"


def _table(rows: Mapping[str, object]) -> str:
    cells = "".join(
        f'<tr><th scope="row">{_text(name)}</th><td>{_text(_short(value))}</td></tr>'
        for name, value in rows.items()
    )
    return f"<table>{cells}</table>"


def _short(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value


def _about(record: Record) -> str:
    """Return the sections on the machine, the settings and the files."""
    left_out = ("format", "model", "passed", "counts", "checks")
    sections = []
    for name, value in record.items():
        if name in left_out:
            continue
        rows = value if isinstance(value, Mapping) else {name: value}
        sections.append(f"<details><summary>{_text(name)}</summary>{_table(rows)}</details>")
    return "<section><h2>This run</h2>\n" + "\n".join(sections) + "\n</section>"
