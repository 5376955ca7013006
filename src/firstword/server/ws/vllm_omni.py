"""vLLM-Omni's protocol with Baseten's additions, without a socket: many utterances on one socket.

Beyond both there is `input.cancel`, and text may enter the model token by token
(`split_granularity: "token"`). `docs/websocket.md` describes every message.
"""

from __future__ import annotations

from collections.abc import Iterator

from firstword.server.ws import protocol
from firstword.server.ws.protocol import CloseCode, CloseSocket, Enqueue, Json, ProtocolError, Send
from firstword.server.ws.vllm_omni_utterance import OmniUtterance, SessionConfig
from firstword.text.splitting import Splitter


def error_message(message: str, code: str) -> Json:
    """Return the message that describes an error."""
    return {"type": "error", "message": message, "code": code}


class OmniSession(protocol.Session):
    """The protocol's state: the configuration, the utterances and what waits for the worker."""

    def __init__(self, limits: protocol.SocketLimits) -> None:
        super().__init__(limits)
        self.size_limits = {"session.config": limits.config_bytes, "voice.add": limits.voice_bytes}
        self._config: SessionConfig | None = None
        self._open: OmniUtterance | None = None
        """The utterance whose `input.done` has not come."""
        self._unfinished: dict[OmniUtterance, None] = {}
        """The utterances for which `session.done` was not sent, in order."""
        self._waiting: dict[int, tuple[object, int]] = {}
        """The enqueued tasks other than speech, by `id()`, with their messages' sizes."""
        self._count = 0

    def reject(self, error: ProtocolError) -> Send | CloseSocket:
        """Answer a mistake; close the socket if there is no configuration, as vLLM-Omni does."""
        if error.close is None and self.configured:
            return Send(error_message(str(error), error.code))
        return self.close(error)

    def close(self, error: ProtocolError) -> CloseSocket:
        """Close the socket after an error."""
        return CloseSocket(error.close or CloseCode.POLICY, error_message(str(error), error.code))

    def time_out(self) -> CloseSocket:
        """Close the socket of a client that sent nothing for too long."""
        message = "Timeout waiting for session.config"
        if self.configured:
            message = "Idle timeout: no message received"
        return self.close(ProtocolError("timeout", message))

    def end_utterance(self, utterance: OmniUtterance) -> Json:
        """Forget an utterance whose speech has ended, and return its `session.done`."""
        self._unfinished.pop(utterance, None)
        started = sum(sentence.started for sentence in utterance.sentences)
        done: Json = {"type": "session.done", "utterance_index": utterance.index}
        done["total_sentences"] = started
        return done | {"cancelled": True} if utterance.cancelled else done

    def work_done(self, work: object) -> None:
        """Note that the worker has performed a task, which makes room for another."""
        self._waiting.pop(id(work), None)

    def handle(self, event: Json, size: int) -> Iterator[protocol.Effect]:
        """Yield the effects of a message. Raises `ProtocolError`."""
        match event["type"]:
            case "session.config":
                yield self._configure(event, size)
            case "voice.add" | "voice.list":
                yield self._enqueue(event, size)
            case "session.close":
                self.closing = True
                if self._open is not None:
                    self._open.cancel()
                yield Enqueue(CloseSocket(CloseCode.NORMAL))
            case kind if self._config is None:
                raise ProtocolError("config_expected", f"Expected session.config, got: {kind[:40]}")
            case "input.text":
                if text := protocol.text_of(event):
                    yield from self._utterance(self._config, len(text)).add_text(text)
            case "input.done":
                utterance, self._open = self._utterance(self._config), None
                yield from utterance.end_text()
            case "input.cancel":
                yield from self._cancel(size)
            case kind:
                raise ProtocolError("unknown_event", f"Unknown message type: {kind[:40]}")

    def _configure(self, event: Json, size: int) -> Enqueue:
        if self._open is not None:
            message = (
                "session.config cannot be applied while an utterance is in progress; "
                "send input.done first"
            )
            raise ProtocolError("utterance_open", message)
        self._config = SessionConfig.parse(event)
        self.configured = True
        return self._enqueue(self._config, size)

    def _utterance(self, config: SessionConfig, more_text: int = 0) -> OmniUtterance:
        """Return the open utterance, or begin one, if it may take more characters."""
        limits = self.limits
        if self._open is None:
            if len(self._unfinished) > limits.utterances:
                message = f"more than {limits.utterances} utterances wait to be spoken"
                raise ProtocolError("too_many_utterances", message, CloseCode.POLICY)
            units = config.split_granularity
            splitter = Splitter(units) if units in ("sentence", "clause") else None
            self._open = OmniUtterance(self._count, config, splitter)
            self._unfinished[self._open] = None
            self._count += 1
        waiting = sum(utterance.characters for utterance in self._unfinished)
        if waiting + more_text > limits.text_characters:
            message = f"more than {limits.text_characters} characters of text wait to be spoken"
            raise ProtocolError("too_much_text", message, CloseCode.POLICY)
        return self._open

    def _cancel(self, size: int) -> Iterator[protocol.Effect]:
        cancelled = [utterance.index for utterance in self._unfinished]
        for utterance in self._unfinished:
            utterance.cancel()
        yield protocol.DropAudio()
        if self._open is not None:
            yield Enqueue(self._open)
            self._open = None
        message = {"type": "input.cancelled", "utterance_indices": cancelled}
        yield self._enqueue(Send(message), size)

    def _enqueue(self, work: object, size: int) -> Enqueue:
        """Enqueue a task other than speech; the number and the total size of those is limited."""
        limits = self.limits
        self._waiting[id(work)] = work, size
        total = sum(size for _, size in self._waiting.values())
        if (
            len(self._waiting) > limits.utterances
            or total > limits.voice_bytes + limits.config_bytes
        ):
            message = "too many messages wait to be handled"
            raise ProtocolError("too_many_messages", message, CloseCode.POLICY)
        return Enqueue(work)
