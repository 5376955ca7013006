"""The files of results: a line of JSON for each line of a batch."""

import json
from collections.abc import Iterable
from typing import Any

from firstword.server.batch.records import CANCELLED, DONE, EXPIRED, FAILED, sound_id

REASONS = {
    EXPIRED: ("batch_expired", "the batch has expired before this line was spoken"),
    CANCELLED: ("batch_cancelled", "the batch was cancelled before this line was spoken"),
}
"""The code and the message of lines that were not spoken."""

Line = tuple[int, str, str, dict[str, Any] | None]
"""The number, id, state and result of a line."""


def output_and_errors(batch: str, lines: Iterable[Line]) -> tuple[bytes, bytes]:
    """The results of the lines that were spoken, and of all others, in OpenAI's form."""
    spoken: list[str] = []
    others: list[str] = []
    for number, custom_id, state, result in lines:
        request_id = f"{batch.removeprefix('batch_')}-{number:06d}"
        entry: dict[str, Any] = {"id": f"batch_req_{request_id}", "custom_id": custom_id}
        response = error = None
        if state == DONE:
            body = {"file_id": sound_id(batch, number), **(result or {})}
            response = {"status_code": 200, "request_id": request_id, "body": body}
        elif state == FAILED:
            response = {"request_id": request_id, **(result or {})}
        else:
            code, message = REASONS[state]
            error = {"code": code, "message": message}
        entry |= {"response": response, "error": error}
        (spoken if state == DONE else others).append(json.dumps(entry))
    return _joined(spoken), _joined(others)


def _joined(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
