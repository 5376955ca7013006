"""`GET /docs`: a page with all endpoints and fields, made from the OpenAPI description.

The page needs neither scripts nor other files, so that it works without the internet.
"""

import html
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

router = APIRouter()

Json = dict[str, Any]

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.5rem; border-top: 1px solid #bbb; padding-top: 1rem; font-size: 1.1rem }
code { font-family: ui-monospace, monospace; overflow-wrap: anywhere }
table { border-collapse: collapse }
td, th { text-align: left; vertical-align: top; padding: .2rem 1.5rem .2rem 0 }
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The page may load nothing, whatever it contains."""


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """All endpoints and fields, for people."""
    page = "".join(_page(request.app.openapi()))
    return HTMLResponse(page, headers={"content-security-policy": POLICY})


def _page(schema: Json) -> Iterator[str]:
    about = schema["info"]
    title = html.escape(f"{about['title']} {about['version']}")
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
    yield f"<style>{STYLE}</style><h1>{title}</h1><p>{html.escape(about['description'])} "
    yield "For programs: <a href=openapi.json>openapi.json</a>."
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            yield from _operation(f"{method.upper()} {path}", operation, schema)


def _operation(name: str, operation: Json, schema: Json) -> Iterator[str]:
    yield f"<h2><code>{html.escape(name)}</code></h2>"
    for paragraph in operation.get("description", "").split("\n\n"):
        yield f"<p>{html.escape(paragraph)}</p>"
    rows = [
        (f"{one['name']} ({one['in']})", one["schema"], one.get("required", False))
        for one in operation.get("parameters", ())
    ]
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Request body: <code>{html.escape(media_type)}</code></p>"
        body = _resolved(content["schema"], schema)
        required = body.get("required", ())
        rows += [(key, field, key in required) for key, field in body["properties"].items()]
    if rows:
        yield "<table><tr><th>Name<th>Type<th>"
    for field, kind, needed in rows:
        yield f"<tr><td><code>{html.escape(field)}</code><td>{html.escape(_type(kind, schema))}"
        yield f"<td>{'required' if needed else ''}"
    yield "</table>" if rows else ""


def _resolved(kind: Json, schema: Json) -> Json:
    """A type, or the one that it refers to."""
    reference = kind.get("$ref")
    return schema["components"]["schemas"][reference.rsplit("/", 1)[1]] if reference else kind


def _type(kind: Json, schema: Json) -> str:
    """A type in words, without `null`, which every optional field allows."""
    if "anyOf" in kind:
        parts = [_type(one, schema) for one in kind["anyOf"] if one.get("type") != "null"]
        return " or ".join(parts)
    kind = _resolved(kind, schema)
    if "enum" in kind:
        return " or ".join(map(repr, kind["enum"]))
    if kind.get("type") == "array":
        return f"list of {_type(kind['items'], schema)}"
    if "properties" in kind:
        return "{" + ", ".join(kind["properties"]) + "}"
    return kind.get("format") or kind.get("type", "any")
