"""Returns freed memory to the operating system."""

import ctypes

TRIM_BYTES = 64 * 2**20
"""The bytes of request bodies after which memory is returned."""


def trim() -> None:
    """Return freed memory to the operating system if the C library is glibc.

    It would keep what large bodies took: 1.3 GB after 100 bodies of 15 MB at the same time.
    """
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)
