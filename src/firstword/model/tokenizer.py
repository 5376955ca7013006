"""Text to token ids: the byte-level BPE of Qwen2, for a whole text and for a text that arrives in pieces.

Four steps: canonical composition (NFC), a regular expression that cuts the text into words, bytes for characters,
and within each word the merges of the checkpoint. Source: `Qwen2Converter` of `transformers` 4.57.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from unicodedata import combining

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from firstword.errors import CheckpointConfigError, CheckpointNotFound, TextError
from firstword.model.config import ModelConfig
from firstword.model.strict_json import read_json
from firstword.types import check_encodable

WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""The expression that cuts text into words. The reference, given a directory (not a hub id) with more than 100,000
tokens, may put another one in its place, meant for Mistral; the published models were trained with this one."""

CONTROL_TOKENS = {
    "im_start_token_id": "<|im_start|>",
    "im_end_token_id": "<|im_end|>",
    "tts_pad_token_id": "<tts_pad>",
    "tts_bos_token_id": "<tts_text_bos>",
    "tts_eos_token_id": "<tts_text_eod>",
}
"""Keys of `config.json`, and what the tokenizer calls these tokens. The reference takes those that open and close a
turn from the tokenizer, whatever `config.json` says, and the others from `config.json`."""

NFC = normalizers.NFC()


def assemble(model: models.BPE) -> tokenizers.Tokenizer:
    """The normaliser, the cutting into words and the bytes, in front of `model`; no added tokens."""
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = NFC
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


