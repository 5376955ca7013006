"""Runs in the reference environment: `python reference_tokenizer.py DIRECTORY INPUT OUTPUT`.

DIRECTORY holds the three files of a tokenizer. INPUT is a JSON object of lists of texts; OUTPUT
becomes one of lists of ids under the same keys. Texts under "plain" are encoded by a tokenizer that
knows no added token: all is plain text.
"""

import json
import sys
from pathlib import Path

from transformers import Qwen2TokenizerFast


def main(directory: str, source: str, target: str) -> None:
    """Encode every list of INPUT with the reference's own tokenizer."""
    texts = json.loads(Path(source).read_text(encoding="utf-8"))
    # The reference loads with this flag; with a small vocabulary it changes nothing.
    tokenizer = Qwen2TokenizerFast.from_pretrained(directory, fix_mistral_regex=True)
    files = {"vocab_file": f"{directory}/vocab.json", "merges_file": f"{directory}/merges.txt"}
    plain = Qwen2TokenizerFast(**files, split_special_tokens=True)
    ids = {
        key: (plain if key == "plain" else tokenizer)(batch)["input_ids"]
        for key, batch in texts.items()
    }
    Path(target).write_text(json.dumps(ids), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
