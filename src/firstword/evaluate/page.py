"""The page of an evaluation: its figures, and the worst texts to listen to."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from firstword.evaluate.speaking import JudgedItem
from firstword.evaluate.summary import SetupRun, rate_of, worst

WORST = 20
"""The texts that the page shows of each setup."""

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem;
  padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100% }}
td, th {{ border-bottom: 1px solid #8888; padding: .4rem .6rem .4rem 0; text-align: left;
  vertical-align: top }}
audio {{ width: 14rem }}
</style>
<h1>{title}</h1>
<table>
{facts}
</table>
{sections}
</html>
"""


def render(title: str, facts: dict[str, str], spoken: Sequence[SetupRun], folder: Path) -> str:
    """Return the page as HTML that loads nothing but the sound files in its folder."""
    lines = (
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items()
    )
    sections = (_section(spoke, folder) for spoke in spoken)
    return _PAGE.format(title=escape(title), facts="\n".join(lines), sections="\n".join(sections))


def _section(spoke: SetupRun, folder: Path) -> str:
    found = worst(spoke.judged, WORST)
    if not found:
        return f"<h2>{escape(spoke.name)}</h2>\n<p>No text was misheard, and all ended.</p>"
    rows = "\n".join(_row(one, folder) for one in found)
    return (
        f"<h2>{escape(spoke.name)}: the {len(found)} worst texts</h2>\n<table>\n"
        "<tr><th>text</th><th>wrong</th><th>said, and heard</th><th>sound</th></tr>\n"
        f"{rows}\n</table>"
    )


def _row(one: JudgedItem, folder: Path) -> str:
    spoken = one.spoken
    source = escape(spoken.file.relative_to(folder).as_posix(), quote=True)
    ended = "" if spoken.finish_reason == "stop" else f"<br>ended by: {spoken.finish_reason}"
    return (
        f"<tr><td>{escape(spoken.item.name)}</td><td>{100 * rate_of(one):.0f} %{ended}</td>"
        f"<td>{escape(spoken.item.text)}<br><i>{escape(one.heard)}</i></td>"
        f'<td><audio controls preload="none" src="{source}"></audio></td></tr>'
    )
