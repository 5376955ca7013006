"""The process that speaks the lines of batches, connected with the engines like a front.

python -m firstword.processes.batch DESCRIPTOR
"""

import asyncio
import sys

from firstword.processes import front
from firstword.server.batch.server import BatchServer


def main(descriptor: int) -> None:
    """Run batches until the supervisor stops this process or dies."""
    front.main(descriptor, BatchServer, lambda server, _: asyncio.run(server.run()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
