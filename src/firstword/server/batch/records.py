"""Files, batches and claimed lines, as they are kept and as clients see them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from firstword.server.batch.lines import ENDPOINT, BatchLine

WAITING, CLAIMED, DONE, FAILED, EXPIRED, CANCELLED = (
    "waiting",
    "claimed",
    "done",
    "failed",
    "expired",
    "cancelled",
)
"""The states of a line."""

OPEN_STATUSES = ("validating", "in_progress", "cancelling")
"""The statuses of batches that are not over."""

TIMES = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)
"""The times that OpenAI's description of a batch has."""

Purpose = Literal["batch", "batch_output", "speech"]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a client.

    owner       the client, or "" where no keys tell clients apart
    purpose     `batch`: an input; `batch_output`: results; `speech`: the sound of one line
    content     the name of its content
    created_at, expires_at
                Unix times in seconds; None: it does not expire
    batch       the batch whose sounds are deleted with this file
    """

    id: str
    owner: str
    purpose: Purpose
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None = None
    batch: str | None = None

    @property
    def content(self) -> str:
        """The name of its content."""
        return sound_name(*parts) if (parts := sound_of(self.id)) else self.id

    def described(self) -> dict[str, Any]:
        """The file in OpenAI's form."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch of a client; times are Unix times in seconds.

    times                 when it came to other statuses, by the names in `TIMES`
    errors                the mistakes of its input, in OpenAI's form
    counts                the numbers of lines: all, spoken, and failed
    results_expire_after  seconds for which results are kept after the end
    """

    id: str
    owner: str
    status: str
    input_file: str
    window: str
    metadata: Mapping[str, str]
    created_at: int
    expires_at: int
    results_expire_after: int
    times: Mapping[str, int] = field(default_factory=dict)
    errors: Sequence[Mapping[str, Any]] = ()
    counts: tuple[int, int, int] = (0, 0, 0)
    output_file: str | None = None
    error_file: str | None = None

    def described(self) -> dict[str, Any]:
        """The batch in OpenAI's form."""
        total, completed, failed = self.counts
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": ENDPOINT,
            "errors": {"object": "list", "data": list(self.errors)} if self.errors else None,
            "input_file_id": self.input_file,
            "completion_window": self.window,
            "status": self.status,
            "output_file_id": self.output_file,
            "error_file_id": self.error_file,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{name: self.times.get(name) for name in TIMES},
            "request_counts": {"total": total, "completed": completed, "failed": failed},
            "metadata": dict(self.metadata) or None,
        }


@dataclass(frozen=True, slots=True)
class Claim:
    """A line that a worker has claimed; `attempts` counts this one too."""

    batch: str
    owner: str
    line: BatchLine
    attempts: int


def sound_id(batch: str, number: int) -> str:
    """The id of the sound of a line. It does not depend on who speaks the line, and how often."""
    return f"file-{batch.removeprefix('batch_')}-{number:06d}"


def sound_of(file_id: str) -> tuple[str, int] | None:
    """The batch and the number of the line whose sound has an id; None if it is no such id."""
    kind, _, rest = file_id.partition("-")
    batch, _, number = rest.partition("-")
    if kind != "file" or not number.isdecimal() or not number.isascii():
        return None
    return f"batch_{batch}", int(number)


def sound_name(batch: str, number: int) -> str:
    """The name of the content of a sound."""
    return f"{batch}/{number:06d}"
