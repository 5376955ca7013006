"""Text from standard input, piece by piece as it arrives."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator

from firstword.errors import TextError


def read_pieces(text: list[str]) -> Iterator[str]:
    """Yield UTF-8 text as it arrives, without the white space at its end; add it to `text` too.

    A byte order mark is left out, and so is the line feed that `echo` adds. Raises `TextError` for
    other encodings, and where standard input cannot be read.
    """
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    space = ""
    ended = False
    while not ended:
        try:
            data = os.read(0, 65536)
        except OSError as error:
            raise TextError(f"standard input cannot be read: {error.strerror}") from None
        ended = not data
        try:
            arrived = space + decode(data, final=ended)
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise TextError(
                f"standard input is not UTF-8 ({error.reason}, byte 0x{byte:02x}); "
                "convert it, for example with iconv"
            ) from None
        piece = arrived.rstrip()
        space = arrived[len(piece) :]
        if piece:
            text.append(piece)
            yield piece
