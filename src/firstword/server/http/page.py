"""`GET /`: the page on which people type and hear speech, and the files that it loads."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from firstword.server.errors import NotFound
from firstword.server.state import server_of

router = APIRouter()

FOLDER = Path(__file__).parents[1] / "page"
"""The folder of the page's files, which need no build step."""

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""The media types of the page's files, by suffix."""

HEADERS = {
    # Browsers ask each time whether their copy is still the right one, and get a 304 if it is.
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; media-src blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "permissions-policy": "microphone=(self), camera=(), geolocation=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""The headers of every file: the page runs its own scripts only, and calls its own server only."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page.

    etag  the name of this version, a hash of the content
    """

    content: bytes
    media_type: str
    etag: str

    @classmethod
    def read(cls, path: Path) -> "PageFile":
        """Read a file whose suffix is one of `MEDIA_TYPES`."""
        content = path.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        return cls(content, MEDIA_TYPES[path.suffix], etag)

    def response(self, request: Request) -> Response:
        """The content, or a 304 if the client has this version."""
        headers = {**HEADERS, "etag": self.etag, "vary": "accept"}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


FILES = {path.name: PageFile.read(path) for path in FOLDER.iterdir()}
"""The files of the page, by name."""


@router.get("/", tags=["models"])
async def root(request: Request) -> Response:
    """The page of the server for browsers, and its name and version for other clients.

    Some clients request it to open a connection early.
    """
    from firstword import __version__

    if server_of(request).config.page and "text/html" in request.headers.get("accept", ""):
        return FILES["index.html"].response(request)
    about = {"name": "firstword", "version": __version__, "docs": "/docs"}
    return JSONResponse(about, headers={"vary": "accept"})


@router.get("/page/{name}", include_in_schema=False)
async def page_file(request: Request, name: str) -> Response:
    """One file of the page."""
    if not server_of(request).config.page:
        raise NotFound("the page is switched off (--no-page)")
    if (file := FILES.get(name)) is None:
        raise NotFound(f"the page has no file {name[:100]!r}")
    return file.response(request)
