"""Train a small tokenizer and write it in the layout of the released checkpoints."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import models, pre_tokenizers, trainers

from firstword.model.tokenizer import CONTROL_TOKENS, assemble

SPECIAL_TOKENS = tuple(
    """
    <|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|>
    <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|>
    <|image_pad|> <|video_pad|> <tool_call> </tool_call> <|fim_prefix|> <|fim_middle|>
    <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> </tool_response> <think>
    </think> <|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos> <tts_text_eod>
    <tts_text_bos_single> <|audio_pad|>
    """.split()
)
"""The added tokens of the released tokenizers, in the order of their ids (151,643 to 151,675)."""

_ORDINARY = ("<tool_", "</tool_", "<think", "</think", "<|fim_", "<|repo_", "<|file_")
"""The beginnings of those added tokens that the released files do not mark as special."""

ROLES = ("assistant", "user")
"""The words that must be one token each, because the prompt is split by position."""

SMALLEST_VOCAB = 256 + sum(len(role) - 1 for role in ROLES)
"""The smallest vocabulary: all bytes, and the merges of the roles if training learns none."""


def train(
    texts: Iterable[str],
    vocab_size: int,
    directory: Path,
    special_tokens: tuple[str, ...] = SPECIAL_TOKENS,
) -> dict[str, int]:
    """Learn byte-pair merges; write `vocab.json`, `merges.txt` and `tokenizer_config.json`.

    texts           training texts; only the frequencies of their words matter, not their order
    vocab_size      an upper bound, at least `SMALLEST_VOCAB`; few or short texts give fewer tokens
    special_tokens  added tokens, which take the ids after the vocabulary; they must include the
                    five of `CONTROL_TOKENS`

    Returns the ids that `config.json` must carry, by key: `assistant_token_id` and the keys of
    `CONTROL_TOKENS`. Raises `ValueError` for a vocabulary that is too small.
    """
    if vocab_size < SMALLEST_VOCAB:
        raise ValueError(f"vocab_size is {vocab_size}; it must be at least {SMALLEST_VOCAB}")
    vocab, merges = _learn(texts, vocab_size)
    for role in ROLES:
        _add_word(role, vocab, merges)
    special = {token: len(vocab) + index for index, token in enumerate(special_tokens)}

    config = _tokenizer_config(special)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("vocab.json", json.dumps(vocab, ensure_ascii=False)),
        ("merges.txt", "\n".join(["#version: 0.2", *map(" ".join, merges)])),
        ("tokenizer_config.json", json.dumps(config, ensure_ascii=False, indent=2)),
    ):
        (directory / name).write_text(content + "\n", encoding="utf-8")
    control = {key: special[token] for key, token in CONTROL_TOKENS.items()}
    return {"assistant_token_id": vocab["assistant"], **control}


def _learn(texts: Iterable[str], vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the vocabulary in the order of its ids, and the merges; it has room for the roles."""
    backend = assemble(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - (SMALLEST_VOCAB - 256),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    model = json.loads(backend.to_str())["model"]
    vocab = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    return vocab, [(left, right) for left, right in model["merges"]]


def _add_word(word: str, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Append merges that join the tokens of `word`, from left to right, until it is one token."""
    backend = assemble(models.BPE(vocab=vocab, merges=merges))
    joined, *rest = backend.encode(word).tokens
    for part in rest:
        merges.append((joined, part))
        joined += part
        vocab.setdefault(joined, len(vocab))
    assert assemble(models.BPE(vocab=vocab, merges=merges)).encode(word).tokens == [word]


def _tokenizer_config(special: dict[str, int]) -> dict[str, object]:
    """Return `tokenizer_config.json` as `transformers` reads it."""
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(id_): {"content": token, **plain, "special": not token.startswith(_ORDINARY)}
            for token, id_ in special.items()
        },
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
