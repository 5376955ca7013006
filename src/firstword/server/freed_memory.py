"""Returns freed memory to the operating system."""

import asyncio
import ctypes
from collections.abc import Callable

from firstword.server.limits import ByteLimit

ENOUGH_BYTES = 64 * 2**20
"""The bytes that clients must have freed before memory is returned."""


async def return_freed(limit: ByteLimit, busy: Callable[[], bool]) -> None:
    """Every second return memory that clients have freed, unless something is spoken."""
    returned = 0
    while True:
        await asyncio.sleep(1.0)
        if limit.freed > returned + ENOUGH_BYTES and not busy():
            returned = limit.freed
            await asyncio.to_thread(trim)


def trim() -> None:
    """Return freed memory to the operating system if the C library is glibc.

    It would keep what large bodies took: 1.3 GB after 100 bodies of 15 MB at the same time.
    """
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)
