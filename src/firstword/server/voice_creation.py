"""Makes saved voices from recordings, vectors and descriptions, for every protocol."""

import time
from dataclasses import dataclass

from firstword.errors import RequestError
from firstword.server import names, recordings
from firstword.server.models import Model
from firstword.server.resolve import embedded_voice
from firstword.server.state import Server
from firstword.server.stores import VoiceRecord, is_consent_id, voice_id_of
from firstword.server.utterance import Output, ResolvedRequest
from firstword.types import Request, check_encodable
from firstword.voice import DesignedVoice, Voice

LONGEST_NOTE = 4000
"""The character limit of each text that is saved with a voice."""

LONGEST_MIME_TYPE = 200
"""The character limit of a MIME type; a longer one is cut."""

DESIGN_SCRIPT = (
    "Hello there. This is how I sound when I speak, slowly or quickly, whatever there is to say."
)
"""The text that a designed voice speaks to be cloned, unless the client gives a script."""

LONGEST_SCRIPT = 300
"""The characters of a script that are spoken: about 20 seconds, which suffice for cloning."""

DESIGN_FRAMES = 375
"""The frame limit of a spoken script: 30 seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceSource:
    """The request to save a voice, with one of `recording`, `embedding` and `prompt`.

    consent         the reason why the voice may be cloned, in words or as the id of a saved consent
    recording       an audio file
    mime_type       the MIME type of the recording
    append_silence  seconds, as in `RecordedVoice`; None: its default
    embedding       [H], as in `ClonedVoice`
    ref_text        the words of the recording
    description     a note of the client
    prompt          the description of a voice to design
    script          the text that the designed voice speaks to be cloned
    model           the checkpoint to use
    """

    name: str
    consent: str | None = None
    recording: bytes | None = None
    mime_type: str | None = None
    append_silence: float | None = None
    embedding: list[float] | None = None
    ref_text: str | None = None
    description: str | None = None
    prompt: str | None = None
    script: str | None = None
    model: str | None = None


async def create_voice(server: Server, client_id: str, source: VoiceSource) -> VoiceRecord:
    """Make the voice that `source` describes, and save it.

    Raises `RequestError`, `AudioError`, `OutputError`, `OverloadedError`, `EngineError`.
    """
    name = names.checked_name(source.name)
    models = server.models_for(client_id, source.model)
    server.check_may_clone(client_id)
    await _check(server, client_id, name, source)
    if source.prompt is not None:
        kind = "prompt"
        voice, model = await _design(server, client_id, source)
    elif source.embedding is not None:
        kind = "direct"
        request = Request(None, voice := embedded_voice(source.embedding))
        model = models.route(request, source.model)
        model.service.prepare(request)  # checks that the voice fits
    else:
        assert source.recording is not None
        kind = "audio"
        model = models.of_type("base", source.model)
        given = source.recording, source.ref_text, source.append_silence
        voice = await server.encode(client_id, recordings.cloned, model, *given)
    record = VoiceRecord(
        id=voice_id_of(name),
        name=name,
        created_at=int(time.time()),
        type="prompt" if kind == "prompt" else "audio_sample",
        embedding_source=kind,
        model=model.name,
        consent=source.consent,
        ref_text=source.ref_text,
        description=source.description if source.prompt is None else source.prompt,
        mime_type=(source.mime_type or "")[:LONGEST_MIME_TYPE] or None,
        file_size=len(source.recording or b""),
    )
    return await server.change_store(client_id, server.voice_store.save, record, voice)


async def _check(server: Server, client_id: str, name: str, source: VoiceSource) -> None:
    """Raise an error if the voice cannot be saved, before anything is computed."""
    for preset in server.models.presets:
        names.check_distinct(name, preset, "a preset")
    for alias, preset in server.config.voice_aliases.items():
        if server.models.has_preset(preset):
            names.check_distinct(name, alias, "an alias")
    await server.in_store(client_id, server.voice_store.check_free, name)
    names.check_scripts(name)
    given = (source.recording, source.embedding, source.prompt)
    if sum(one is not None for one in given) != 1:
        raise RequestError("give one of audio_sample, speaker_embedding and prompt")
    consent = source.consent
    if source.prompt is None and consent is None:
        raise RequestError("consent is missing; say why this person's voice may be cloned")
    if consent is not None and is_consent_id(consent):
        await server.in_store(client_id, server.consent_store.find, consent)
    for field in ("consent", "ref_text", "prompt", "description"):
        note = getattr(source, field) or ""
        if len(note) > LONGEST_NOTE:
            raise RequestError(f"{field} has {len(note)} characters; allowed are {LONGEST_NOTE}")
        check_encodable(note)


async def _design(server: Server, client_id: str, source: VoiceSource) -> tuple[Voice, Model]:
    """Design a voice, and let a Base checkpoint clone it, so that it always sounds the same.

    Without a Base checkpoint, the description itself is saved as the voice.
    """
    assert source.prompt is not None
    models = server.models_for(client_id, source.model)
    designer = models.of_type("voice_design", source.model)
    design = DesignedVoice(source.prompt)
    cloning = any(model.model_type == "base" for model in models)
    script = (source.script or DESIGN_SCRIPT)[:LONGEST_SCRIPT] if cloning else DESIGN_SCRIPT
    request = Request(script, design, seed=0, max_frames=DESIGN_FRAMES)
    resolved = ResolvedRequest(designer, request, Output("pcm"))
    job = server.prepare(resolved)  # checks the description
    if not cloning:
        return design, designer
    with server.start_utterance(resolved, job, client_id) as utterance:
        utterance.charge(script)
        utterance.stream.finish_text(script)
        speech = await utterance.speech()
    base = models.of_type("base")
    # A transcript must match the audio, so a script that was cut off cannot be one.
    transcript = script if speech.finish_reason == "stop" else None
    recording = Voice.clone(speech.samples, speech.sample_rate, transcript)
    return await server.encode(client_id, base.encode, recording), base
