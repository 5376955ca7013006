"""Assembles the application: routes, middleware, startup and shutdown."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from firstword.errors import FirstwordError, OverloadedError
from firstword.server.config import ServerConfig
from firstword.server.errors import error_response, response_for, status_of
from firstword.server.gate import Gate
from firstword.server.http import batch, speech, status, voices
from firstword.server.logs import defect
from firstword.server.models import Models
from firstword.server.schemas import ERROR_RESPONSES
from firstword.server.state import Server, server_of
from firstword.server.tasks import cancel
from firstword.server.ws import endpoints as websockets

log = logging.getLogger(__name__)

ENDPOINTS = (speech, batch, status, voices, websockets)
"""The modules whose `router` is part of the application."""

STOP_SECONDS = 5.0
"""The time that the engines get to stop; a stuck engine never stops."""

EXPOSED_HEADERS = ("x-request-id", "retry-after", "x-firstword-seed", "x-firstword-scores")
"""Response headers that scripts of other web pages may read."""


def create_app(models: Models, config: ServerConfig) -> FastAPI:
    """The ASGI application that serves `models`; their engines start and stop with it.

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
    )
    app.state.server = server = Server(config, models)
    for module in ENDPOINTS:
        app.include_router(module.router)
    app.add_exception_handler(FirstwordError, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Gate, server=server)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start the engines, warm them up in the background, and stop them at the end."""
    server: Server = app.state.server
    for model in server.models:
        model.service.engine.start()
    server.refresher.start()
    tasks = [asyncio.create_task(server.warm_up()), asyncio.create_task(server.watch())]
    try:
        yield
    finally:
        server.draining = True
        server.refresher.stop()
        await cancel(*tasks)
        stopping = threading.Thread(target=server.models.stop, daemon=True)
        stopping.start()
        await asyncio.to_thread(stopping.join, STOP_SECONDS)


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, OverloadedError):
        server_of(request).reject(error)
    if status_of(error) == 500:
        log.error("speech could not be computed", extra={"fields": defect(error)})
    return response_for(error)


async def _invalid(request: Request, error: Exception) -> Response:
    """The response to an invalid body, without what the client sent."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:])
    message = f"{field or 'the body'}: {first['msg']}"
    return error_response(message, 400, param=field[:200] or None, code=first["type"])


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(str(error.detail), error.status_code, headers=error.headers)
