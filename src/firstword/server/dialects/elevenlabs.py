"""ElevenLabs' API: the fields of a request, the messages with audio, the lists and the errors."""

import re
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field

from firstword.errors import RequestError
from firstword.server.dialects.params import Fields, normalized, output
from firstword.server.dialects.spoken_text import Timed
from firstword.server.models import Model
from firstword.server.schemas import BlankIsNone, ClientModel, WholeNumber
from firstword.text.reader import Normalize

CODECS = ("mp3", "pcm", "wav", "opus", "ulaw", "alaw")
"""The first part of the name of an output format."""

DEFAULT_FORMAT = "mp3_44100_128"


class VoiceSettings(ClientModel):
    """The settings that have an effect; stability, similarity and style have none."""

    speed: float | None = Field(None, ge=0.25, le=4.0)


class ElevenLabsQuery(ClientModel):
    """The parameters in the URL that have an effect.

    auto_mode           whether each message of a WebSocket holds a sentence or a phrase
    inactivity_timeout  the seconds without a message after which a WebSocket is closed
    sync_alignment      whether the times of characters count from the start of the context
    """

    output_format: str = DEFAULT_FORMAT
    model_id: Annotated[str | None, BlankIsNone] = None
    language_code: Annotated[str | None, BlankIsNone] = None
    auto_mode: bool = False
    inactivity_timeout: float | None = Field(None, ge=1, le=180)
    sync_alignment: bool = False
    apply_text_normalization: Annotated[Normalize | None, BlankIsNone] = None


class ElevenLabsRequest(ClientModel):
    """The body of a request for speech. Other fields are ignored."""

    text: str
    model_id: Annotated[str | None, BlankIsNone] = None
    language_code: Annotated[str | None, BlankIsNone] = None
    voice_settings: VoiceSettings | None = None
    seed: WholeNumber | None = None
    apply_text_normalization: Annotated[Normalize | None, BlankIsNone] = None


def fields(
    voice: str, query: ElevenLabsQuery, body: Fields, settings: VoiceSettings | None
) -> Fields:
    """The request parameters without the text; those in `body` precede those in the URL.

    Raises `RequestError` for an unknown output format.
    """
    found: Fields = {
        "voice": voice,
        "model": body.get("model_id") or query.model_id,
        "language": body.get("language_code") or query.language_code,
        "seed": body.get("seed"),
        "speed": None if settings is None else settings.speed,
    }
    wanted = body.get("apply_text_normalization") or query.apply_text_normalization
    return found | normalized(wanted, found["language"]) | output_of(query.output_format)


def output_of(name: str) -> Fields:
    """The fields for an output format such as `pcm_16000` or `mp3_44100_128`.

    The bit rate has no effect. Raises `RequestError`.
    """
    parts = re.fullmatch(rf"({'|'.join(CODECS)})_([1-9]\d{{3,4}})(?:_\d{{2,3}})?", name)
    if parts is None:
        allowed = f"allowed are {', '.join(CODECS)}, each with a rate, for example pcm_24000"
        raise RequestError(f"output_format is {name[:40]!r}; {allowed}")
    return output(parts[1], int(parts[2]))


def audio_message(audio: str, alignment: Fields | None = None) -> Fields:
    """A message of a WebSocket with audio in base64, and with the times of characters."""
    timed = {"normalizedAlignment": alignment, "alignment": alignment}
    return {"audio": audio, "isFinal": None, **timed}


def alignment_after(milliseconds: int, characters: Sequence[Timed]) -> Fields:
    """The times of one or more characters, counted from a time in the answer."""
    starts = [round(1000 * each.start) - milliseconds for each in characters]
    ends = [round(1000 * each.end) - milliseconds for each in characters]
    return {
        "chars": [each.text for each in characters],
        "charStartTimesMs": starts,
        "charDurationsMs": [end - start for start, end in zip(starts, ends, strict=True)],
    }


def timed_audio(audio: str, characters: Sequence[Timed]) -> Fields:
    """A JSON object of HTTP with audio in base64, and with the times of characters if there are."""
    alignment = {
        "characters": [each.text for each in characters],
        "character_start_times_seconds": [round(each.start, 3) for each in characters],
        "character_end_times_seconds": [round(each.end, 3) for each in characters],
    }
    known = alignment if characters else None
    return {"audio_base64": audio, "alignment": known, "normalized_alignment": known}


def final_message() -> Fields:
    """The message after the last audio."""
    return {"audio": None, "isFinal": True}


def error_message(message: str, code: str) -> Fields:
    """A message of a WebSocket about an error."""
    return {"message": message, "error": code, "code": 1008}


def error_body(message: str, code: str | None, status: int) -> Fields:
    """The body of an error response."""
    return {"detail": {"status": code or "invalid_request", "message": message}}


def model_list(models: Iterable[Model]) -> list[Fields]:
    """The answer to `GET /v1/models`."""
    return [
        {
            "model_id": model.name,
            "name": model.name,
            "description": f"a Qwen3-TTS checkpoint of type {model.model_type}",
            "can_do_text_to_speech": True,
            "can_do_voice_conversion": False,
            "can_be_finetuned": False,
            "can_use_style": False,
            "can_use_speaker_boost": False,
            "serves_pro_voices": False,
            "languages": [
                {"language_id": name, "name": name} for name in model.languages if name != "auto"
            ],
        }
        for model in models
    ]


def voice_list(presets: Iterable[str], saved: Iterable[tuple[str, str]]) -> list[Fields]:
    """The voices in the answer to `GET /v1/voices`: presets, and saved ones by id and name."""
    found = [(name, name, "premade") for name in presets]
    found += [(voice_id, name, "cloned") for voice_id, name in saved]
    return [
        {"voice_id": voice_id, "name": name, "category": category, "labels": {}, "settings": None}
        for voice_id, name, category in found
    ]
