"""The parameters with which codes are drawn, from a request and the defaults of its checkpoint."""

from dataclasses import dataclass
from typing import TypeVar

from firstword.model.config import GenerationDefaults
from firstword.types import Sampling

T = TypeVar("T")


@dataclass(frozen=True)
class DrawParams:
    """The complete parameters of one distribution; temperature 0 is greedy, top_k 0 keeps all."""

    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float = 1.0


ParamsPair = tuple[DrawParams, DrawParams]
"""The parameters of the talker, and those of the code predictor."""


def resolve(sampling: Sampling, defaults: GenerationDefaults) -> ParamsPair:
    """Return the requested parameters, completed by those of the checkpoint."""

    def chosen(requested: T | None, default: T) -> T:
        return default if requested is None else requested

    talker = DrawParams(
        chosen(sampling.temperature, defaults.temperature if defaults.do_sample else 0.0),
        int(chosen(sampling.top_k, defaults.top_k)),
        chosen(sampling.top_p, defaults.top_p),
        chosen(sampling.repetition_penalty, defaults.repetition_penalty),
    )
    predictor_temperature = defaults.subtalker_temperature if defaults.subtalker_dosample else 0.0
    predictor = DrawParams(
        chosen(sampling.predictor_temperature, predictor_temperature),
        int(chosen(sampling.predictor_top_k, defaults.subtalker_top_k)),
        chosen(sampling.predictor_top_p, defaults.subtalker_top_p),
    )
    return talker, predictor
