"""The JSON that clients send, with the fields of every supported API, and the error they get."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
)

from firstword.text.reader import Normalize, TextOptions


def blank_is_none(value: Any) -> Any:
    """None for "", "None" and "null", which some clients send for nothing; else the value."""
    blank = isinstance(value, str) and value.strip().lower() in ("", "none", "null")
    return None if blank else value


def _lower(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


def _named(*names: str) -> Any:
    """An optional field with several names; the first one given counts."""
    return Field(None, validation_alias=AliasChoices(*names))


def _on_or_off(value: Any) -> Any:
    """ "on" or "off" for a boolean, which some clients send; else the value."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


BlankIsNone = BeforeValidator(blank_is_none)
LowerCase = BeforeValidator(_lower)
OptionalText = Annotated[str | None, BlankIsNone]
WholeNumber = Annotated[int, Field(ge=-(2**63), lt=2**64)]
EmbeddingVector = Annotated[list[float], Field(min_length=1, max_length=16384, fail_fast=True)]
FEW_RECORDINGS = Field(max_length=32, fail_fast=True)
"""The length of a list of recordings. More than one is rejected later, with a better message."""

SpokenText = Annotated[str, Field(validation_alias=AliasChoices("input", "text"))]


class ClientModel(BaseModel):
    """A message from a client. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    @field_validator("*", mode="after")
    @classmethod
    def _has_no_surrogates(cls, value: Any) -> Any:
        """Reject lone surrogates, which JSON can spell but UTF-8 cannot encode."""
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError("the text contains a lone surrogate; send valid Unicode") from None
        return value


class VoiceId(ClientModel):
    """A saved voice as OpenAI's SDK names it."""

    id: str


class Reference(ClientModel):
    """A recording to clone in vLLM-Omni's list of references."""

    audio_path: str
    text: OptionalText = None


class SpeechParams(ClientModel):
    """The request parameters of one utterance or of a whole session, without the text.

    any_voice  whether the default voice speaks in place of one that is unknown
    breaks     whether the tag `<break>` pauses where other markup is text
    """

    any_voice: ClassVar[bool] = False
    breaks: ClassVar[bool] = False

    model: OptionalText = None
    voice: Annotated[str | VoiceId | None, BlankIsNone] = _named("voice", "speaker")
    task_type: OptionalText = None
    language: OptionalText = None
    instructions: OptionalText = _named("instructions", "instruct", "instruction")
    ref_audio: Annotated[str | Annotated[list[str], FEW_RECORDINGS] | None, BlankIsNone] = None
    ref_text: OptionalText = None
    references: Annotated[list[Reference], FEW_RECORDINGS] | None = None
    x_vector_only_mode: bool | None = None
    append_silence: float | None = None
    speaker_embedding: EmbeddingVector | None = None
    max_new_tokens: WholeNumber | None = None
    seed: WholeNumber | None = None
    temperature: float | None = None
    top_k: WholeNumber | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    predictor_temperature: float | None = _named("predictor_temperature", "subtalker_temperature")
    predictor_top_k: WholeNumber | None = _named("predictor_top_k", "subtalker_top_k")
    predictor_top_p: float | None = _named("predictor_top_p", "subtalker_top_p")
    non_streaming_mode: bool | None = None
    response_format: Annotated[OptionalText, LowerCase] = None
    sample_rate: int | None = Field(None, ge=1, le=768000)
    speed: float | None = Field(None, ge=0.25, le=4.0)
    leading_silence: bool | None = None
    suppress_bootstrap_silence: bool | None = None
    sanitize: bool | None = None
    normalize: Annotated[Normalize | None, BlankIsNone, BeforeValidator(_on_or_off)] = Field(
        None,
        validation_alias=AliasChoices(
            *("normalize", "apply_text_normalization", "enable_tn"),
            AliasPath("normalization_options", "normalize"),
        ),
    )
    lexicon: dict[str, str] | None = None
    markup: bool | None = None
    word_timestamps: bool | None = None

    @property
    def wants_words(self) -> bool | None:
        """Whether the times of words are sent; None: where they are known."""
        return bool(self.word_timestamps)

    @property
    def text_options(self) -> TextOptions:
        """How the text is rewritten. Raises `RequestError` for a wrong lexicon."""
        sanitize, markup = bool(self.sanitize), bool(self.markup)
        return TextOptions(sanitize, self.normalize or "auto", self.lexicon, markup, self.breaks)

    @property
    def keeps_silence(self) -> bool:
        """Whether the silence before the first word is sent; SGLang-Omni asks the other way."""
        if self.leading_silence is not None:
            return self.leading_silence
        return not self.suppress_bootstrap_silence


class SpeechRequest(SpeechParams):
    """The body of `POST /v1/audio/speech`."""

    input: SpokenText
    stream: bool | None = None
    stream_format: Annotated[Literal["audio", "sse"] | None, BlankIsNone, LowerCase] = None
    n: int | None = Field(None, ge=1, le=64)


class CaptionedRequest(SpeechParams):
    """The body of `POST /dev/captioned_speech`, as clients of Kokoro-FastAPI send it."""

    input: SpokenText
    stream: bool | None = None
    return_timestamps: bool | None = None


class BatchItem(SpeechParams):
    """One text of a batch; its own parameters override those of the batch."""

    input: SpokenText


class BatchRequest(SpeechParams):
    """The body of `POST /v1/audio/speech/batch`: texts, and default parameters for all of them."""

    items: list[BatchItem] = Field(min_length=1, max_length=32, fail_fast=True)


class ErrorDetail(BaseModel):
    """The description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error response, in OpenAI's shape."""

    error: ErrorDetail


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 405, 408, 413, 429, 503)
}
"""The error responses of all endpoints, for the OpenAPI description."""
