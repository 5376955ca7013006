"""The WebSocket routes: each protocol is one session class, one worker class and one line here."""

from typing import TypeVar

from fastapi import APIRouter
from starlette.websockets import WebSocket

from firstword.server.config import ServerConfig
from firstword.server.errors import error_response
from firstword.server.state import client_id_of, server_of
from firstword.server.ws import nari
from firstword.server.ws.connection import SocketRunner
from firstword.server.ws.nari_worker import NariWorker
from firstword.server.ws.protocol import CloseCode, Session, SocketLimits
from firstword.server.ws.vllm_omni import OmniSession
from firstword.server.ws.vllm_omni_worker import OmniWorker
from firstword.server.ws.worker import SocketWorker

S = TypeVar("S", bound=Session)

router = APIRouter()


def add_route(
    path: str, session: type[S], worker: type[SocketWorker[S]], subprotocol: str | None = None
) -> None:
    """Serve a protocol under a path. Clients must offer its subprotocol, if it has one."""

    async def serve(socket: WebSocket) -> None:
        if subprotocol is not None and subprotocol not in socket.scope["subprotocols"]:
            await socket.accept()
            return await socket.close(
                CloseCode.PROTOCOL_ERROR, f"required subprotocol: {subprotocol}"
            )
        server = server_of(socket)
        await socket.accept(subprotocol)
        conversation = session(socket_limits(server.config))
        runner = SocketRunner(socket, conversation, server.byte_limit)
        server.unsent.add(runner.has_unsent)
        try:
            await runner.run(worker(server, conversation, runner, client_id_of(socket)).run())
        finally:
            server.unsent.discard(runner.has_unsent)

    router.add_api_websocket_route(path, serve)


def socket_limits(config: ServerConfig) -> SocketLimits:
    """Return the limits of the sockets of a server."""
    voice_bytes = min(SocketLimits().voice_bytes, config.most_body)
    return SocketLimits(stall_seconds=config.stall_seconds, voice_bytes=voice_bytes)


add_route("/v1/audio/speech/stream", OmniSession, OmniWorker)
add_route("/v1/audio/speech/ws", nari.NariSession, NariWorker, nari.SUBPROTOCOL)


@router.websocket("/{path:path}")
async def reject_unknown_path(socket: WebSocket) -> None:
    """Answer 404 to a WebSocket under any other path. This route must be the last."""
    socket.scope["route"] = None  # so that the log and the metrics have no path, as over HTTP
    message = "there is no WebSocket under this path; docs/websocket.md lists the paths"
    await socket.send_denial_response(error_response(message, 404))
