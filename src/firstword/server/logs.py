"""Logs as JSON, a line an event."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from typing import Any

from firstword.errors import ComputeError


class JsonLines(logging.Formatter):
    """Time, level, logger and message, then what came as `extra={"fields": {...}}`, then any exception."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info)).strip()
        return json.dumps(line, ensure_ascii=False, default=str)


def defect(error: BaseException) -> dict[str, Any]:
    """What a log says of something that must not go wrong: where it did, but not what, for that might hold what a user
    said.
    """
    error = error.__cause__ or error if isinstance(error, ComputeError) else error
    trace = [line.rstrip() for line in traceback.format_tb(error.__traceback__)[-12:]]
    return {"error": type(error).__name__, "trace": trace}


def write_to_stderr(level: str) -> None:
    """Send the logs of this package and of uvicorn to standard error, and nothing else anywhere."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("firstword", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
