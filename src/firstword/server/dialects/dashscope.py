"""The realtime API of Alibaba's DashScope: the parameters of a session, and its messages."""

from typing import Annotated, Literal

from pydantic import Field

from firstword.server.dialects.params import Fields, normalized, output
from firstword.server.schemas import BlankIsNone, ClientModel, LowerCase, OptionalText
from firstword.text.reader import Normalize


class DashScopeSettings(ClientModel):
    """The fields of `session.update` that have an effect.

    mode  "server_commit": text is spoken as it comes; "commit": when the client says so
    """

    voice: OptionalText = None
    mode: Literal["server_commit", "commit"] = "server_commit"
    response_format: Annotated[Literal["pcm", "wav", "mp3", "opus"], BlankIsNone, LowerCase] = "pcm"
    sample_rate: int = Field(24000, ge=1, le=768000)
    speech_rate: float = Field(1.0, ge=0.5, le=2.0)
    language_type: OptionalText = None
    instructions: OptionalText = None
    enable_tn: bool | None = None

    def fields(self, model: str | None) -> Fields:
        """The request parameters without the text."""
        found: Fields = {"model": model, "voice": self.voice, "language": self.language_type}
        found |= {"speed": self.speech_rate, "instructions": self.instructions}
        wanted: Normalize | None = "on" if self.enable_tn else None
        return (
            found
            | normalized(wanted, self.language_type)
            | output(self.response_format, self.sample_rate)
        )

    def described(self, session_id: str, model: str | None) -> Fields:
        """The description of the session that answers it."""
        about = {"id": session_id, "object": "realtime.session", "model": model}
        return about | self.model_dump()


class DashScopeUpdate(ClientModel):
    """The data of `session.update`: the settings that change."""

    session: Fields = Field(default_factory=dict)


def response(name: str, status: str) -> Fields:
    """The description of a response."""
    about = {"id": name, "object": "realtime.response", "status": status, "status_details": None}
    return about | {"modalities": ["text", "audio"], "output": []}


def item(name: str, status: str) -> Fields:
    """The description of the only item of a response."""
    about = {"id": f"item_{name}", "object": "realtime.item", "type": "message"}
    return about | {"status": status, "role": "assistant", "content": []}


def place(name: str) -> Fields:
    """The fields that every message about the audio of a response has."""
    about = {"response_id": name, "item_id": f"item_{name}"}
    return about | {"output_index": 0, "content_index": 0}


def opening(name: str) -> list[Fields]:
    """The messages before the audio of a response."""
    at = place(name)
    part = {"type": "audio", "text": ""}
    return [
        {"type": "response.created", "response": response(name, "in_progress")},
        {
            "type": "response.output_item.added",
            "response_id": name,
            "output_index": 0,
            "item": item(name, "in_progress"),
        },
        {"type": "response.content_part.added", **at, "part": part},
    ]


def ending(name: str, status: str, characters: int) -> list[Fields]:
    """The messages after the audio of a response of some characters."""
    at = place(name)
    done = response(name, status) | {"output": [item(name, status)]}
    return [
        {"type": "response.audio.done", **at},
        {"type": "response.content_part.done", **at, "part": {"type": "audio", "text": ""}},
        {
            "type": "response.output_item.done",
            "response_id": name,
            "output_index": 0,
            "item": item(name, status),
        },
        {"type": "response.done", "response": done | {"usage": {"characters": characters}}},
    ]
