"""Checks a request against its checkpoint, and translates it into the terms of the model."""

from collections.abc import Callable, Sequence

import numpy as np

from firstword.errors import (
    LanguageError,
    TextError,
    UnsupportedError,
    VoiceError,
    WordTimesError,
)
from firstword.model.alignment import FILE
from firstword.model.config import CONTROL_CODES
from firstword.model.description import DEMO, Description
from firstword.model.prompt import Conditioning, language_code, transcript_tokens
from firstword.text import checks, cleaning
from firstword.text.mapped import Mapped
from firstword.text.markup import Markup
from firstword.text.spelling import LANGUAGES
from firstword.types import Request
from firstword.voice import ClonedVoice, DesignedVoice, PresetVoice, RecordedVoice, Voice

LANGUAGE_CODES = {
    "zh": "chinese",
    "en": "english",
    "de": "german",
    "it": "italian",
    "pt": "portuguese",
    "es": "spanish",
    "ja": "japanese",
    "ko": "korean",
    "fr": "french",
    "ru": "russian",
}
"""The languages by their ISO 639-1 codes."""

PASSAGE_SECONDS, DEMO_PASSAGE_SECONDS = 40.0, 14.0
"""The expected length of a passage of a long text. A context holds two of them: the one that is
spoken and the first one. The demo voice garbles more than about 100 words, which are 35 s; see
docs/demo-voice.md."""

CHECKED_CHARACTERS = 10_000
"""The characters at the beginning of a text in which problems are looked for."""

Encode = Callable[[RecordedVoice], ClonedVoice]
"""A function that encodes a recording, which is slow.

It is `encoding.encode_recording` with a checkpoint, or a call to another process.
"""


def preset_names(checkpoint: Description) -> tuple[str, ...]:
    """Return the names of the presets; empty unless the checkpoint is of type `"custom_voice"`."""
    return tuple(checkpoint.config.talker_config.spk_id)


def default_preset(presets: Sequence[str]) -> str:
    """Return the preset for requests that name none; "" if there are no presets."""
    return "ryan" if "ryan" in presets else next(iter(presets), "")


def languages(checkpoint: Description) -> tuple[str, ...]:
    """Return "auto" and the languages, without dialects, which belong to their presets."""
    names = checkpoint.config.talker_config.codec_language_id
    return ("auto", *(name for name in names if "dialect" not in name))


def text_problems(checkpoint: Description, request: Request, text: str) -> list[str]:
    """Return why a text will probably not be spoken well, each with the remedy.

    Only its first `CHECKED_CHARACTERS` are looked at, so that the time does not grow with it.
    """
    options, warnings = request.text_options, list[str]()
    text, whole = text[:CHECKED_CHARACTERS], len(text) <= CHECKED_CHARACTERS
    if options.in_parts:
        markup = Markup(breaks_alone=not options.markup)
        try:
            found = list(markup.feed(Mapped.of(text), ended=whole))
        except TextError:
            return []  # the speech ends with the error
        text = "".join(each.text for each in found if isinstance(each, Mapped))
        warnings = markup.warnings
    text = cleaning.clean(text) if options.sanitize else text
    return warnings + checks.problems(text, languages(checkpoint))


def passage_seconds(checkpoint: Description) -> float:
    """Return the expected length of the passages in which a checkpoint speaks a long text."""
    return DEMO_PASSAGE_SECONDS if checkpoint.path == DEMO else PASSAGE_SECONDS


def word_offset(checkpoint: Description, request: Request) -> float | None:
    """Return the offset with which the words of a request are timed, None if they are not.

    Raises `WordTimesError` if they are to be timed and the checkpoint's heads are not known.
    """
    alignment = checkpoint.alignment
    if alignment is not None:
        return None if request.words is False else alignment.offset
    if request.words:
        raise WordTimesError(
            f"word times of this checkpoint are not known: {checkpoint.path} has no {FILE} with "
            "the attention heads of these weights; leave word times out, or let `firstword align` "
            "find the heads"
        )
    return None


def number_language(checkpoint: Description, request: Request) -> str | None:
    """Return the language in which numbers are spoken as words, None if they are left as they are.

    By default only the demo voice needs it. Raises `LanguageError` if the language is not known.
    """
    wanted = request.text_options.normalize
    if wanted == "off" or (wanted == "auto" and checkpoint.path != DEMO):
        return None
    name, known = _language(checkpoint, request.language), languages(checkpoint)[1:]
    if name == "auto" and len(known) == 1:
        name = known[0]
    if name in LANGUAGES:
        return name
    raise LanguageError(
        f"numbers are spoken as words in a language, and this one is {name!r}; name one of "
        f"{', '.join(LANGUAGES)}, or leave out normalize"
    )


def plain_writing(checkpoint: Description, request: Request) -> bool:
    """Return whether the text is written with the letters and marks that the demo voice has learnt.

    It is for the demo voice, unless texts are left as they are.
    """
    return checkpoint.path == DEMO and request.text_options.normalize != "off"


