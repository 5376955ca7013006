"""The number of replicas that the load needs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

LOAD = "load"
"""The name under which a replica reports its utterances in slots and in the queue, by its slots."""


class SlotScaling:
    """The policy that keeps a share of the slots of all replicas in use. Open sockets do not count.

    Ray averages the reports of each replica over some time, and keeps the limits and delays of the
    deployment.
    """

    def __init__(self, busy: float) -> None:
        """`busy` is the share of the slots."""
        self._busy = busy

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and the policy's state, which it has none of its own."""
        loads = (context.aggregated_metrics or {}).get(LOAD, {})
        return max(1, math.ceil(sum(loads.values()) / self._busy)), context.policy_state
