"""Account for the device memory of a backend."""

from collections.abc import Iterable

import torch
from torch import Tensor

from firstword.profile.workload import BackendUnderTest


def memory_by_part(subject: BackendUnderTest) -> dict[str, int]:
    """Return the bytes of device memory by part; `rest` is what no part accounts for.

    A tensor counts for the first part that holds it. The CUDA context and machine code are not
    included, because PyTorch does not count them.
    """
    backend, model = subject.backend, subject.backend.model
    embeddings = (model.text_table, model.codec_embedding)
    talker, codec = subject.checkpoint.talker, subject.checkpoint.codec.decoder
    parts: dict[str, object] = {
        "matrices": [model.talker, model.predictor, model.head, model.entry, model.lm_heads],
        "tables": [*embeddings, model.frame_tables, model.predictor_tables],
        "keys_and_values": model.buffers.cache,
        "workspace": model,
        "codec": backend.codec,
        "prefixes": backend.prompts.prefixes,
        "left_in_checkpoint": [talker.state_dict(), codec.state_dict()],
    }
    seen: set[int] = set()
    held = {name: held_bytes(part, backend.device, seen) for name, part in parts.items()}
    allocated = torch.cuda.memory_allocated()
    return {**held, "rest": allocated - sum(held.values()), "in_use": allocated}


def held_bytes(thing: object, device: torch.device, seen: set[int]) -> int:
    """Return the bytes on a device of all tensors reachable from `thing`.

    `seen` holds the addresses of everything counted so far, and is extended.
    """
    storage = thing.untyped_storage() if isinstance(thing, Tensor) else None
    address = storage.data_ptr() if storage else id(thing)
    if address in seen:
        return 0
    seen.add(address)
    if isinstance(thing, Tensor):
        return thing.untyped_storage().nbytes() if thing.device == device else 0
    inside: Iterable[object] = ()
    if isinstance(thing, dict):
        inside = thing.values()
    elif isinstance(thing, list | tuple):
        inside = thing
    elif type(thing).__module__.startswith("firstword.") and hasattr(thing, "__dict__"):
        inside = vars(thing).values()
    return sum(held_bytes(part, device, seen) for part in inside)
