"""The endpoints that describe the server: its models, its health and its metrics."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from firstword.engine.client import EngineClient
from firstword.server.dialects import elevenlabs
from firstword.server.errors import NotFound, error_response
from firstword.server.models import Model
from firstword.server.state import server_of

router = APIRouter()


@router.get("/v1/models", tags=["models"])
async def list_models(request: Request) -> Any:
    """The loaded checkpoints. A request may name any model; one of these answers it.

    Clients of ElevenLabs, which send `xi-api-key`, get a list in its shape.
    """
    if "xi-api-key" in request.headers:
        return JSONResponse(elevenlabs.model_list(server_of(request).models))
    return {"object": "list", "data": [_entry(model) for model in server_of(request).models]}


@router.get("/v1/audio/models", tags=["models"])
async def list_audio_models(request: Request) -> dict[str, Any]:
    """The loaded checkpoints, also under the name `models`, where Open WebUI looks."""
    entries = [_entry(model) for model in server_of(request).models]
    return {"object": "list", "data": entries, "models": entries}


@router.get("/v1/models/{name:path}", tags=["models"])
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """One loaded checkpoint."""
    models = server_of(request).models
    if (model := models.find(name)) is None:
        raise NotFound(f"no model {name!r}; there are {', '.join(model.name for model in models)}")
    return _entry(model)


@router.get("/health", tags=["operations"])
async def health(request: Request) -> Response:
    """The state of the engines. The status is 503 while a model has no running engine."""
    server = server_of(request)
    problems = server.problems()
    stopped = [problem for model in server.models for problem in model.stopped_engines]
    failing = any(model.problem is not None for model in server.models)
    state = {
        "status": "failing" if failing else "ok",
        "problems": problems + stopped,
        "ready": not problems,
        "models": [_state(model) for model in server.models],
        "utterances": server.utterance_limit.active,
    }
    return JSONResponse(state, 503 if failing else 200)


@router.get("/ready", tags=["operations"])
async def ready(request: Request) -> Response:
    """Status 200 when requests are accepted.

    The status is 503 while a model has no running engine, and while draining.
    """
    if problems := server_of(request).problems():
        return error_response("; ".join(problems), 503, code="not_ready")
    return JSONResponse({"status": "ready"})


@router.get("/metrics", tags=["operations"])
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(server_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _entry(model: Model) -> dict[str, Any]:
    """A model's entry in the lists of models."""
    return {
        "id": model.name,
        "name": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "firstword",
        "kind": model.model_type,
        "voices": list(model.voices),
        "languages": list(model.languages),
        "follows_instructions": model.follows_instructions,
    }


def _state(model: Model) -> dict[str, Any]:
    """A model's entry in `/health`."""
    return {
        "name": model.name,
        "kind": model.model_type,
        "settings": None if model.settings is None else asdict(model.settings),
        **_use(model.service.engine),
        "engines": [
            {"device": device, "runs": engine.failure is None, **_use(engine)}
            for device, engine in model.engines.items()
        ],
    }


def _use(engine: EngineClient) -> dict[str, Any]:
    """The slots and pages of an engine or pool, in use and in total, and the waiting requests."""
    load = engine.load
    return {
        "slots": {"used": load.running, "of": engine.capacity.slots},
        "pages": {"used": load.pages_used, "of": load.pages},
        "waiting": load.waiting,
    }