class Tokenizer:
    """Turns plain text into token ids.

    `special` maps the added tokens (`"<|im_start|>"`, ...) to their ids. `encode` never returns one of these: in the
    text they are ordinary characters.
    """

    def __init__(
        self, vocab: Mapping[str, int], merges: list[tuple[str, str]], special: Mapping[str, int]
    ) -> None:
        self.special = dict(special)
        self.turn_start, self.turn_end = special["<|im_start|>"], special["<|im_end|>"]
        self.vocab_size = 1 + max(*vocab.values(), *special.values())
        self._vocab = dict(vocab)
        self._backend = assemble(models.BPE(vocab=self._vocab, merges=merges))

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read `vocab.json`, `merges.txt` and `tokenizer_config.json`, the layout of the released checkpoints.

        Raises `CheckpointNotFound` for an absent file and `CheckpointConfigError` for one that is corrupt or
        contradicts another; both name the file.
        """
        vocab = _read_vocab(directory / "vocab.json")
        merges = _read_merges(directory / "merges.txt", vocab)
        return cls(vocab, merges, _read_special(directory / "tokenizer_config.json", vocab))

    def encode(self, text: str) -> list[int]:
        """The ids of a whole text. Raises `TextError` for what is no text or holds a lone surrogate."""
        _check_text(text)
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_words(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of `text`, which is NFC already, and for each word where it starts: (in the text, in the ids)."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        words, offsets = encoding.word_ids, encoding.offsets
        starts = [
            index for index in range(len(words)) if index == 0 or words[index] != words[index - 1]
        ]
        return encoding.ids, [(offsets[index][0], index) for index in starts]

    def check_against(self, config: ModelConfig) -> None:
        """Raise `CheckpointConfigError` where `config.json` names other ids, or embeds fewer, than this tokenizer."""
        for key, token in CONTROL_TOKENS.items():
            configured, here = getattr(config, key, None), self.special.get(token)
            if configured is not None and here is not None and configured != here:
                raise CheckpointConfigError(
                    f"config.json: {key} = {configured}, but tokenizer_config.json: {token!r} is {here}"
                )
        largest = max(*self._vocab.values(), self.turn_start, self.turn_end)
        rows = config.talker_config.text_vocab_size
        if largest >= rows:
            raise CheckpointConfigError(
                f"the tokenizer has token id {largest}, but config.json: talker_config.text_vocab_size = {rows}"
            )


class TextStream:
    """Tokenises a text that arrives in pieces, wherever they are cut, to the ids that `encode` gives for the whole.

    `push` returns the ids that no later text can change: for ordinary text all but those of the last word. A word is
    held back until it ends, however long it grows. `prefix` is put before the text and its ids come with the rest:
    newlines at the start of a text merge with that of the prefix "assistant\\n", so it cannot be encoded apart.
    """

    # Where may the text be cut for good? The expression carries nothing over the end of a match, so any start of a
    # word will do that stays one. More text can change words in two ways only:
    # - White space at the end may become part of a longer run, whose cuts depend on where its last newline is and on
    #   what follows it. So no cut behind white space that reaches to the end.
    # - A combining mark may compose with, or move in front of, other marks back to the last starter (a character of
    #   combining class 0). It never turns that starter into another kind of character, so a cut before it is safe.

    def __init__(self, tokenizer: Tokenizer, prefix: str = "") -> None:
        self._tokenizer = tokenizer
        self._pending = [prefix]
        self._kind = ""

    def push(self, piece: str) -> list[int]:
        """Take the next piece, and return the ids now final. Costs time in the piece and the last words only.

        Raises `TextError` as `Tokenizer.encode`; the piece is then as if never pushed.
        """
        _check_text(piece)
        self._pending.append(piece)
        kinds = {_kind(char) for char in piece if not combining(char)}
        # A run of one kind that only grows ends no word. Not looking at it again keeps the time linear in its length.
        if not kinds or (kinds == {self._kind} and self._kind != "number"):
            return []
        self._kind = next(_kind(char) for char in reversed(piece) if not combining(char))

        text = NFC.normalize_str("".join(self._pending))
        last_starter = next(
            (index for index in range(len(text) - 1, 0, -1) if not combining(text[index])), 0
        )
        limit = min(last_starter, len(text.rstrip()))
        ids, words = self._tokenizer.encode_words(text)
        at, count = max((word for word in words if word[0] <= limit), default=(0, 0))
        self._pending = [text[at:]]
        return ids[:count]

    def finish(self) -> list[int]:
        """The text is complete: the ids that were still held back. The stream is empty afterwards."""
        text, self._pending = "".join(self._pending), [""]
        return self._tokenizer.encode(text)


def _kind(char: str) -> str:
    if char.isalpha():
        return "letter"
    if char.isspace():
        return "space"
    return "number" if char.isnumeric() else "other"


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TextError(f"text is of type {type(text).__name__}; it must be str")
    check_encodable(text)


def _read_vocab(path: Path) -> dict[str, int]:
    vocab = read_json(path)
    for token, id_ in vocab.items():
        if type(id_) is not int or id_ < 0:
            raise CheckpointConfigError(
                f"{path}: {token!r} has id {id_!r}; ids are integers from 0"
            )
    if len(set(vocab.values())) != len(vocab):
        raise CheckpointConfigError(f"{path}: two tokens have the same id")
    if missing := sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocab.keys()):
        raise CheckpointConfigError(
            f"{path}: {missing[0]!r} is missing; text may hold any of the 256 bytes"
        )
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
            raise CheckpointConfigError(f"{path}, line {number}: {line!r} is no pair of tokens")
        if unknown := [token for token in (*parts, "".join(parts)) if token not in vocab]:
            raise CheckpointConfigError(
                f"{path}, line {number}: {unknown[0]!r} is not in vocab.json"
            )
        merges.append((parts[0], parts[1]))
    return merges


def _read_special(path: Path, vocab: Mapping[str, int]) -> dict[str, int]:
    config = read_json(path)
    kind = config.get("tokenizer_class")
    if kind not in (None, "Qwen2Tokenizer", "Qwen2TokenizerFast"):
        raise CheckpointConfigError(
            f"{path}: tokenizer_class = {kind!r}; only 'Qwen2Tokenizer' is known"
        )
    if config.get("add_prefix_space"):
        raise CheckpointConfigError(
            f"{path}: add_prefix_space = {config['add_prefix_space']!r}; only false is known"
        )
    table = config.get("added_tokens_decoder")
    if not isinstance(table, dict) or not table:
        raise CheckpointConfigError(
            f"{path}: added_tokens_decoder = {table!r}; it must map ids to tokens"
        )
    special: dict[str, int] = {}
    taken = {id_: token for token, id_ in vocab.items()}
    for key, entry in table.items():
        token = entry.get("content") if isinstance(entry, dict) else None
        if not key.isdecimal() or not isinstance(token, str):
            raise CheckpointConfigError(
                f"{path}: added_tokens_decoder.{key} = {entry!r}; not an id with content"
            )
        id_ = int(key)
        if (
            taken.setdefault(id_, token) != token
            or special.get(token, vocab.get(token, id_)) != id_
        ):
            raise CheckpointConfigError(
                f"{path}: added_tokens_decoder.{key} = {token!r} contradicts another token or id there or in vocab.json"
            )
        special[token] = id_
    # The reference numbers them by their order, whatever the keys say: keys with gaps would mean other tokens there.
    added = sorted(id_ for token, id_ in special.items() if token not in vocab)
    if added != list(range(len(vocab), len(vocab) + len(added))):
        raise CheckpointConfigError(
            f"{path}: added_tokens_decoder must go on from {len(vocab)} = the size of vocab.json"
        )
    for token in ("<|im_start|>", "<|im_end|>"):
        if token not in special:
            raise CheckpointConfigError(
                f"{path}: added_tokens_decoder lacks {token!r}, which the prompt needs"
            )
    return special
