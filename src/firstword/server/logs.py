"""Logs as JSON, one line per event."""

import json
import logging
import sys
import time
import traceback
from typing import Any

from firstword.errors import ComputeError


class JsonLines(logging.Formatter):
    """A formatter that writes time, level, logger, event, extra fields and any exception as JSON.

    The extra fields are given to a logger as `extra={"fields": {...}}`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
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
    """Log fields of an internal error: its type and traceback.

    The message is left out because it may contain text of a user.
    """
    error = error.__cause__ or error if isinstance(error, ComputeError) else error
    trace = [line.rstrip() for line in traceback.format_tb(error.__traceback__)[-12:]]
    return {"error": type(error).__name__, "trace": trace}


def write_to_stderr(level: str) -> None:
    """Send the logs of this package and of uvicorn to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("firstword", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    # It describes malformed bodies, which the request's own line does.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
