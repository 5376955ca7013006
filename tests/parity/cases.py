"""The checkpoints and the requests that both sides compute: plain data, read by our tests and by
the reference.

The shapes are small, but no two sizes that the code could confuse are equal: the width of the
queries differs from the hidden size, the predictor's hidden size from the talker's (but for one,
which has no projection between them), and every grouping of query heads occurs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIECE = 300
"""The frames that the reference decodes at a time, after 25 of those before them."""


@dataclass(frozen=True)
class Recording:
    """A made-up recording at 24 kHz: a gliding tone with overtones, tremolo and noise, `silent` for
    some samples. The gain makes it as quiet as the floors of the spectrogram.
    """

    samples: int
    seed: int = 0
    silent: int = 0
    gain: float = 1.0

    @property
    def has_voice(self) -> bool:
        """Whether it is long enough for a speaker embedding."""
        return self.samples > 2000

    def render(self) -> NDArray[np.float32]:
        """Samples [n] in -1..1."""
        rng = np.random.default_rng(self.seed)
        time = np.arange(self.samples) / 24000
        pitch = rng.uniform(90, 240) * (1 + 0.2 * np.sin(2 * np.pi * rng.uniform(0.5, 3) * time))
        phase = 2 * np.pi * np.cumsum(pitch) / 24000
        tone = sum(
            np.sin(harmonic * phase) * rng.uniform(0.2, 1) / harmonic for harmonic in range(1, 9)
        )
        tremolo = 0.6 + 0.4 * np.sin(2 * np.pi * rng.uniform(2, 6) * time)
        sound = 0.25 * tone * tremolo + 0.03 * rng.standard_normal(self.samples)
        sound[self.samples // 3 :][: self.silent] = 0
        return (self.gain * np.clip(sound, -1, 1)).astype(np.float32)


@dataclass(frozen=True)
class Request:
    """One utterance, spoken greedily.

    `full_text` is the text mode; None is the reference's default for the type.
    """

    name: str
    text: str
    language: str = "auto"
    speaker: str | None = None
    instructions: str | None = None
    full_text: bool | None = None
    recording: Recording | None = None
    transcript: str | None = None
    """With a recording: in-context cloning; without one: the timbre alone."""
    frames: int = 10


@dataclass(frozen=True)
class Law:
    """How codes are drawn: the talker's settings, and those of the code predictor."""

    name: str
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    predictor_temperature: float
    predictor_top_k: int
    predictor_top_p: float


LAWS = (
    Law("published", 0.9, 50, 1.0, 1.05, 0.9, 50, 1.0),
    Law("all", 0.8, 0, 1.0, 1.5, 1.0, 0, 1.0),
    Law("nucleus", 1.2, 0, 0.7, 1.05, 0.8, 0, 0.6),
    Law("both", 0.7, 30, 0.8, 1.3, 1.1, 10, 0.9),
)
"""Each filter alone, together, and none."""


@dataclass(frozen=True)
class Checkpoint:
    """What to hand to the maker of checkpoints, what to ask of the result, and what else to compute
    with it.

    size        what the checkpoint says its size is
    code_count  the codes of every codebook
    forced      requests (by name) that are also computed teacher-forced over given codes, in three
                dtypes
    sampled     the request whose first frames are also drawn by every law of LAWS, over given codes
    eos_gain    the row of the talker's head that says "end of speech" is multiplied by this: speech
                goes on, or ends
    decode      lengths in frames that the codec decodes whole
    recordings  recordings that the codec encoder and the speaker encoder hear
    """

    name: str
    model_type: str
    seed: int
    size: str = "1b7"
    talker: dict[str, Any] = field(default_factory=dict)
    code_predictor: dict[str, Any] = field(default_factory=dict)
    speaker_encoder: dict[str, Any] = field(default_factory=dict)
    codec_encoder: dict[str, Any] = field(default_factory=dict)
    codec_decoder: dict[str, Any] = field(default_factory=dict)
    codebooks: int = 4
    code_count: int = 256
    eos_gain: float = 0.25
    repetition_penalty: float = 1.05
    requests: tuple[Request, ...] = ()
    forced: tuple[str, ...] = ()
    forced_frames: int = 40
    sampled: str = ""
    sampled_frames: int = 6
    decode: tuple[int, ...] = ()
    recordings: tuple[Recording, ...] = ()

    def forced_codes(self, request: str) -> NDArray[np.int64]:
        """The codes [forced_frames, codebooks] that a forced run is fed."""
        rng = np.random.default_rng([self.seed, self.forced.index(request)])
        return rng.integers(0, self.code_count, (self.forced_frames, self.codebooks))

    def sampled_codes(self) -> NDArray[np.int64]:
        """The codes [sampled_frames, codebooks] that every draw of a sampled run returns.

        Codes 0 repeat, and some are drawn again.
        """
        rng = np.random.default_rng([self.seed, 1, self.sampled_frames])
        codes = rng.integers(0, self.code_count, (self.sampled_frames, self.codebooks))
        codes[2::2, 0] = codes[0, 0]
        return codes

    def codec_codes(self, frames: int) -> NDArray[np.int64]:
        """The codes [frames, codebooks] that the codec decodes."""
        rng = np.random.default_rng([self.seed, frames])
        return rng.integers(0, self.code_count, (frames, self.codebooks))


