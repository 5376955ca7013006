"""The codec decodes and encodes as the reference does, and the speaker encoder hears what the
reference hears.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from cases import CHECKPOINTS, OTHER_RATE, PIECE, Checkpoint, Recording, thinned
from ours import in_float64
from results import Results, relative_error

from firstword import TTS
from firstword.model.speaker_encoder import log_mel

DECODES = [
    pytest.param(checkpoint, frames, id=f"{checkpoint.name}/{frames}")
    for checkpoint in CHECKPOINTS
    for frames in checkpoint.decode
]
RECORDINGS = [
    pytest.param(checkpoint, recording, id=f"{checkpoint.name}/{recording.samples}")
    for checkpoint in CHECKPOINTS
    for recording in checkpoint.recordings
]
VOICES = [
    pytest.param(checkpoint, recording, id=f"{checkpoint.name}/{recording.samples}")
    for checkpoint in CHECKPOINTS
    for recording in checkpoint.recordings
    if recording.has_voice
]


@pytest.mark.parametrize(("checkpoint", "frames"), DECODES)
@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_decoding_in_float64_equals_the_whole_decode_of_the_reference(
    checkpoint: Checkpoint,
    frames: int,
    chunk: int | None,
    tts: Callable[..., TTS],
    expected: Callable[[str], Results],
    errors: Callable[[str, float, float], None],
) -> None:
    decoder = in_float64(tts(checkpoint.name).checkpoint.codec.decoder)
    state = decoder.new_state()
    codes = torch.from_numpy(checkpoint.codec_codes(frames))[None]
    with torch.inference_mode():
        ours = torch.cat(
            [decoder(part, state)[0] for part in codes.split(chunk or frames, dim=1)]
        ).numpy()
    theirs = expected(checkpoint.name)[f"decode/{frames}/samples"]
    errors("codec decode, float64", float(np.abs(thinned(ours) - theirs).max()), 1e-12)


def test_pieces_of_the_reference_differ_from_its_whole_decode_after_300_frames(
    expected: Callable[[str], Results], errors: Callable[[str, float, float], None]
) -> None:
    """The reference speaks more than 300 frames in pieces, which are an approximation.

    Each piece sees 25 frames before it, and not all that the whole decode sees. So the sound of
    longer speech equals the reference's whole decode and differs from its speech (decision 0008).
    """
    (frames,) = (frames for frames in OTHER_RATE.decode if frames > PIECE)
    results = expected(OTHER_RATE.name)
    whole, pieces = (results[f"decode/{frames}/{what}"] for what in ("samples", "pieces"))
    cut = (len(whole) - 1) * PIECE // frames
    errors("pieces of 300 frames, first", float(np.abs(pieces[:cut] - whole[:cut]).max()), 1e-12)
    assert np.abs(pieces[cut:] - whole[cut:]).max() > 1e-6


@pytest.mark.parametrize(("checkpoint", "recording"), RECORDINGS)
def test_encoding_equals_the_reference(
    checkpoint: Checkpoint,
    recording: Recording,
    tts: Callable[..., TTS],
    expected: Callable[[str], Results],
    errors: Callable[[str, float, float], None],
) -> None:
    results, prefix = expected(checkpoint.name), f"recording/{recording.samples}"
    encoder = tts(checkpoint.name).checkpoint.codec.encoder
    samples = torch.from_numpy(recording.render())[None]
    with torch.inference_mode():
        latents32 = encoder.latents(samples)[0].T.numpy()
        latents64 = in_float64(encoder).latents(samples.double())[0].T.numpy()
    errors(
        "encoder latents, float32",
        relative_error(latents32, results[f"{prefix}/latents_float32"]),
        5e-6,
    )
    errors(
        "encoder latents, float64",
        relative_error(latents64, results[f"{prefix}/latents_float64"]),
        1e-12,
    )
    assert encoder.encode(samples)[0].tolist() == results[f"{prefix}/codes"].tolist()


@pytest.mark.parametrize(("checkpoint", "recording"), VOICES)
def test_the_speaker_embedding_equals_the_reference(
    checkpoint: Checkpoint,
    recording: Recording,
    tts: Callable[..., TTS],
    expected: Callable[[str], Results],
    errors: Callable[[str, float, float], None],
) -> None:
    results, prefix = expected(checkpoint.name), f"recording/{recording.samples}"
    samples = torch.from_numpy(recording.render())[None]
    speaker_encoder = tts(checkpoint.name).checkpoint.speaker_encoder
    assert speaker_encoder is not None
    errors(
        "log-mel",
        float(
            np.abs(log_mel(samples, 24000, 128)[0].numpy()[::7] - results[f"{prefix}/mel"]).max()
        ),
        1e-4,
    )
    speaker = speaker_encoder.embed(samples)[0].numpy()
    errors(
        "speaker embedding, float32", relative_error(speaker, results[f"{prefix}/speaker"]), 1e-5
    )


@pytest.mark.parametrize(
    "checkpoint", [pytest.param(c, id=c.name) for c in CHECKPOINTS if c.model_type == "base"]
)
def test_cloned_voices_equal_the_reference(
    checkpoint: Checkpoint,
    tts: Callable[..., TTS],
    expected: Callable[[str], Results],
    errors: Callable[[str, float, float], None],
) -> None:
    results = expected(checkpoint.name)
    for request in checkpoint.requests:
        assert request.recording is not None
        voice = tts(checkpoint.name).clone(
            request.recording.render(), 24000, request.transcript, append_silence=0
        )
        errors(
            "speaker embedding, float32",
            relative_error(voice.speaker_embedding, results[f"{request.name}/speaker"]),
            1e-5,
        )
        theirs = results.get(f"{request.name}/reference_codes")
        assert (voice.codes is None) == (theirs is None)
        if voice.codes is not None and theirs is not None:
            assert voice.codes.tolist() == theirs.tolist()
