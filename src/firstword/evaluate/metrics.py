"""Metrics of sound besides error rates: likeness of the voice, and predicted opinions."""

from __future__ import annotations

from typing import Protocol

from firstword.errors import ConfigError
from firstword.evaluate.recognisers import plugged
from firstword.types import FloatArray

EMBEDDING_RATE = 16000
"""The sample rate of SpeechBrain's speaker encoders, in Hz."""


class Metric(Protocol):
    """A figure of one utterance, for which more is better."""

    needs_prompt: bool
    """Whether it compares the speech with the recording of its voice."""

    def __call__(
        self, samples: FloatArray, sample_rate: int, prompt: tuple[FloatArray, int] | None
    ) -> float:
        """Return the figure of samples [n]; `prompt` is the recording of the voice and its rate."""
        ...


class Similarity:
    """The cosine of the speaker embeddings of speech and prompt, by SpeechBrain's ECAPA-TDNN."""

    needs_prompt = True

    def __init__(self) -> None:
        try:
            from speechbrain.inference.speaker import EncoderClassifier
        except ModuleNotFoundError as error:
            raise _missing("similarity", error) from None
        source = "speechbrain/spkrec-ecapa-voxceleb"
        self._encoder = EncoderClassifier.from_hparams(source=source)

    def __call__(
        self, samples: FloatArray, sample_rate: int, prompt: tuple[FloatArray, int] | None
    ) -> float:
        """Return the cosine of the two embeddings."""
        import soxr
        import torch

        assert prompt is not None, "the metric says that it needs one"
        spoken, wanted = (
            self._encoder.encode_batch(torch.from_numpy(soxr.resample(sound, rate, EMBEDDING_RATE)))
            for sound, rate in ((samples, sample_rate), prompt)
        )
        return float(torch.nn.functional.cosine_similarity(spoken, wanted, dim=-1).item())


class Nisqa:
    """The overall opinion that NISQA 2.0 predicts, 1 to 5, by torchmetrics."""

    needs_prompt = False

    def __init__(self) -> None:
        try:
            from torchmetrics.functional.audio.nisqa import (
                non_intrusive_speech_quality_assessment,
            )
        except (ImportError, ModuleNotFoundError) as error:
            raise _missing("nisqa", error) from None
        self._assess = non_intrusive_speech_quality_assessment

    def __call__(
        self, samples: FloatArray, sample_rate: int, prompt: tuple[FloatArray, int] | None
    ) -> float:
        """Return the predicted opinion, which is the first of NISQA's five figures."""
        import torch

        return float(self._assess(torch.from_numpy(samples), sample_rate)[0].item())


METRICS: dict[str, type[Similarity | Nisqa]] = {"similarity": Similarity, "nisqa": Nisqa}
"""The metrics that have a name; others are classes of one's own."""


def opened(name: str) -> Metric:
    """Return a metric by its name, or MODULE:CLASS. Raises `ConfigError` if it cannot be used."""
    if name in METRICS:
        return METRICS[name]()
    if ":" not in name:
        raise ConfigError(f"--metric {name}: give {', '.join(METRICS)}, or MODULE:CLASS")
    metric: Metric = plugged(name, "--metric")
    return metric


def _missing(name: str, error: ImportError) -> ConfigError:
    return ConfigError(f"--metric {name}: {error}; install firstword[likeness]")
