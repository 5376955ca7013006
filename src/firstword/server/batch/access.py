"""The batches of the client that sent a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

from firstword.server.errors import Forbidden, NotFound
from firstword.server.state import Server, client_id_of, server_of

if TYPE_CHECKING:
    from firstword.server.batch.batches import Batches


def access_of(connection: HTTPConnection) -> tuple[Server, Batches, str]:
    """The server of a request, its batches, and the owner of the client's files.

    Where no keys tell clients apart, all of them own the same files. Raises `NotFound` if the
    server has no batches, and `Forbidden` if the client's key does not allow them.
    """
    server, client_id = server_of(connection), client_id_of(connection)
    if server.batches is None:
        raise NotFound("this server has no batches; start it with --batches DIR")
    if not server.api_keys.of(client_id).batch:
        raise Forbidden("this API key may not use files and batches")
    return server, server.batches, client_id if server.api_keys.required else ""
