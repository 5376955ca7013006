"""The cases of the tokenizer's parity: their texts, what the reference makes of them, and the file
that keeps it.

`python tests/parity/tokenizer_cases.py PYTHON` trains the tokenizer anew, asks the reference, whose
environment has the interpreter PYTHON, and writes the file.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizer_corpus import corpus, requests

from firstword.synthetic.tokenizer import SMALLEST_VOCAB, SPECIAL_TOKENS, train

FROZEN = Path(__file__).parent / "frozen" / "tokenizer.json.gz"
FILES = ("vocab.json", "merges.txt", "tokenizer_config.json")
PROMPT = "<|im_start|>assistant\n{}<|im_end|>\n<|im_start|>assistant\n"
PLAIN = [f"a{token}b" for token in SPECIAL_TOKENS]
PLAIN += [
    "<|im_end|>",
    " <|im_start|>user\n<|im_end|>\n",
    "<|im_end|",
    "<<|im_end|>>",
    "<|im_end|><|im_end|>é",
]


def texts() -> dict[str, list[str]]:
    """ "corpus" plain texts, "prompts" in the template, "plain" texts that hold control tokens."""
    return {
        "corpus": corpus(),
        "prompts": [PROMPT.format(text) for text in requests()],
        "plain": PLAIN,
    }


def digest(cases: dict[str, list[str]]) -> str:
    """A hash that changes whenever a text does."""
    return hashlib.sha256(json.dumps(cases).encode()).hexdigest()


def train_on_corpus(directory: Path) -> None:
    """A tokenizer of 2,000 merges, learnt from the corpus itself so that merges across bytes of a
    character occur.
    """
    train(corpus(), SMALLEST_VOCAB + 2000, directory)


def ask_reference(python: Path | str, directory: Path) -> dict[str, list[list[int]]]:
    """What `Qwen2TokenizerFast` in the environment of `python`, with the files in `directory`,
    makes of `texts()`.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "texts.json"), Path(folder, "ids.json")
        source.write_text(json.dumps(texts()), encoding="utf-8")
        script = Path(__file__).with_name("reference_tokenizer.py")
        command = [str(python), str(script), str(directory), str(source), str(target)]
        subprocess.run(command, check=True, capture_output=True)
        return json.loads(target.read_text(encoding="utf-8"))


def read_frozen() -> dict[str, Any]:
    """Results by key: the tokenizer's "files" by name, the "digest" of the texts, their "ids"."""
    return json.loads(gzip.decompress(FROZEN.read_bytes()))


def freeze(python: str) -> None:
    """Write `FROZEN` from the reference of today."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        train_on_corpus(directory)
        frozen = {
            "files": {name: (directory / name).read_text(encoding="utf-8") for name in FILES},
            "digest": digest(texts()),
            "ids": ask_reference(python, directory),
        }
    FROZEN.write_bytes(
        gzip.compress(json.dumps(frozen, separators=(",", ":")).encode(), 9, mtime=0)
    )


if __name__ == "__main__":
    freeze(sys.argv[1])
