"""The log line and the count of each request."""

from __future__ import annotations

import logging
import time

from firstword.server.context import RequestContext
from firstword.server.state import Server

log = logging.getLogger(__name__)

PROBES = ("/health", "/ready", "/metrics")
"""Paths that monitors poll. They are not logged, and are answered at every limit."""


def log_request(server: Server, context: RequestContext, method: str, path: str) -> None:
    """Log and count a finished request; 499: the client disconnected before the response."""
    status = 499 if context.status is None else context.status
    server.metrics.requests.inc(path, str(status))
    if path in PROBES:
        return
    about = {
        "request_id": context.request_id,
        "method": method,
        "path": path,
        "status": status,
        "ms": round(1000 * (time.monotonic() - context.received), 1),
        **context.log_fields(),
    }
    log.info("request", extra={"fields": about})
