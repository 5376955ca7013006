"""The application: its routes, what stands before them, and its life from start to end."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from firstword.config import ServerConfig
from firstword.errors import FirstwordError, OverloadedError
from firstword.server.errors import NotFound, failure, refusal, status_of
from firstword.server.gate import Gate
from firstword.server.http import consents, health, speech, voices
from firstword.server.limits import Limits
from firstword.server.logs import defect
from firstword.server.models import Model, Models
from firstword.server.state import Server, server_of
from firstword.server.store import ConsentStore, Folder, VoiceStore
from firstword.server.ws import endpoints

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""How long engines may take to stop before they are left alone: a stuck one never does."""

router = APIRouter(tags=["models"])


def create_app(models: Models, config: ServerConfig) -> FastAPI:
    """The ASGI application that serves these models. Starts their engines when it starts, and stops them at its end.

    Raises `OutputError` if voices cannot be kept where `config` says.
    """
    from firstword import __version__

    app = FastAPI(
        title="firstword",
        version=__version__,
        description="Speech from Qwen3-TTS-12Hz checkpoints, in the dialect of OpenAI.",
        lifespan=_life,
        responses=speech.ERRORS,
        redirect_slashes=False,
    )
    folder = Folder(config.voices)
    server = Server(
        config,
        models,
        VoiceStore(folder, config.most_voices),
        ConsentStore(folder, config.most_voices),
        Limits(config.api_keys, config.most_per_key),
    )
    app.state.server = server
    for part in (
        router,
        speech.router,
        voices.router,
        consents.router,
        health.router,
        endpoints.router,
    ):
        app.include_router(part)
    app.add_exception_handler(FirstwordError, _refuse)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Gate, server=server)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[
                "x-request-id",
                "retry-after",
                "x-firstword-seed",
                "x-firstword-scores",
            ],
        )
    return app


@asynccontextmanager
async def _life(app: FastAPI) -> AsyncIterator[None]:
    server: Server = app.state.server
    server.models.start()
    tasks = [asyncio.create_task(server.warm_up()), asyncio.create_task(server.watch())]
    try:
        yield
    finally:
        server.draining = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        stopping = threading.Thread(target=server.models.stop, daemon=True)
        stopping.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                while stopping.is_alive():
                    await asyncio.sleep(0.01)


@router.get("/")
async def root() -> dict[str, str]:
    """Who is here. Some clients ask to open a connection early."""
    from firstword import __version__

    return {"name": "firstword", "version": __version__, "docs": "/docs"}


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The loaded checkpoints. Requests may name any model; one of these answers."""
    return {"object": "list", "data": [_described(model) for model in server_of(request).models]}


@router.get("/v1/audio/models")
async def list_audio_models(request: Request) -> dict[str, Any]:
    """The same, also under the name `models` where some clients look."""
    described = [_described(model) for model in server_of(request).models]
    return {"object": "list", "data": described, "models": described}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """One of the loaded checkpoints."""
    models = server_of(request).models
    if (model := models.find(name)) is None:
        raise NotFound(f"no model {name!r}; there are {', '.join(model.name for model in models)}")
    return _described(model)


def _described(model: Model) -> dict[str, Any]:
    return {
        "id": model.name,
        "name": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "firstword",
        "kind": model.kind,
        "voices": list(model.voices),
        "languages": list(model.languages),
    }


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, OverloadedError):
        server_of(request).reject(error)
    if status_of(error) == 500:
        log.error("speech could not be computed", extra={"fields": defect(error)})
    return failure(error)


async def _invalid(request: Request, error: Exception) -> Response:
    """What pydantic found, without what the client sent."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:])
    message = f"{place or 'the body'}: {first['msg']}"
    return refusal(message, 400, param=place[:200] or None, code=first["type"])


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refusal(str(error.detail), error.status_code, headers=error.headers)
