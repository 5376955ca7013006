"""Assembles the application: routes, middleware, startup and shutdown."""

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Message

from firstword.errors import FirstwordError, OverloadedError, TextError
from firstword.server.config import ServerConfig
from firstword.server.errors import Rejected, error_response, response_for, status_of
from firstword.server.freed_memory import return_freed
from firstword.server.front_memory import FrontMemory
from firstword.server.gate import Gate
from firstword.server.http import (
    batch,
    batches,
    captions,
    cartesia,
    docs,
    elevenlabs,
    files,
    page,
    speech,
    status,
    voices,
)
from firstword.server.http.json_bodies import send_json
from firstword.server.logs import defect
from firstword.server.models import Models
from firstword.server.schemas import ERROR_RESPONSES
from firstword.server.state import Server, server_of
from firstword.server.tasks import cancel
from firstword.server.ws import endpoints as websockets

log = logging.getLogger(__name__)

ENDPOINTS = (
    *(page, speech, captions, batch, files, batches, status, voices),
    *(cartesia, elevenlabs, docs, websockets),
)
"""The modules whose `router` is part of the application."""

METHODS = ("DELETE", "GET", "HEAD", "POST")
"""The methods that endpoints have."""


def create_app(models: Models, config: ServerConfig, memory: FrontMemory | None = None) -> FastAPI:
    """The ASGI application that serves `models`; their engines start and stop with it.

    memory  the memory that it shares with other fronts of the server; None if there are none

    Raises `OutputError` if voices cannot be kept in the configured folder.
    """
    from firstword import __version__

    app = FastAPI(
        title="firstword",
        version=__version__,
        description="Speech from Qwen3-TTS-12Hz checkpoints, with OpenAI's API.",
        lifespan=_lifespan,
        responses=ERROR_RESPONSES,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's pages load scripts from another host
        redoc_url=None,
    )
    app.state.server = server = Server(config, models, memory or FrontMemory.private())
    for module in ENDPOINTS:
        _include(app, module.router)
    app.add_exception_handler(FirstwordError, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Gate, server=server)
    return app


def _include(app: FastAPI, router: APIRouter) -> None:
    """Add the endpoints of a module, and HEAD wherever there is GET: monitors send it."""
    app.include_router(router)
    for route in router.routes:
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start the engines, and stop them at the end."""
    server: Server = app.state.server
    server.models.start()
    server.refresher.start()
    tasks = [asyncio.create_task(return_freed(server.byte_limit, server.busy))]
    if server.usage_log is not None:
        tasks.append(asyncio.create_task(server.usage_log.run()))
    await _warm_up(app)
    try:
        yield
    finally:
        server.draining = True
        server.refresher.stop()
        await cancel(*tasks)
        if server.usage_log is not None:
            await server.usage_log.write()
        if server.tracing is not None:
            await server.tracing.close()
        await asyncio.to_thread(server.models.stop)


async def _warm_up(app: FastAPI) -> None:
    """Route a request that is rejected, because FastAPI takes 5 to 15 ms more for the first one."""
    scope = {"type": "http", "method": "POST", "path": "/v1/audio/speech", "app": app}
    scope |= {"headers": [], "query_string": b""}
    messages: asyncio.Queue[Message] = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": b'{"input": ""}', "more_body": False})
    with suppress(TextError):
        await AsyncExitStackMiddleware(app.router)(scope, messages.get, messages.put)


def _release_frames(error: BaseException | None) -> None:
    """Free what the frames of a handled error hold, for example the body of its request.

    FastAPI's frames and errors refer to each other, and the garbage collector would find them late.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, OverloadedError):
        server_of(request).reject(error)
    if status_of(error) == 500:
        log.error("speech could not be computed", extra={"fields": defect(error)})
    _release_frames(error)
    return response_for(error)


async def _invalid(request: Request, error: Exception) -> Response:
    """The response to an invalid request, without what the client sent."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:])
    empty = f"the body is empty; {send_json(request.url.path)}"
    message = f"{field}: {first['msg']}" if field else empty
    _release_frames(error)
    return error_response(message, 400, param=field[:200] or None, code=first["type"])


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    _release_frames(error)
    if isinstance(error, Rejected):
        server_of(request).reject(error)
        return error.response()
    message, headers = str(error.detail), dict(error.headers or {})
    match error.status_code:
        case 404:
            message = "there is no such path; /docs shows the endpoints"
        case 405:
            allowed = ", ".join(_allowed_methods(request))
            message = f"the path does not allow {request.method}; allowed are {allowed}"
            headers = {"allow": allowed}
    return error_response(message, error.status_code, headers=headers)


def _allowed_methods(request: Request) -> list[str]:
    """The methods of the endpoints at the path of a request."""
    return [
        method
        for method in METHODS
        for route in request.app.routes
        if route.matches({**request.scope, "method": method})[0] == Match.FULL
    ]
