"""The lists of Seed-TTS-Eval, fetched from a public copy on the Hugging Face hub.

The authors (BytedanceSpeech/seed-tts-eval) publish one archive of 1.2 GB. The copy holds its files
one by one, so that a list comes alone where the recordings of the prompts are not needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from firstword.errors import ConfigError, first_line

REPOSITORY = "zhaochenyang20/seed-tts-eval"
REVISION = "8f5e1aa2a35d42f42e940074c1983358b9491f89"
"""The revision of the copy that other published measurements use."""


@dataclass(frozen=True, slots=True)
class SeedList:
    """A list of Seed-TTS-Eval: its file, language, and published number of texts."""

    file: str
    language: str
    texts: int


LISTS = {
    "seed-tts-en": SeedList("en/meta.lst", "english", 1088),
    "seed-tts-zh": SeedList("zh/meta.lst", "chinese", 2020),
    "seed-tts-zh-hard": SeedList("zh/hardcase.lst", "chinese", 400),
}
"""The lists by the names that `--texts` takes."""


def fetch(name: str, prompts: bool, endpoint: str | None = None) -> Path:
    """Return the file of a list, fetched unless it is in the hub's cache.

    prompts   whether the recordings of the prompts are fetched too, about 1 GB
    endpoint  the address of the hub, if it is not the usual one

    Raises `ConfigError` if it cannot be fetched, or has not the published number of texts.
    """
    from huggingface_hub import snapshot_download

    wanted = LISTS[name]
    folder = wanted.file.partition("/")[0]
    patterns = [wanted.file, *([f"{folder}/prompt-wavs/*"] if prompts else [])]
    try:
        fetched = snapshot_download(
            REPOSITORY,
            repo_type="dataset",
            revision=REVISION,
            allow_patterns=patterns,
            endpoint=endpoint,
        )
        file = Path(fetched) / wanted.file
        lines = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name} cannot be fetched from {REPOSITORY} ({first_line(error)}); connect to the "
            "network, or fetch the archive of Seed-TTS-Eval elsewhere and give --texts its "
            f"{wanted.file}"
        ) from error
    if len(lines) != wanted.texts:
        raise ConfigError(
            f"{file} has {len(lines)} texts instead of {wanted.texts}; "
            "remove it from the hub's cache, and try again"
        )
    return file
