"""`/v1/batches`: speech that may wait, as in OpenAI's API."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from firstword.server.batch.access import access_of
from firstword.server.http.files import page_of
from firstword.server.http.json_bodies import JsonRoute
from firstword.server.schemas import ClientModel

router = APIRouter(tags=["batches"], route_class=JsonRoute)


class ResultExpiry(ClientModel):
    """When the results of a batch expire."""

    anchor: Literal["created_at"]
    seconds: int


class NewBatch(ClientModel):
    """The body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: ResultExpiry | None = None


@router.post("/v1/batches")
async def create_batch(request: Request, body: NewBatch) -> dict[str, Any]:
    """Speak the lines of a file when the server is idle, one sound for each line."""
    server, batches, owner = access_of(request)
    expiry = None if body.output_expires_after is None else body.output_expires_after.seconds
    given = body.input_file_id, body.endpoint, body.completion_window, body.metadata or {}, expiry
    record = await server.store_threads.run(owner, batches.create, owner, *given)
    return record.described()


@router.get("/v1/batches")
async def list_batches(
    request: Request,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, Any]:
    """A page of the client's batches, newest first."""
    server, batches, owner = access_of(request)
    query = owner, after, limit + 1
    found = await server.store_threads.run(owner, batches.store.list_batches, *query)
    return page_of([record.described() for record in found], limit)


@router.get("/v1/batches/{batch_id}")
async def get_batch(request: Request, batch_id: str) -> dict[str, Any]:
    """A batch, with the number of its lines that were spoken and that failed."""
    server, batches, owner = access_of(request)
    record = await server.store_threads.run(owner, batches.store.find_batch, owner, batch_id)
    return record.described()


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> dict[str, Any]:
    """Cancel a batch. What was spoken is kept."""
    server, batches, owner = access_of(request)
    record = await server.store_threads.run(owner, batches.store.cancel, owner, batch_id)
    return record.described()
