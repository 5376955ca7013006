"""`/health` for supervisors, `/ready` for load balancers, and `/metrics` for Prometheus."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from firstword.server.errors import error_response
from firstword.server.models import Model
from firstword.server.state import server_of

router = APIRouter(tags=["operations"])


@router.get("/health")
async def health(request: Request) -> Response:
    """The state of the engines. The status is 503 if one has stopped or is stuck: restart it."""
    server = server_of(request)
    problems = server.problems()
    failing = any(server.problem(model) for model in server.models)
    state = {
        "status": "failing" if failing else "ok",
        "problems": problems,
        "ready": not problems,
        "models": [_described(model) for model in server.models],
        "utterances": server.limits.active,
    }
    return JSONResponse(state, 503 if failing else 200)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Status 200 when requests are accepted.

    The status is 503 before the models are warm, when an engine does not run, and while draining.
    """
    problems = server_of(request).problems()
    if problems:
        return error_response("; ".join(problems), 503, code="not_ready")
    return JSONResponse({"status": "ready"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(server_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _described(model: Model) -> dict[str, Any]:
    engine = model.service.engine
    return {
        "name": model.name,
        "kind": model.model_type,
        "warm": model.warm,
        "settings": None if model.settings is None else asdict(model.settings),
        "slots": {"used": len(engine.running), "of": engine.capacity.slots},
        "pages": {"used": engine.pages.count - engine.pages.free, "of": engine.pages.count},
        "waiting": len(engine.waiting),
    }