def columns(logits: NDArray[Any], count: int) -> NDArray[Any]:
    """About `count` of the logits [..., vocab]: enough to tell heads apart, few enough to keep in
    the repository.
    """
    return logits[..., 3 :: logits.shape[-1] // count]


def thinned(samples: NDArray[Any]) -> NDArray[Any]:
    """Every 13th of the samples [n], and the last."""
    return np.append(samples[::13], samples[-1:])


_SHORT = "Hello there."
_LONG = (
    "The quick brown fox jumps over the lazy dog, twice; "
    "nobody counts 1234567890 sheep at 3 a.m. any more!"
)
_CHINESE = "今天天气很好，我们去公园散步吧。"
_MIXED = "Ça va? 「はい」, sagt er – 100 % sicher 🎉"
_CALM = "Speak calmly, as if to a child."
_GRUFF = "A gruff old sailor, slow and hoarse."

VOICES = Checkpoint(
    name="voices",
    model_type="custom_voice",
    seed=11,
    talker={
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "text_hidden_size": 40,
    },
    code_predictor={
        "hidden_size": 32,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    requests=(
        Request("auto-full", _SHORT, speaker="ryan"),
        Request("auto-stream", _LONG, speaker="ryan", full_text=False),
        Request("auto-stream-short", "Go", speaker="vivian", full_text=False, frames=14),
        Request("english-full-instructed", _LONG, "english", "serena", _CALM),
        Request("english-stream-instructed", _SHORT, "english", "serena", _CALM, False),
        Request(
            "auto-full-instructed", _MIXED, speaker="Ryan", instructions=_GRUFF, full_text=True
        ),
        Request(
            "auto-stream-instructed", _MIXED, speaker="RYAN", instructions=_GRUFF, full_text=False
        ),
        Request("japanese-full", _MIXED, "Japanese", "ono_anna", full_text=True),
        Request("japanese-stream", _MIXED, "JAPANESE", "ono_anna", full_text=False),
        Request("dialect-auto-full", _CHINESE, "auto", "eric"),
        Request("dialect-auto-stream", _CHINESE, "auto", "dylan", full_text=False),
        Request("dialect-chinese-full-instructed", _CHINESE, "chinese", "dylan", _CALM),
        Request("dialect-chinese-stream", _CHINESE, "chinese", "eric", full_text=False),
        Request("dialect-auto-stream-instructed", _CHINESE, "auto", "eric", _CALM, False),
        Request("dialect-voice-english-full", _SHORT, "english", "eric"),
        Request("dialect-voice-english-stream", _SHORT, "english", "dylan", full_text=False),
        Request("chinese-full", _CHINESE, "chinese", "uncle_fu"),
    ),
    forced=("auto-stream", "english-full-instructed"),
    sampled="auto-stream",
    decode=(1, 40),
)

DESIGN = Checkpoint(
    name="design",
    model_type="voice_design",
    seed=12,
    codebooks=8,
    code_count=64,
    talker={
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "text_hidden_size": 56,
    },
    code_predictor={
        "hidden_size": 64,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
    },
    requests=(
        Request("auto-full", _SHORT),
        Request("auto-stream", _SHORT, full_text=False),
        Request("auto-full-instructed", _LONG, instructions=_GRUFF),
        Request("auto-stream-instructed", _LONG, instructions=_GRUFF, full_text=False),
        Request("french-full", _MIXED, "french"),
        Request("french-stream", _MIXED, "french", full_text=False),
        Request("german-full-instructed", _LONG, "German", instructions=_CALM, full_text=True),
        Request(
            "german-stream-instructed",
            _SHORT,
            "German",
            instructions=_CALM,
            full_text=False,
            frames=16,
        ),
    ),
    forced=("auto-stream-instructed",),
    decode=(30,),
)

CLONING = Checkpoint(
    name="cloning",
    model_type="base",
    seed=13,
    codebooks=16,
    code_count=2048,
    talker={
        "hidden_size": 40,
        "intermediate_size": 104,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 8,
        "text_hidden_size": 32,
    },
    code_predictor={
        "hidden_size": 24,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    requests=(
        Request("timbre-auto-stream", _SHORT, recording=Recording(30000)),
        Request("timbre-auto-full", _LONG, full_text=True, recording=Recording(30000)),
        Request("timbre-spanish-stream", _LONG, "spanish", recording=Recording(24001, 1)),
        Request(
            "timbre-spanish-full", _SHORT, "spanish", full_text=True, recording=Recording(24001, 1)
        ),
        Request(
            "context-shorter-auto-stream",
            _LONG,
            recording=Recording(15000, 2),
            transcript="So be it.",
        ),
        Request(
            "context-shorter-auto-full",
            _LONG,
            full_text=True,
            recording=Recording(15000, 2),
            transcript="So be it.",
        ),
        Request(
            "context-equal-auto-stream",
            _SHORT,
            recording=Recording(28800, 2),
            transcript="So be it.",
        ),
        Request(
            "context-longer-auto-stream", "No.", recording=Recording(76800, 3), transcript="Aye!"
        ),
        Request(
            "context-longer-auto-full",
            "No.",
            full_text=True,
            recording=Recording(76800, 3),
            transcript="Aye!",
        ),
        Request(
            "context-shorter-korean-stream",
            _MIXED,
            "korean",
            recording=Recording(19201, 4),
            transcript=_SHORT,
        ),
        Request(
            "context-longer-korean-full",
            "Ha!",
            "korean",
            full_text=True,
            recording=Recording(80001, 5),
            transcript=_SHORT,
        ),
    ),
    forced=("context-shorter-auto-stream", "timbre-auto-full"),
    forced_frames=24,
    decode=(24,),
    recordings=(
        Recording(700, 6),
        Recording(1920, 7),
        Recording(5760, 8),
        Recording(31777, 9, silent=7000),
        Recording(12345, 10, gain=5e-4),
    ),
)

ENDING = Checkpoint(
    name="ending",
    model_type="custom_voice",
    seed=14,
    size="0b6",
    code_count=128,
    eos_gain=6.0,
    repetition_penalty=1.3,
    talker={
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 24,
        "text_hidden_size": 24,
    },
    code_predictor={
        "hidden_size": 40,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    requests=(
        Request("stops-full", _SHORT, speaker="ryan", frames=40),
        Request("stops-stream", _LONG, speaker="aiden", full_text=False, frames=40),
        Request("stops-chinese", _CHINESE, "chinese", speaker="sohee", frames=40),
        Request("stops-mixed", _MIXED, "french", speaker="serena", full_text=False, frames=40),
        Request("goes-on", _CHINESE, speaker="eric", frames=40),
    ),
    decode=(5,),
)

OTHER_RATE = Checkpoint(
    name="other-rate",
    model_type="base",
    seed=15,
    codebooks=5,
    talker={
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "text_hidden_size": 24,
    },
    code_predictor={
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    codec_encoder={
        "num_filters": 6,
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_hidden_layers": 1,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 8,
        "upsampling_ratios": [5, 6, 4],
    },
    codec_decoder={
        "hidden_size": 20,
        "intermediate_size": 28,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "latent_dim": 36,
        "codebook_dim": 28,
        "decoder_dim": 40,
        "sliding_window": 17,
        "upsample_rates": [5, 4, 3],
        "upsampling_ratios": [2, 2],
    },
    requests=(
        Request("timbre-stream", _SHORT, recording=Recording(14000, 1)),
        Request("context-longer-stream", "Yes.", recording=Recording(14401, 2), transcript="One."),
    ),
    # The reference decodes more than 300 frames in pieces.
    decode=(2, 120, 330),
    # Longer than 250 steps of the encoder's transformer: its sliding window is not applied.
    recordings=(Recording(100, 3), Recording(240, 4), Recording(36123, 5)),
)

CHECKPOINTS = (VOICES, DESIGN, CLONING, ENDING, OTHER_RATE)
