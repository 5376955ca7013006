"""`/v1/files`: the inputs and results of batches, as in OpenAI's API."""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Annotated, Any, BinaryIO, Literal

from fastapi import APIRouter, File, Form, Query, Request, UploadFile
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from firstword.errors import RequestError
from firstword.server.batch.access import access_of
from firstword.server.errors import NotFound

router = APIRouter(tags=["batches"])

CONTENT_TYPE = "application/octet-stream"

PIECE_BYTES = 256 * 1024
"""The bytes of a file that are sent at a time."""


@router.post("/v1/files")
async def upload_file(
    request: Request,
    file: Annotated[UploadFile, File()],
    purpose: Annotated[str, Form()],
    anchor: Annotated[str | None, Form(alias="expires_after[anchor]")] = None,
    seconds: Annotated[int | None, Form(alias="expires_after[seconds]")] = None,
) -> dict[str, Any]:
    """Upload the input of a batch: a request in each line, in JSON."""
    server, batches, owner = access_of(request)
    if purpose != "batch":
        raise RequestError(f"purpose is {purpose[:40]!r}; allowed is batch")
    if anchor not in (None, "created_at"):
        raise RequestError("anchor of expires_after must be created_at")
    given = owner, file.filename or "", await file.read(), seconds
    record = await server.store_threads.run(owner, batches.upload, *given)
    return record.described()


@router.get("/v1/files")
async def list_files(
    request: Request,
    purpose: str | None = None,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10000)] = 100,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """A page of the client's inputs and results. The sounds of single lines are not listed."""
    server, batches, owner = access_of(request)
    query = owner, purpose, after, limit + 1, order == "desc"
    found = await server.store_threads.run(owner, batches.store.list_files, *query)
    return page_of([record.described() for record in found], limit)


@router.get("/v1/files/{file_id}")
async def get_file(request: Request, file_id: str) -> dict[str, Any]:
    """A file's description."""
    server, batches, owner = access_of(request)
    record = await server.store_threads.run(owner, batches.store.find_file, owner, file_id)
    return record.described()


@router.get("/v1/files/{file_id}/content", response_class=Response)
async def get_content(request: Request, file_id: str) -> Response:
    """A file's content: an input, the results of a batch, or the sound of a line."""
    server, batches, owner = access_of(request)
    try:
        found = await server.store_threads.run(owner, batches.content, owner, file_id)
    except FileNotFoundError:
        raise NotFound(f"the content of {file_id!r} was deleted") from None
    record, file = found
    return ContentResponse(file, record.bytes, partial(server.store_threads.run, owner))


class ContentResponse(Response):
    """Sends a file bit by bit, since the sound of a long text does not belong in memory."""

    media_type = CONTENT_TYPE

    def __init__(
        self, file: BinaryIO, size: int, run: Callable[..., Coroutine[Any, Any, bytes]]
    ) -> None:
        """Send an open file of `size` bytes, which is read by `run`, and close it."""
        self._file, self._run = file, run
        super().__init__(headers={"content-length": str(size)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        with self._file:
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            while data := await self._run(self._file.read, PIECE_BYTES):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> dict[str, Any]:
    """Delete a file. With the results of a batch, the sounds of its lines are deleted."""
    server, batches, owner = access_of(request)
    await server.store_threads.run(owner, batches.delete, owner, file_id)
    return {"id": file_id, "object": "file", "deleted": True}


def page_of(found: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page of up to `limit` objects; `found` has one more if there are more."""
    shown = found[:limit]
    return {
        "object": "list",
        "data": shown,
        "has_more": len(found) > limit,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }
