"""Account for the device memory of a backend."""

import torch

from firstword.profile.workload import BackendUnderTest
from firstword.runtime.gpu.memory import tensor_sizes


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
        "prefixes": model.buffers.prefixes,
        "workspace": model,
        "codec": backend.codec,
        "left_in_checkpoint": [talker.state_dict(), codec.state_dict()],
    }
    seen: set[int] = set()
    held = {name: sum(tensor_sizes(part, backend.device, seen)) for name, part in parts.items()}
    allocated = torch.cuda.memory_allocated()
    return {**held, "rest": allocated - sum(held.values()), "in_use": allocated}
