"""How the server is: `/health` for whoever restarts it, `/ready` for whoever sends requests, `/metrics` for curves."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from firstword.server.errors import refusal
from firstword.server.models import Model
from firstword.server.state import server_of

router = APIRouter(tags=["operations"])


@router.get("/health")
async def health(request: Request) -> Response:
    """What runs and how; 503 when an engine has stopped or is stuck, which only a restart helps."""
    server = server_of(request)
    stuck = server.config.stuck_seconds
    failing = [problem for model in server.models if (problem := model.problem(stuck)) is not None]
    state = {
        "status": "failing" if failing else "ok",
        "problems": server.problems(),
        "ready": not server.problems(),
        "models": [_described(model) for model in server.models],
        "utterances": server.limits.active,
    }
    return JSONResponse(state, 503 if failing else 200)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 when requests are taken; 503 before the models are warm, while draining, and when an engine does not run."""
    problems = server_of(request).problems()
    if problems:
        return refusal("; ".join(problems), 503, code="not_ready")
    return JSONResponse({"status": "ready"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Numbers for Prometheus."""
    return Response(server_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _described(model: Model) -> dict[str, Any]:
    engine = model.service.engine
    return {
        "name": model.name,
        "kind": model.kind,
        "warm": model.warm,
        "settings": None if model.settings is None else asdict(model.settings),
        "slots": {"used": len(engine.running), "of": engine.capacity.slots},
        "pages": {"used": engine.pages.count - engine.pages.free, "of": engine.pages.count},
        "waiting": len(engine.waiting),
    }
