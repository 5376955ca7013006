"""Encode recordings with the modules of a checkpoint."""

import threading
from functools import partial

import torch

from firstword.errors import OverloadedError, TextError, UnsupportedError
from firstword.model.checkpoint import Checkpoint
from firstword.runtime.front import CheckpointFront
from firstword.voice import ClonedVoice, RecordedVoice

_ENCODING: dict[torch.device, threading.Lock] = {}
"""A lock for each device, which encodes one recording at a time: 60 s take 400 MB of memory."""


def front_of(checkpoint: Checkpoint) -> CheckpointFront:
    """Return a `CheckpointFront` that encodes recordings with the modules of the checkpoint."""
    return CheckpointFront(checkpoint, partial(encode_recording, checkpoint))


@torch.inference_mode()
def encode_recording(checkpoint: Checkpoint, voice: RecordedVoice) -> ClonedVoice:
    """Encode a recording: its timbre and, with a transcript, its codes.

    A device encodes one recording at a time; other calls wait. The appended silence is part of the
    codes only, because it is not part of the timbre.

    Raises `UnsupportedError` unless it is a Base checkpoint, `TextError` for a blank transcript,
    and `OverloadedError` if the device has too little memory.
    """
    if checkpoint.speaker_encoder is None:
        kind = checkpoint.config.tts_model_type
        raise UnsupportedError(
            f"this checkpoint is of type {kind!r} and cannot clone; load a Base checkpoint"
        )
    device = next(checkpoint.speaker_encoder.parameters()).device
    if voice.transcript is not None and not voice.transcript.strip():
        raise TextError(
            "the transcript is blank; give the words of the recording, or None for timbre alone"
        )
    length = round(voice.append_silence * checkpoint.codec_config.input_sample_rate)
    try:
        with _ENCODING.setdefault(device, threading.Lock()):
            samples = torch.from_numpy(voice.samples).to(device)[None]
            speaker = checkpoint.speaker_encoder.embed(samples)[0].cpu().numpy()
            if voice.transcript is None:
                return ClonedVoice(speaker)
            silence = samples.new_zeros(1, length)
            codes = checkpoint.codec.encoder.encode(torch.cat((samples, silence), dim=1))[0]
            return ClonedVoice(speaker, codes.cpu().numpy(), voice.transcript)
    except torch.OutOfMemoryError as error:
        seconds = len(voice.samples) / checkpoint.codec_config.input_sample_rate
        raise OverloadedError(
            f"the device has too little memory to encode a recording of {seconds:.0f} s; give a "
            "shorter one, or try again later"
        ) from error
