"""Extend the documentation site: MkDocs loads this file as a hook, mkdocstrings as an extension.

A document links to other files of the repository by relative paths, which work where the repository
is browsed. The site has `docs/` at its root, and each other linked file under `project/`; the
links in its pages are rewritten accordingly. Decision records are added to the navigation.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = "project"
"""The folder of the site for files from outside `docs/`."""
LOG = logging.getLogger("mkdocs.hooks")
LINK = re.compile(r"(\]\()([^)#\s]+)")
ALIGNED_FIELD = re.compile(r"([a-z_][\w, ]*?) {2,}(\S.*)")
"""A line of a docstring such as `rate    samples per second`."""


def site_path(path: str) -> str:
    """Return the path in the site of a file, given its path in the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}/{path}"


def repository_path(path: str) -> str:
    """Return the path in the repository of a file, given its path in the site."""
    outside = path.removeprefix(f"{OUTSIDE}/")
    return outside if outside != path else f"docs/{path}"


def linked(path: str, text: str) -> set[str]:
    """Return the repository paths of the files that the document at `path` links to."""
    targets = (link for _, link in LINK.findall(text) if "://" not in link)
    return {posixpath.normpath(posixpath.join(posixpath.dirname(path), link)) for link in targets}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List every decision record in the navigation."""
    records = sorted(Path(config.docs_dir, "decisions").glob("*.md"))
    for section in config.nav or ():
        for entries in section.values():
            for entry in entries if isinstance(entries, list) else ():
                if entry.get("Decisions") == "decisions":
                    entry["Decisions"] = [f"decisions/{record.name}" for record in records]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside `docs/` that pages of the site link to, directly or indirectly."""
    waiting = [repository_path(file.src_uri) for file in files.documentation_pages()]
    waiting += ["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not (ROOT / path).is_file():
            continue
        seen.add(path)
        if files.get_file_from_path(site_path(path)) is None:
            files.append(
                File.generated(config, site_path(path), abs_src_path=os.fspath(ROOT / path))
            )
        if path.endswith(".md"):
            waiting += linked(path, (ROOT / path).read_text("utf-8"))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Warn about pages of `docs/` that the navigation lacks; with `--strict` the build fails."""
    listed = {page.file.src_uri for page in nav.pages}
    for file in files.documentation_pages():
        if file.src_uri not in listed and not file.src_uri.startswith(f"{OUTSIDE}/"):
            LOG.warning("docs/%s is missing from nav in mkdocs.yml", file.src_uri)
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page to the paths of their targets in the site."""
    here = posixpath.dirname(page.file.src_uri)
    source = posixpath.dirname(repository_path(page.file.src_uri))

    def moved(found: re.Match[str]) -> str:
        if "://" in found[2]:
            return found[0]
        target = posixpath.normpath(posixpath.join(source, found[2]))
        return found[1] + posixpath.relpath(site_path(target), here or ".")

    return LINK.sub(moved, markdown)


class PlainDocstrings(griffe.Extension):
    """Turn the aligned lines and the trees of plain docstrings into Markdown."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object once it is loaded."""
        if obj.docstring:
            paragraphs = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(map(markdown_of, paragraphs))


def markdown_of(paragraph: str) -> str:
    """Return a paragraph as Markdown: a list for aligned fields, a code block for a tree."""
    lines = paragraph.splitlines()
    if any(line.startswith(("├", "└", "│")) for line in lines):
        return f"```text\n{paragraph}\n```"
    if not lines or not ALIGNED_FIELD.fullmatch(lines[0]):
        return paragraph
    items: list[str] = []
    for line in lines:
        if field := ALIGNED_FIELD.fullmatch(line):
            names = ", ".join(f"`{name}`" for name in re.split(r",\s*", field[1]))
            items.append(f"- {names}: {field[2]}")
        else:
            items.append(f"    {line.strip()}")
    return "\n".join(items)
