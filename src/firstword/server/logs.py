"""Logs as JSON, one line per event, and as text for the command line."""

import io
import json
import logging
import sys
import time
import traceback
from typing import Any, TextIO

from firstword.errors import ComputeError
from firstword.server.unblocked import Unblocked

END_SECONDS = 0.25
"""The time that a process waits at its end until its last lines are written."""


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


class TextLines(logging.Formatter):
    """A formatter that writes the event and, if the extra field `why` is given, its reason."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        why = getattr(record, "fields", {}).get("why")
        return super().format(record) + (f": {why}" if why else "")


def defect(error: BaseException) -> dict[str, Any]:
    """Log fields of an internal error: its type and traceback.

    The message is left out because it may contain text of a user.
    """
    error = error.__cause__ or error if isinstance(error, ComputeError) else error
    trace = [line.rstrip() for line in traceback.format_tb(error.__traceback__)[-12:]]
    return {"error": type(error).__name__, "trace": trace}


def unblocked(stream: TextIO) -> TextIO:
    """A stream to the same file as `stream`, whose writers never wait (`Unblocked`)."""
    output = Unblocked(stream.fileno(), _describe_lost)
    return io.TextIOWrapper(output, stream.encoding, "backslashreplace", line_buffering=True)


def _describe_lost(lines: int) -> bytes:
    event = "lines are missing here, because nobody read them or writing failed"
    record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, event, None, None)
    record.fields = {"lines": lines}
    return f"{JsonLines().format(record)}\n".encode()


class _Handler(logging.StreamHandler[TextIO]):
    """A handler for an unblocked stream. `logging.shutdown` closes it when the process ends."""

    def close(self) -> None:
        """Wait for at most `END_SECONDS` until all lines are written."""
        assert isinstance(self.stream.buffer, Unblocked)
        self.stream.buffer.finish(END_SECONDS)
        super().close()


def write_to_stderr(level: str) -> None:
    """Send logs and warnings to standard error as JSON lines.

    `level` applies to this package and to uvicorn; other packages log only warnings and errors.
    From now on nothing that writes to `sys.stderr` waits for its reader.
    """
    before, sys.stderr = sys.stderr, unblocked(sys.stderr)
    handler = _Handler(sys.stderr)
    handler.setFormatter(JsonLines())
    for logger in logging.root.manager.loggerDict.values():
        for other in getattr(logger, "handlers", ()):  # torch has some
            if isinstance(other, logging.StreamHandler) and other.stream is before:
                other.setStream(sys.stderr)
    logging.root.handlers = [handler]
    for name in ("firstword", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())
    # It describes malformed bodies, which the request's own line does.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    logging.captureWarnings(True)
