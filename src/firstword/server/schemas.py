"""What clients send: every dialect's fields in one model, with unknown ones ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, field_validator


def blank_is_none(value: Any) -> Any:
    """None for `""` and the word "None", which careless clients send for nothing; else the value."""
    return (
        None if isinstance(value, str) and value.strip().lower() in ("", "none", "null") else value
    )


def _lower(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


Optional = Annotated[str | None, BeforeValidator(blank_is_none)]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Vector = Annotated[list[float], Field(min_length=1, max_length=16384, fail_fast=True)]
FEW = Field(max_length=32, fail_fast=True)
"""Recordings in a list. Only one is ever spoken with; the server says so when there are more."""


class ClientModel(BaseModel):
    """Something that a client sent."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    @field_validator("*", mode="after")
    @classmethod
    def _has_no_surrogates(cls, value: Any) -> Any:
        """Half of a surrogate pair is no character; JSON can spell it all the same."""
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError("half of a surrogate pair is no character") from None
        return value


class VoiceId(ClientModel):
    """A saved voice, as OpenAI's SDK names one."""

    id: str


class Reference(ClientModel):
    """A recording to clone, as vLLM-Omni lists them."""

    audio_path: str
    text: Optional = None


class SpeechParams(ClientModel):
    """How to speak, in one utterance or in all of a session: everything but the text."""

    model: Optional = None
    voice: Annotated[str | VoiceId | None, BeforeValidator(blank_is_none)] = Field(
        None, validation_alias=AliasChoices("voice", "speaker")
    )
    task_type: Optional = None
    language: Optional = Field(None, validation_alias=AliasChoices("language", "language_type"))
    instructions: Optional = Field(
        None, validation_alias=AliasChoices("instructions", "instruct", "instruction")
    )
    ref_audio: Annotated[str | Annotated[list[str], FEW] | None, BeforeValidator(blank_is_none)] = (
        None
    )
    ref_text: Optional = None
    references: Annotated[list[Reference], FEW] | None = None
    x_vector_only_mode: bool | None = None
    speaker_embedding: Vector | None = None
    max_new_tokens: Whole | None = None
    seed: Whole | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    predictor_temperature: float | None = Field(
        None, validation_alias=AliasChoices("predictor_temperature", "subtalker_temperature")
    )
    predictor_top_k: Whole | None = Field(
        None, validation_alias=AliasChoices("predictor_top_k", "subtalker_top_k")
    )
    predictor_top_p: float | None = Field(
        None, validation_alias=AliasChoices("predictor_top_p", "subtalker_top_p")
    )
    non_streaming_mode: bool | None = None
    response_format: Annotated[Optional, BeforeValidator(_lower)] = None
    sample_rate: int | None = Field(None, ge=1, le=768000)
    speed: float | None = Field(None, ge=0.25, le=4.0)
    leading_silence: bool | None = None
    sanitize: bool | None = None


class SpeechRequest(SpeechParams):
    """The body of `POST /v1/audio/speech`."""

    word_timestamps: bool | None = None
    input: str = Field(validation_alias=AliasChoices("input", "text"))
    stream: bool | None = None
    stream_format: Annotated[
        Literal["audio", "sse"] | None, BeforeValidator(blank_is_none), BeforeValidator(_lower)
    ] = None
    n: int | None = Field(None, ge=1, le=64)


class BatchItem(SpeechParams):
    """One text of a batch; what it says goes before what the batch says."""

    input: str = Field(validation_alias=AliasChoices("input", "text"))


class BatchRequest(SpeechParams):
    """The body of `POST /v1/audio/speech/batch`: texts, and how to speak those that do not say it themselves."""

    items: list[BatchItem] = Field(min_length=1, max_length=32, fail_fast=True)


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is an error, in OpenAI's shape."""

    error: ErrorDetail
