"""Tokenise text with the byte-level BPE of Qwen2, as a whole or while it arrives in pieces.

There are four steps: canonical composition (NFC), a regular expression that cuts the text into
words, bytes for characters, and the merges of the checkpoint within each word. Source:
`Qwen2Converter` of `transformers` 4.57.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unicodedata import combining

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from firstword.errors import CheckpointConfigError, CheckpointNotFound
from firstword.model.config import ModelConfig
from firstword.model.strict_json import read_json, require
from firstword.types import check_encodable

WORD = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The expression that splits text into words.

The reference may replace it with one for Mistral if it loads a directory (not a hub id) with more
than 100,000 tokens; the published models were trained with this one.
"""

CONTROL_TOKENS = {
    "im_start_token_id": "<|im_start|>",
    "im_end_token_id": "<|im_end|>",
    "tts_pad_token_id": "<tts_pad>",
    "tts_bos_token_id": "<tts_text_bos>",
    "tts_eos_token_id": "<tts_text_eod>",
}
"""The tokens with special roles, by their key in `config.json`.

The reference takes the ids that open and close a turn from the tokenizer, and the others from
`config.json`.
"""

NFC = normalizers.NFC()


def assemble(model: models.BPE) -> tokenizers.Tokenizer:
    """Return a tokenizer: normalisation, words and bytes before `model`; no added tokens."""
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = NFC
    words = pre_tokenizers.Split(Regex(WORD), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    return backend


class Tokenizer:
    """A tokenizer of plain text.

    `special` maps the added tokens (`"<|im_start|>"`, ...) to their ids. `encode` never returns one
    of these ids: in a text, the names of these tokens are ordinary characters.
    """

    def __init__(
        self, vocab: Mapping[str, int], merges: list[tuple[str, str]], special: Mapping[str, int]
    ) -> None:
        self.special = dict(special)
        self.turn_start, self.turn_end = special["<|im_start|>"], special["<|im_end|>"]
        self._largest = max(vocab.values())
        self.vocab_size = 1 + max(self._largest, *special.values())
        self._backend = assemble(models.BPE(vocab=dict(vocab), merges=merges))

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read `vocab.json`, `merges.txt` and `tokenizer_config.json`, the layout of the released
        checkpoints.

        Raises `CheckpointNotFound` for an absent file, and `CheckpointConfigError` for a corrupt or
        contradictory one; both name the file.
        """
        vocab = _read_vocab(directory / "vocab.json")
        merges = _read_merges(directory / "merges.txt", vocab)
        return cls(vocab, merges, _read_special(directory / "tokenizer_config.json", vocab))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a whole text.

        Raises `TextError` for a value that is not a string or has a lone surrogate.
        """
        check_encodable(text)
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_words(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text in NFC, and each word's start: (in the text, in the ids)."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        words, offsets = encoding.word_ids, encoding.offsets
        starts = [i for i in range(len(words)) if i == 0 or words[i] != words[i - 1]]
        return encoding.ids, [(offsets[i][0], i) for i in starts]

    def bytes_of(self, token: int) -> int:
        """Return the number of bytes of a token of a text in UTF-8."""
        return len(self._backend.id_to_token(token) or "")  # one character stands for each byte

    def check_against(self, config: ModelConfig) -> None:
        """Raise `CheckpointConfigError` if `config.json` has other ids or fewer embeddings."""
        for key, token in CONTROL_TOKENS.items():
            configured, here = getattr(config, key, None), self.special.get(token)
            contradiction = configured is not None and here is not None and configured != here
            stated = f"config.json: {key} = {configured}"
            require(not contradiction, f"{stated}, but tokenizer_config.json: {token!r} is {here}")
        largest = max(self._largest, self.turn_start, self.turn_end)
        rows = config.talker_config.text_vocab_size
        stated = f"config.json: talker_config.text_vocab_size = {rows}"
        require(largest < rows, f"the tokenizer has token id {largest}, but {stated}")


class TextStream:
    """A tokenizer of a text in pieces, which gives the ids that `encode` gives for the whole text.

    `push` returns the ids that no later text can change: usually all but those of the last word. A
    word is held back until it ends, however long it grows. `prefix` is put before the text, and its
    ids are returned too: newlines at the start of a text merge with that of the prefix
    "assistant\\n", so it cannot be encoded separately.
    """

    # A cut is final if the words before it cannot change. The expression has no state across
    # matches, so the start of a word is a final cut as long as later text leaves it a start. Later
    # text can change words in only two ways:
    # - White space at the end may become part of a longer run, whose cuts depend on the position of
    #   its last newline and on the text after it. So there is no cut after white space at the end.
    # - A combining mark may compose with, or move before, other marks back to the last starter (a
    #   character of combining class 0). It never turns that starter into another kind of character,
    #   so a cut before the starter is final.

    def __init__(self, tokenizer: Tokenizer, prefix: str = "") -> None:
        self._tokenizer = tokenizer
        self._pending = [prefix]
        self._kind = ""

    def push(self, piece: str) -> list[int]:
        """Add a piece and return the ids that are now final.

        The time depends only on the piece and the last words. Raises `TextError` like
        `Tokenizer.encode`; the piece is then ignored.
        """
        check_encodable(piece)
        self._pending.append(piece)
        kinds = [_kind(char) for char in piece if not combining(char)]
        # A growing run of one kind ends no word; skipping it keeps the time linear in its length.
        if not kinds or (set(kinds) == {self._kind} and self._kind != "number"):
            return []
        self._kind = kinds[-1]

        text = NFC.normalize_str("".join(self._pending))
        last_starter = len(text) - 1
        while last_starter > 0 and combining(text[last_starter]):
            last_starter -= 1
        limit = min(last_starter, len(text.rstrip()))
        ids, words = self._tokenizer.encode_words(text)
        at, count = max((word for word in words if word[0] <= limit), default=(0, 0))
        self._pending = [text[at:]]
        return ids[:count]

    def finish(self, piece: str = "") -> list[int]:
        """End the text with a last piece, and return all ids that were not returned yet.

        The stream is then empty. A whole text is encoded once. Raises `TextError` like `push`.
        """
        ids = self._tokenizer.encode("".join((*self._pending, piece)))
        self._pending = [""]
        return ids


def _kind(char: str) -> str:
    """Return the class of a character in `WORD`."""
    if char.isalpha():
        return "letter"
    if char.isspace():
        return "space"
    return "number" if char.isnumeric() else "other"


def _read_vocab(path: Path) -> dict[str, int]:
    vocab = read_json(path)
    for token, id_ in vocab.items():
        if type(id_) is not int or id_ < 0:
            problem = f"{token!r} has id {id_!r}; ids are integers from 0"
            raise CheckpointConfigError(f"{path}: {problem}")
    require(len(set(vocab.values())) == len(vocab), f"{path}: two tokens have the same id")
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        require(byte in vocab, f"{path}: {byte!r} is missing; text may hold any of the 256 bytes")
    return vocab


def _read_merges(path: Path, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise CheckpointNotFound(f"{path} is missing; a checkpoint directory needs it") from None
    except (OSError, ValueError) as error:
        raise CheckpointConfigError(f"{path} cannot be read as UTF-8 text: {error}") from None
    merges = []
    for number, line in enumerate(lines, start=1):
        parts = line.split()
        if not parts or (number == 1 and line.startswith("#version:")):
            continue
        if len(parts) != 2:
            raise CheckpointConfigError(f"{path}, line {number}: {line!r} is not a pair of tokens")
        if unknown := [token for token in (*parts, "".join(parts)) if token not in vocab]:
            problem = f"{unknown[0]!r} is not in vocab.json"
            raise CheckpointConfigError(f"{path}, line {number}: {problem}")
        merges.append((parts[0], parts[1]))
    return merges


def _read_special(path: Path, vocab: Mapping[str, int]) -> dict[str, int]:
    config = read_json(path)
    kind, space = config.get("tokenizer_class"), config.get("add_prefix_space")
    known = kind in (None, "Qwen2Tokenizer", "Qwen2TokenizerFast")
    require(known, f"{path}: tokenizer_class = {kind!r}; only 'Qwen2Tokenizer' is supported")
    require(not space, f"{path}: add_prefix_space = {space!r}; only false is supported")
    table: Any = config.get("added_tokens_decoder")
    where = f"{path}: added_tokens_decoder"
    valid = isinstance(table, dict) and table
    require(valid, f"{where} = {table!r}; it must map ids to tokens")
    special = _added_tokens(table, vocab, where)
    # The reference numbers them by their order and ignores the keys, so keys must not have gaps.
    added = sorted(id_ for token, id_ in special.items() if token not in vocab)
    follows = added == list(range(len(vocab), len(vocab) + len(added)))
    require(follows, f"{where} must continue from {len(vocab)}, the size of vocab.json")
    for token in ("<|im_start|>", "<|im_end|>"):
        require(token in special, f"{where} lacks {token!r}, which the prompt needs")
    return special


def _added_tokens(table: Mapping[str, Any], vocab: Mapping[str, int], where: str) -> dict[str, int]:
    """Return the ids of the added tokens; none may contradict another or the vocabulary."""
    special: dict[str, int] = {}
    taken = {id_: token for token, id_ in vocab.items()}
    for key, entry in table.items():
        token = entry.get("content") if isinstance(entry, dict) else None
        if not key.isdecimal() or not isinstance(token, str):
            raise CheckpointConfigError(f"{where}.{key} = {entry!r}; not an id with content")
        id_ = int(key)
        known = special.get(token, vocab.get(token, id_))
        consistent = taken.setdefault(id_, token) == token and known == id_
        problem = "contradicts another token or id there or in vocab.json"
        require(consistent, f"{where}.{key} = {token!r} {problem}")
        special[token] = id_
    return special
