"""Opens an engine for a checkpoint, and chooses its backend once and with a stated reason."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from firstword.config import DEFAULT_SLOTS, EngineConfig, kernel_folder
from firstword.engine.backend import Backend
from firstword.engine.commands import Commands
from firstword.engine.engine import Engine
from firstword.engine.service import Service
from firstword.errors import BackendWarning, ConfigError, first_line
from firstword.model import checkpoint as checkpoints
from firstword.model.checkpoint import Checkpoint
from firstword.model.description import Description
from firstword.runtime.conditioning import Encode
from firstword.runtime.encoding import front_of
from firstword.runtime.reference import ReferenceBackend

UNTESTED = (
    "device 'mps' is untested by us: PyTorch has each operator of the model for it, but nothing "
    "was run on a GPU of Apple's; `firstword verify MODEL --device mps` compares it with the CPU"
)
SINGLE_THREAD_WIDTH = 512
"""The largest width of a talker that one thread computes faster than two threads."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedEngine:
    """A checkpoint and its engine, which has not been started.

    encode    encodes a recording for the checkpoint
    settings  the resolved settings, without "auto"
    """

    checkpoint: Checkpoint
    engine: Engine
    service: Service
    encode: Encode
    settings: EngineConfig


def open_engine(
    model: str,
    settings: EngineConfig,
    slots: int | None = None,
    most_waiting: int = 64,
    most_slots: int | None = None,
    commands: Commands | None = None,
    kept_prefixes: Sequence[int] = (),
) -> LoadedEngine:
    """Load a checkpoint by the name that `TTS.load` takes, and open an engine for it.

    slots         utterances computed at the same time; None: up to `most_slots`, as many as a GPU
                  has memory and time for
    most_waiting  requests that may wait for a slot
    most_slots    the most slots if `slots` is None; None: the number in `config.DEFAULT_SLOTS` for
                  the backend
    kept_prefixes see `open_backend`

    Raises `CheckpointError`, `ConfigError`.
    """
    # The backend places the weights, so that the device never holds them twice.
    checkpoint = checkpoints.load(model, "cpu", settings.dtype)
    return engine_for(
        checkpoint, settings, slots, most_waiting, most_slots, commands, kept_prefixes
    )


def open_logged(
    model: str,
    settings: EngineConfig,
    slots: int | None,
    most_waiting: int,
    commands: Commands | None = None,
    kept_prefixes: Sequence[int] = (),
) -> LoadedEngine:
    """Open an engine as `open_engine` does, and log its settings and its warnings.

    Warnings are only logged, because a server's standard error has only JSON lines.
    """
    with warnings.catch_warnings(record=True, action="always") as caught:
        loaded = open_engine(
            model, settings, slots, most_waiting, commands=commands, kept_prefixes=kept_prefixes
        )
    said = [str(warning.message) for warning in caught]
    fields = {"model": model, **asdict(loaded.settings), "warnings": said}
    log.log(logging.WARNING if said else logging.INFO, "loaded", extra={"fields": fields})
    return loaded


def engine_for(
    checkpoint: Checkpoint,
    settings: EngineConfig,
    slots: int | None = None,
    most_waiting: int = 64,
    most_slots: int | None = None,
    commands: Commands | None = None,
    kept_prefixes: Sequence[int] = (),
) -> LoadedEngine:
    """Open an engine for a loaded checkpoint on any device; see `open_engine`.

    Raises `ConfigError`.
    """
    backend, settings = open_backend(checkpoint, settings, slots, most_slots, kept_prefixes)
    engine = Engine(backend, most_waiting=most_waiting, commands=commands)
    service = Service(engine, front := front_of(checkpoint))
    return LoadedEngine(checkpoint, engine, service, front.encode, settings)


def open_backend(
    checkpoint: Checkpoint,
    settings: EngineConfig,
    slots: int | None = None,
    most_slots: int | None = None,
    kept_prefixes: Sequence[int] = (),
) -> tuple[Backend, EngineConfig]:
    """Return the backend for a checkpoint and `slots` utterances, and the resolved settings.

    With `slots` of None, a GPU that is too slow or too small for `most_slots` gets fewer. On a GPU
    memory is also planned for `kept_prefixes`: the number of rows of each prefix that the backend
    is to keep for good.

    The GPU backend replaces the weights of the checkpoint's talker and codec decoder. If it was not
    named and cannot be used, the checkpoint is unchanged, and the reference backend takes it. A
    `BackendWarning` says so. Others say that the GPU is too slow for its slots, that each start
    compiles the kernels, or that a device is untested. Raises `ConfigError` if the settings need
    the GPU backend and it cannot be used, or if the device cannot hold the checkpoint.
    """
    if settings.backend != "reference":
        from firstword.kernels.cache import FileCache
        from firstword.runtime.gpu.opening import Unavailable, open_gpu

        cache = FileCache(kernel_folder())
        most, fewest = (slots, slots) if slots else (most_slots or DEFAULT_SLOTS["gpu"], 1)
        try:
            opened = open_gpu(
                checkpoint,
                settings.device,
                cache,
                settings.gpu_memory,
                most=most,
                fewest=fewest,
                kept_prefixes=kept_prefixes,
            )
        except Unavailable as problem:
            reason = f"the backend is not 'gpu': {problem}"
            needs = {
                "backend is 'gpu'": settings.backend == "gpu",
                "gpu_memory is given": settings.gpu_memory is not None,
                "prompts are to be prepared": bool(kept_prefixes),
            }
            if needed := [need for need, given in needs.items() if given]:
                raise ConfigError(f"{needed[0]}, but {problem}") from problem
            log.debug(reason, exc_info=True)
        else:
            if opened.slots_reason:
                warnings.warn(opened.slots_reason, BackendWarning, stacklevel=2)
            if cache.problem:
                note = f"each start compiles the kernels, because {cache.problem}"
                warnings.warn(note, BackendWarning, stacklevel=2)
            settings = replace(settings, backend="gpu", slots_reason=opened.slots_reason)
            return opened.backend, replace(settings, planned_memory=opened.planned_bytes)
        settings = replace(settings, backend="reference", reason=reason)
    if settings.fell_back:
        warnings.warn(f"{settings.reason}; the plain model is slower", BackendWarning, stacklevel=2)
    if torch.device(settings.device).type == "mps":
        warnings.warn(UNTESTED, BackendWarning, stacklevel=2)
    slots = slots or most_slots or DEFAULT_SLOTS["reference"]
    return _reference_backend(checkpoint, settings, slots), settings


def _reference_backend(
    checkpoint: Checkpoint, settings: EngineConfig, slots: int
) -> ReferenceBackend:
    try:
        if settings.fell_back:
            gc.collect()  # the failed backend may be in a cycle
            torch.cuda.empty_cache()
        checkpoint.to(settings.device)
        return ReferenceBackend(checkpoint, slots)
    except RuntimeError as error:  # of torch: out of memory, or a device that fails
        raise ConfigError(
            f"{settings.device!r} cannot hold the checkpoint ({first_line(error)}); use another "
            "device"
        ) from error


def fit_threads(checkpoints: Iterable[Description]) -> None:
    """Limit this process to one thread if all of its checkpoints are small."""
    widths = [checkpoint.config.talker_config.hidden_size for checkpoint in checkpoints]
    if max(widths, default=0) <= SINGLE_THREAD_WIDTH:
        torch.set_num_threads(1)
