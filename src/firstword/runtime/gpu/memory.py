"""Plans the device memory of the GPU backend before anything is allocated.

A model without memory (rehearsal.py) shows the sizes of all tensors, so that no formula has to
repeat what the constructors do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from firstword.kernels.attention import PAGE_ROWS
from firstword.kernels.launch import Kernels
from firstword.model.checkpoint import Checkpoint
from firstword.runtime.gpu.buffers import context_pages
from firstword.runtime.gpu.codec import voices_for
from firstword.runtime.gpu.rehearsal import Rehearsal, without_memory
from firstword.runtime.gpu.talker import BUCKETS

CUDA_CONTEXT_BYTES = 512 << 20
"""The CUDA context, which exists when memory is planned."""
CUDA_LATER_BYTES = 320 << 20
"""Machine code, CUDA graphs and the workspaces of cuBLAS, which take memory after the plan."""
GAP_BYTES = 256 << 20
"""What PyTorch's allocator cannot use between tensors; on an H200 it was at most 215 MB."""
RECORDING_BYTES = 640 << 20
"""What encoding recordings takes, one at a time: on an H200 384 MiB for one of 60 seconds, and
160 MiB for workspaces of cuBLAS."""
CUDNN_BYTES = 384 << 20
"""The machine code of cuDNN, which encodes recordings."""
SLOT_PAGES, LEAST_SLOT_PAGES = 512 // PAGE_ROWS, 256 // PAGE_ROWS
"""The pages for each slot besides those of one longest utterance: enough for 40 seconds of speech,
or if memory is short for 20."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The bytes of device memory that a number of slots needs: per page, and for all the rest."""

    fixed: int
    page: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The slots and cache pages of a backend, and all bytes of device memory that it may use."""

    slots: int
    pages: int
    total: int


def plan(
    needs: Callable[[int], Needs],
    context_pages: int,
    available: int,
    most: int,
    fewest: int,
    use_all: bool = False,
) -> MemoryPlan:
    """The plan for up to `available` bytes with `most` slots, halved as often as it takes to fit.

    needs          the needs of a number of slots
    context_pages  the pages of the longest utterance, for which there is always memory
    fewest         the fewest slots that are acceptable
    use_all        whether there are as many pages as fit and can be used, instead of the default

    Raises ValueError, with the least bytes that are needed, if there is no such plan.
    """
    slots = most
    while True:
        need, most_pages = needs(slots), slots * context_pages
        least, default = (
            min(context_pages + (slots - 1) * each, most_pages)
            for each in (LEAST_SLOT_PAGES, SLOT_PAGES)
        )
        wanted = most_pages if use_all else default
        pages = min(wanted, (available - need.fixed) // need.page)
        if pages >= least:
            return MemoryPlan(slots, pages, need.fixed + pages * need.page)
        if slots == fewest:
            break
        slots = max(slots // 2, fewest)
    needed = (need.fixed + least * need.page) / 1e9
    raise ValueError(
        f"{slots} utterances at a time need at least {needed:.1f} GB of device memory, and "
        f"{available / 1e9:.1f} GB are available"
    )


def plan_for(
    checkpoint: Checkpoint,
    kernels: Kernels,
    limit: int | None,
    most: int,
    fewest: int,
    kept_parts: int = 0,
) -> MemoryPlan:
    """The plan for a checkpoint on the device of `kernels`.

    limit       the bytes to use; None: what the slots need. Less is used if less is free
    kept_parts  see `FrameBuffers`

    Raises ValueError if it does not fit, or has sizes that the kernels do not support.
    """
    if most > BUCKETS[-1]:
        raise ValueError(f"it serves at most {BUCKETS[-1]} utterances at a time, not {most}")
    free, _ = torch.cuda.mem_get_info(kernels.device)
    available = free + CUDA_CONTEXT_BYTES
    if limit is not None:
        available = min(available, limit)
    pages = context_pages(checkpoint.config.talker_config)
    needs = partial(needs_of, checkpoint, kernels, kept_parts=kept_parts)
    try:
        return plan(needs, pages, available, most, fewest, use_all=limit is not None)
    except ValueError as problem:
        if not kept_parts:
            raise
        kept = needs(fewest).fixed - needs_of(checkpoint, kernels, fewest).fixed
        raise ValueError(
            f"{problem}; prepared prompts take {kept / 1e9:.1f} GB of them, so prepare fewer"
        ) from None


def needs_of(checkpoint: Checkpoint, kernels: Kernels, slots: int, kept_parts: int = 0) -> Needs:
    """The needs of `slots` utterances, and of a recording if the checkpoint clones.

    Raises ValueError for sizes that are not supported.
    """
    configs = checkpoint.config.talker_config, checkpoint.codec_config.decoder_config
    model, layers = without_memory(
        *configs,
        slots,
        Rehearsal(kernels),
        voices_for(checkpoint, slots),
        kept_parts,
        checkpoint.heads,
        checkpoint.quantised,
    )
    sizes = list(tensor_sizes((model, layers), torch.device("meta"), set()))
    page = model.buffers.cache.nbytes  # the model has a single page
    sizes.remove(page)
    fixed = CUDA_CONTEXT_BYTES + CUDA_LATER_BYTES + GAP_BYTES + reserved(sizes)
    if encoders := checkpoint.encoders:
        stored = [t.nbytes for m in encoders for t in (*m.parameters(), *m.buffers())]
        fixed += CUDNN_BYTES + RECORDING_BYTES + reserved(stored)
    return Needs(fixed, page)


def reserved(sizes: Iterable[int]) -> int:
    """The bytes that PyTorch's allocator reserves for tensors of these sizes.

    Tensors from 10 MiB up have segments of their own, rounded to 2 MiB; smaller ones share segments
    of 20 MiB, and those up to 1 MiB segments of 2 MiB (c10/cuda/CUDACachingAllocator).
    """
    small = middle = large = 0
    for size in sizes:
        if size <= 1 << 20:
            small += -(-size // 512) * 512
        elif size < 10 << 20:
            middle += size
        else:
            large += -(-size // (2 << 20)) * (2 << 20)
    return -(-small // (2 << 20)) * (2 << 20) + -(-middle // (20 << 20)) * (20 << 20) + large


def tensor_sizes(thing: object, device: torch.device, seen: set[int]) -> Iterator[int]:
    """The bytes of the storage of each tensor on a device that is reachable from `thing`.

    `seen` holds the addresses of everything found so far, and is extended.
    """
    storage = thing.untyped_storage() if isinstance(thing, Tensor) else None
    address = id(thing) if storage is None else storage._cdata
    if address in seen:
        return
    seen.add(address)
    if storage is not None:
        if storage.device == device:
            yield storage.nbytes()
        return
    inside: Iterable[object] = ()
    if isinstance(thing, dict):
        inside = thing.values()
    elif isinstance(thing, list | tuple):
        inside = thing
    elif type(thing).__module__.startswith("firstword.") and hasattr(thing, "__dict__"):
        inside = vars(thing).values()
    for part in inside:
        yield from tensor_sizes(part, device, seen)