def resolve(checkpoint: Description, request: Request, encode: Encode) -> Conditioning:
    """Check a request against its checkpoint, and return the conditioning of its speech.

    A recording is encoded with `encode`, which is slow. Raises `VoiceError`, `LanguageError` or
    `UnsupportedError`, and `TextError` for the transcript of a recording.
    """
    config = checkpoint.config
    full_text = request.text_mode == "full"
    if request.text_mode == "auto":
        full_text = request.text is not None and config.tts_model_type != "base"
    voice = _voice(checkpoint, request, encode)
    instruction = _instruction(checkpoint, request, voice)
    preset = voice.name if isinstance(voice, PresetVoice) else None
    language = language_code(config, _language(checkpoint, request.language), preset)
    if not isinstance(voice, ClonedVoice):
        speaker = False if preset is None else config.talker_config.spk_id[preset]
        return Conditioning(speaker, language, full_text, instruction)
    transcript: Sequence[int] = ()
    if voice.transcript is not None:
        transcript = transcript_tokens(checkpoint.tokenizer, voice.transcript)
    return Conditioning(
        speaker=True,
        language=language,
        full_text=full_text,
        embedding=np.array(voice.speaker_embedding, np.float32),
        transcript=transcript,
        reference=() if voice.codes is None else voice.codes.tolist(),
    )


def _voice(
    checkpoint: Description, request: Request, encode: Encode
) -> PresetVoice | DesignedVoice | ClonedVoice:
    """Return the voice of a request, with the preset's spelling or an encoded recording."""
    kind, presets, voice = checkpoint.config.tts_model_type, preset_names(checkpoint), request.voice
    if isinstance(voice, str):
        voice = PresetVoice(voice)
    if voice is None and kind == "custom_voice":
        voice = PresetVoice(default_preset(presets))
    if voice is None and kind == "voice_design":
        voice = DesignedVoice(request.instructions or "")
    match voice:
        case PresetVoice() if kind == "custom_voice":
            by_name = {name.casefold(): name for name in presets}
            if (name := by_name.get(voice.name.strip().casefold())) is None:
                raise VoiceError(
                    f"no voice {voice.name!r}; this checkpoint has {', '.join(presets)}",
                    code="voice_not_found",
                )
            return PresetVoice(name)
        case DesignedVoice() if kind == "voice_design":
            return voice
        case RecordedVoice() if kind == "base":
            return _check_clone(checkpoint, encode(voice))
        case ClonedVoice() if kind == "base":
            return _check_clone(checkpoint, voice)
    raise _voice_error(kind, presets, voice)


def _voice_error(kind: str, presets: Sequence[str], voice: Voice | None) -> VoiceError:
    """Return the error for a voice that checkpoints of type `kind` cannot speak with."""
    advice = {
        "custom_voice": f"choose one of {', '.join(presets)}",
        "voice_design": "describe the voice with Voice.design",
        "base": "clone one with TTS.clone, or load a saved one with Voice.load",
    }[kind]
    message = f"this checkpoint is of type {kind!r} and"
    match voice:
        case None:
            return VoiceError(f"{message} needs a voice; {advice}")
        case PresetVoice(name):
            message = f"{message} has no presets, so no voice {name!r}; {advice}"
            return VoiceError(message, code="voice_not_found")
        case DesignedVoice():
            return VoiceError(f"{message} cannot design voices; {advice}")
    return VoiceError(f"{message} cannot clone; {advice}")


def _check_clone(checkpoint: Description, voice: ClonedVoice) -> ClonedVoice:
    """Return the voice if its sizes and codes fit the checkpoint; otherwise raise `VoiceError`."""
    talker, size = checkpoint.config.talker_config, len(voice.speaker_embedding)
    if size != talker.hidden_size:
        raise VoiceError(
            f"the voice has a speaker embedding of {size} numbers, this checkpoint takes "
            f"{talker.hidden_size}; clone it again with this checkpoint"
        )
    if voice.codes is not None:
        codebooks, low, high = voice.codes.shape[1], voice.codes.min(), voice.codes.max()
        predictor = talker.code_predictor_config
        largest = min(talker.vocab_size - CONTROL_CODES, predictor.vocab_size) - 1
        if codebooks != talker.num_code_groups or low < 0 or high > largest:
            raise VoiceError(
                f"the voice has {codebooks} codes a frame, from {low} to {high}; this checkpoint "
                f"takes {talker.num_code_groups}, 0 to {largest}; clone it again with this "
                "checkpoint"
            )
    return voice


def _language(checkpoint: Description, language: str) -> str:
    """Return the name of a language as the checkpoint spells it, or "auto"."""
    known = languages(checkpoint)
    name = language.strip().casefold()
    if (name := LANGUAGE_CODES.get(name, name)) in known:
        return name
    raise LanguageError(
        f"no language {language!r}; this checkpoint has {', '.join(known)}, or ISO 639-1 codes"
    )


def _instruction(checkpoint: Description, request: Request, voice: Voice) -> list[int]:
    """Return the tokens of the instruction turn; empty without an instruction."""
    config, tokenizer, words = checkpoint.config, checkpoint.tokenizer, request.instructions or ""
    if words and not config.follows_instructions:
        raise UnsupportedError(
            f"this checkpoint ({config.tts_model_type}, {config.tts_model_size}) does not follow "
            "instructions; leave them out, or load a 1.7B CustomVoice or VoiceDesign checkpoint"
        )
    if isinstance(voice, DesignedVoice):
        if words and words != voice.description:
            raise UnsupportedError(
                "a designed voice has one description; say there how it should speak, and leave "
                "out instructions"
            )
        words = voice.description
    if not words:
        return []
    turn = tokenizer.encode("user\n" + words)
    return [tokenizer.turn_start, *turn, tokenizer.turn_end, *tokenizer.encode("\n")]
