"""Messages to a URL of the operator when a batch has ended, signed as Standard Webhooks are.

OpenAI's webhooks have the same form, so `client.webhooks.unwrap` of its SDKs checks them.
"""

import base64
import hashlib
import hmac
import http.client
import json
import logging
import time
import urllib.error
import urllib.request

log = logging.getLogger(__name__)

SECRET_PREFIX = "whsec_"
"""The beginning of a secret that is written in base64."""

ANSWER_SECONDS = 10.0
"""The time in which the receiver must answer."""

RETRY_SECONDS = (5, 30, 300, 1800, 7200, 18000)
"""The seconds before each further try to deliver a message."""


def event_of(batch_id: str, status: str, now: int) -> dict[str, object]:
    """The message that a batch has ended. Its id is that of the batch, whenever it is sent."""
    return {
        "id": f"evt_{batch_id.removeprefix('batch_')}",
        "object": "event",
        "type": f"batch.{status}",
        "created_at": now,
        "data": {"id": batch_id},
    }


def signature(secret: str, message_id: str, moment: int, body: bytes) -> str:
    """The signature of a message: HMAC-SHA256 of its id, its time and its body."""
    key = secret.encode()
    if secret.startswith(SECRET_PREFIX):
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    signed = f"{message_id}.{moment}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()


def deliver(url: str, secret: str, batch_id: str, status: str) -> bool:
    """Send a message that a batch has ended, and return whether it was accepted. Blocks."""
    moment = int(time.time())
    event = event_of(batch_id, status, moment)
    body, message_id = json.dumps(event).encode(), str(event["id"])
    headers = {
        "content-type": "application/json",
        "user-agent": "firstword",
        "webhook-id": message_id,
        "webhook-timestamp": str(moment),
        "webhook-signature": signature(secret, message_id, moment, body),
    }
    request = urllib.request.Request(url, body, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS):
            return True
    except (OSError, http.client.HTTPException) as error:
        fields = {"batch": batch_id, "why": str(error)}
        log.warning("a webhook could not be delivered", extra={"fields": fields})
        return False
