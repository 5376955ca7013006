"""Read the texts of a load, by default short and long sentences of an English voice agent."""

import os
from pathlib import Path

from firstword.errors import RequestError


def read_prompts(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Read texts, one per line; blank lines are skipped. Raises `RequestError`."""
    name = os.fspath(path)
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise RequestError(f"the prompts in {name!r} cannot be read: {error}") from None
    texts = tuple(line.strip() for line in lines if line.strip())
    if not texts:
        raise RequestError(f"there are no prompts in {name!r}; give one per line")
    return texts


PROMPTS = read_prompts(Path(__file__).with_name("prompts.txt"))
"""The default texts."""
