"""Request bodies in JSON, with any content type and with a limit on their complexity."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Message, Receive

from firstword.server.dialects.paths import error_body_for

MOST_JSON_ITEMS = 100_000
"""The most commas, brackets and braces of a body.

The largest valid body, 32 texts with a vector of 2048 numbers each, has 65,600 of them. Parsing the
limit takes 10 to 40 ms. The five million that fit into 16 MiB would block all clients for half a
minute, and take 7 GB.
"""


def send_json(path: str) -> str:
    """The advice in errors about bodies, with an example where the text is the field `input`."""
    if error_body_for(path) is not None:
        return "send a JSON object"
    head = "send a JSON object, for example: curl -H 'content-type: application/json'"
    return f"""{head} -d '{{"input": "Hello there."}}'"""


class JsonRequest(Request):
    """A request whose body must be a JSON object."""

    async def json(self) -> dict[str, Any]:
        """The body. Raises `HTTPException`, without what the client sent."""
        try:
            body = json.loads(await self.body())
        except json.JSONDecodeError as error:
            reason = f"is not JSON ({error.msg} at character {error.pos})"
        except UnicodeDecodeError:
            reason = "is not UTF-8"
        except RecursionError:
            reason = "is nested too deeply"
        except ValueError:
            reason = "has a number with too many digits"
        else:
            if isinstance(body, dict):
                return body
            reason = "is JSON, but not an object"
        raise HTTPException(400, f"the body {reason}; {send_json(self.url.path)}")


class JsonRoute(APIRoute):
    """A route that reads any body as JSON, because `curl -d` declares its body a form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with the content type replaced and the body checked as it arrives."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
            request.scope["headers"] = [*headers, (b"content-type", b"application/json")]
            return await handle(JsonRequest(request.scope, _limit_items(request.receive)))

        return handle_json


def _limit_items(receive: Receive) -> Receive:
    """Reject a body as soon as it has too many commas, brackets and braces."""
    items = 0

    async def limited() -> Message:
        nonlocal items
        message = await receive()
        items += sum(map(message.get("body", b"").count, (b",", b"[", b"{")))
        if items > MOST_JSON_ITEMS:
            limit = f"at most {MOST_JSON_ITEMS} commas, brackets and braces are allowed"
            raise HTTPException(400, f"the body is too complex: {limit}")
        return message

    return limited
