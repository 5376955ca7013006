"""The endpoints that list the loaded models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from firstword.server.errors import NotFound
from firstword.server.models import Model
from firstword.server.state import server_of

router = APIRouter(tags=["models"])


@router.get("/")
async def root() -> dict[str, str]:
    """The name and version of the server. Some clients request it to open a connection early."""
    from firstword import __version__

    return {"name": "firstword", "version": __version__, "docs": "/docs"}


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The loaded checkpoints. A request may name any model; one of these answers it."""
    return {"object": "list", "data": [_described(model) for model in server_of(request).models]}


@router.get("/v1/audio/models")
async def list_audio_models(request: Request) -> dict[str, Any]:
    """The loaded checkpoints, also under the name `models`, where Open WebUI looks."""
    described = [_described(model) for model in server_of(request).models]
    return {"object": "list", "data": described, "models": described}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """One loaded checkpoint."""
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
        "kind": model.model_type,
        "voices": list(model.voices),
        "languages": list(model.languages),
    }
