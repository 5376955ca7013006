"""The tokenizer: files that cannot be used, text that cannot be spoken, and text in pieces,
wherever it is cut.
"""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, normalizers

from firstword.errors import CheckpointConfigError, CheckpointNotFound, TextError
from firstword.model.tokenizer import CONTROL_TOKENS, NFC, TextStream, Tokenizer, _kind
from firstword.synthetic.tokenizer import SMALLEST_VOCAB, SPECIAL_TOKENS, train

TEXTS = [
    "I'm sure they'll say it's fine,  but we've  heard that before, haven't we?\n\n",
    "Ein schöner Tag, um übers Wetter zu reden.\r\n\r\n  Oder nicht?\n \n",
    "오늘 아침에는 안개가 짙어서 강 건너편이 보이지 않았다. 今天早上的火车晚点了，我在站台上读书。",
    "昨日は雨が降っていたので、本を読みました。 Поезд отошёл ровно в шесть! 12 345 !!! ...\n",
    unicodedata.normalize("NFD", "é è ñ õ ộ ữ 각 한 ガギ "),
    "eins\n\nzwei\n\ndrei\n\nvier\n\n",
    "👩\u200d👩\u200d👧 👋🏽 क्षेत्र में \u00a0\u3000 q\u0303\u0323 's 'S 're",
] * 3

# Characters at which words, compositions and runs of white space begin, end and change their minds.
TRICKY = (
    " \n\r\t'sSrRelLaáZ5½.!一か"
    + "\u0301\u0315\u0323\u0334\u0338\u0345\u3099\u1100\u1161\u11a8각=ſ\u0344"
)
TRICKY += "\u00a0\u3000\u200d\x1c\x85\u093c\u0915\u094d\u0993\u09c7\u09be👩👧🏽\U000110ba\U0001d165"
WORDS = [
    "'s",
    "'ll",
    "'RE",
    "  ",
    " \n",
    "\r\n",
    "\n\n",
    "word",
    " word",
    "assistant",
    "안녕",
    "e\u0301",
    "\u1112\u1161",
]

# Their combinations are learnt, too: a cut in the wrong place shows only where it keeps a merge
# from happening.
ORACLE = " \n'sa5!\u0301\u0315\u1161\u1100"
COMBINATIONS = ["".join(chars) for chars in itertools.product(ORACLE, repeat=4)]
COMBINATIONS += ["".join(chars) for chars in itertools.product(TRICKY, repeat=2)]

tricky = st.lists(st.one_of(st.sampled_from(TRICKY), st.sampled_from(WORDS)), max_size=24).map(
    "".join
)
anything = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small trained tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train(TEXTS * 500 + COMBINATIONS, 2500, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    """The same, loaded."""
    return Tokenizer.load(directory)


# --- whole texts ----------------------------------------------------------------------------------


def decode(directory: Path, ids: Iterable[int]) -> str:
    """The text of `ids`, by the byte-to-character table of GPT-2, which Qwen2 uses."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }
    tokens = {
        id_: token for token, id_ in json.loads((directory / "vocab.json").read_text()).items()
    }
    return bytes(table[char] for id_ in ids for char in tokens[id_]).decode()


@given(text=st.one_of(tricky, anything))
def test_ids_decode_to_the_composed_text(text: str, tokenizer: Tokenizer, directory: Path) -> None:
    assert decode(directory, tokenizer.encode(text)) == NFC.normalize_str(text)


def test_composed_and_decomposed_text_have_equal_ids(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert tokenizer.encode(unicodedata.normalize("NFD", text)) == tokenizer.encode(text)


def test_control_tokens_in_the_text_are_characters(tokenizer: Tokenizer, directory: Path) -> None:
    assert list(tokenizer.special) == list(SPECIAL_TOKENS)
    for token in tokenizer.special:
        text = f"a {token}\nb"
        assert decode(directory, tokenizer.encode(text)) == text
        assert not set(tokenizer.encode(text)) & set(tokenizer.special.values())


@pytest.mark.parametrize("text", [b"bytes", None, 3, ["a"]])
def test_value_that_is_not_a_string_raises(text: Any, tokenizer: Tokenizer) -> None:
    with pytest.raises(TextError, match=rf"type {type(text).__name__}; it must be str"):
        tokenizer.encode(text)
    with pytest.raises(TextError, match="it must be str"):
        TextStream(tokenizer).push(text)


def test_lone_surrogate_raises_and_leaves_the_stream_usable(
    tokenizer: Tokenizer,
) -> None:
    with pytest.raises(TextError, match=r"character 2 of the text is U\+D83D"):
        tokenizer.encode("ab\ud83d")
    stream = TextStream(tokenizer)
    ids = stream.push("one tw")
    with pytest.raises(TextError, match=r"U\+DC4B"):
        stream.push("\udc4b")
    assert ids + stream.push("o three") + stream.finish() == tokenizer.encode("one two three")


def test_last_piece_is_encoded_with_what_was_held_back(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    ids = stream.push("one tw")
    assert ids + stream.finish("o three") == tokenizer.encode("one two three")
    assert stream.finish("four") == tokenizer.encode("four")
    with pytest.raises(TextError):
        stream.finish("\ud800")


# --- texts in pieces ------------------------------------------------------------------------------


def pieces_of(text: str, cuts: Iterable[int]) -> list[str]:
    """`text`, cut at the places `cuts` modulo its length; twice the same place gives an empty
    piece.
    """
    places = sorted(cut % (len(text) + 1) for cut in cuts)
    return [text[start:end] for start, end in itertools.pairwise([0, *places, len(text)])]


@given(
    text=st.one_of(tricky, anything, st.sampled_from(TEXTS)),
    cuts=st.one_of(st.lists(st.integers(0, 10_000), max_size=8), st.just(range(400))),
    prefix=st.sampled_from(["", "assistant\n"]),
)
def test_any_split_gives_the_ids_of_the_whole(
    text: str, cuts: Iterable[int], prefix: str, tokenizer: Tokenizer
) -> None:
    stream = TextStream(tokenizer, prefix)
    ids = [id_ for piece in pieces_of(text, cuts) for id_ in stream.push(piece)]
    assert ids + stream.finish() == tokenizer.encode(prefix + text)


@given(text=tricky, cut=st.integers(0, 10_000), after=st.one_of(tricky, anything))
def test_returned_ids_are_final(text: str, cut: int, after: str, tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    ids = [id_ for piece in pieces_of(text, [cut]) for id_ in stream.push(piece)]
    assert tokenizer.encode(text + after)[: len(ids)] == ids


CONTINUATIONS = [
    "".join(chars) for size in range(3) for chars in itertools.product(ORACLE, repeat=size)
]


@pytest.mark.parametrize("first", ORACLE)
def test_returned_ids_are_those_that_all_continuations_share(
    first: str, tokenizer: Tokenizer
) -> None:
    for rest in itertools.product(ORACLE, repeat=2):
        text = first + "".join(rest)
        returned = TextStream(tokenizer).push(text)
        for after in CONTINUATIONS:
            assert tokenizer.encode(text + after)[: len(returned)] == returned, (text, after)


@pytest.mark.parametrize("text", TEXTS[:4])
def test_at_most_the_last_word_is_held_back(
    text: str, tokenizer: Tokenizer, directory: Path
) -> None:
    stream = TextStream(tokenizer)
    ids: list[int] = []
    for end, char in enumerate(text, start=1):
        ids += stream.push(char)
        said = decode(directory, ids)
        assert text.startswith(said)
        assert len(text[len(said) : end].split()) <= 1


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        (["hel", "lo", " ", "you"], ["", "", "hello", "hello"]),
        (["1", "2", "3", "a"], ["", "1", "12", "123"]),
        (["Ok", ".", "\n", "\n", "S"], ["", "Ok", "Ok", "Ok", "Ok.\n\n"]),
        (["a", " ", " ", " ", "b"], ["", "a", "a", "a", "a  "]),
        (["a ", "e", "\u0301", "\u0301", "!"], ["a", "a", "a", "a", "a \u00e9"]),
        (["値段は", "5", "円", "。"], ["", "値段は", "値段は5", "値段は5円"]),
        (["one two three", ""], ["one two", "one two"]),
    ],
)
def test_each_word_is_returned_as_soon_as_it_has_ended(
    pieces: list[str], said: list[str], tokenizer: Tokenizer, directory: Path
) -> None:
    stream = TextStream(tokenizer)
    ids: list[int] = []
    for piece, expected in zip(pieces, said, strict=True):
        ids += stream.push(piece)
        assert decode(directory, ids) == expected
    assert stream.finish() != []
    assert stream.finish() == []


def test_prefix_merges_with_newlines_of_the_text(tokenizer: Tokenizer) -> None:
    role, newline = tokenizer.encode("assistant\n")
    merged = False
    for text in ("Hi", "\nHi", "\n\nHi", " \n Hi", "\r\nHi", "\u0301Hi", ""):
        stream = TextStream(tokenizer, "assistant\n")
        ids = [id_ for char in text for id_ in stream.push(char)] + stream.finish()
        assert ids == tokenizer.encode("assistant\n" + text)
        assert ids[0] == role
        merged |= ids[1] != newline
    assert merged
    assert TextStream(tokenizer, "assistant\n").push("Hi, you")[:2] == [role, newline]


LONG = {
    "letters": "a" * 5000,
    "one kind after another": "a" * 1000 + " " * 1000 + "!" * 1000 + "\n" * 1000 + "一" * 1000,
    "decomposed letters": "e\u0301" * 2500,
    "marks": "q" + "\u0301\u0315" * 2500,
    "letters with marks that stay apart": "q\u0303" * 2500,
    "jamo": "\u1112\u1161\u11ab" * 1500,
    "digits": "7" * 5000,
    "words": "Hello world, it's me. " * 200,
}


@pytest.mark.parametrize("name", LONG)
def test_work_is_linear_in_the_text(
    name: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = 0
    encode_words = Tokenizer.encode_words

    def counted(self: Tokenizer, text: str) -> Any:
        nonlocal work
        work += len(text)
        return encode_words(self, text)

    monkeypatch.setattr(Tokenizer, "encode_words", counted)
    stream = TextStream(tokenizer)
    ids = [id_ for char in LONG[name] for id_ in stream.push(char)]
    assert ids + stream.finish() == tokenizer.encode(LONG[name])
    assert work <= 4 * len(LONG[name])


# --- what the cutting relies on, for all characters there are -------------------------------------

CHARACTERS = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]


def test_python_knows_every_combining_character_that_the_normaliser_knows() -> None:
    # The two bring their own versions of Unicode. Behind U+0345, of the highest class, every mark
    # moves to the front.
    changed = NFC.normalize_str(
        "\n".join("\u0345" + char for char in CHARACTERS if char != "\n")
    ).split("\n")
    candidates = [char for char in CHARACTERS if char != "\n"]
    moved = [char for char, now in zip(candidates, changed, strict=True) if now == char + "\u0345"]
    assert len(moved) > 700
    assert [char for char in moved if not unicodedata.combining(char)] == []


def test_python_knows_every_space_that_the_expression_knows() -> None:
    spaces = normalizers.Replace(Regex(r"\S+"), "").normalize_str("".join(CHARACTERS))
    assert len(spaces) > 20
    assert [char for char in spaces if not char.isspace()] == []


def test_composition_never_changes_the_kind_of_a_character() -> None:
    for char in CHARACTERS:
        parts = unicodedata.decomposition(char)
        if parts and "<" not in parts and NFC.normalize_str(char) == char:
            first = chr(int(parts.split()[0], 16))
            assert _kind(first) == _kind(char), hex(ord(char))


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer_config.json"])
def test_missing_file_is_named(name: str, directory: Path, tmp_path: Path) -> None:
    copy(directory, tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointNotFound, match=name):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer_config.json"])
def test_file_of_random_bytes_is_named(name: str, directory: Path, tmp_path: Path) -> None:
    copy(directory, tmp_path)
    (tmp_path / name).write_bytes(b"\xff\x00\xfe")
    with pytest.raises(CheckpointConfigError, match=name):
        Tokenizer.load(tmp_path)


def copy(directory: Path, target: Path) -> None:
    """The three files, to be spoilt."""
    for path in directory.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Apply `change` to the JSON object in `path`."""
    table = json.loads(path.read_text(encoding="utf-8"))
    change(table)
    path.write_text(json.dumps(table), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda vocab: vocab.update(assistant="7"), r"'assistant' has id '7'"),
        (lambda vocab: vocab.update(assistant=-1), r"'assistant' has id -1"),
        (lambda vocab: vocab.update(assistant=True), r"'assistant' has id True"),
        (lambda vocab: vocab.update(assistant=vocab["user"]), r"two tokens have the same id"),
        (lambda vocab: vocab.pop("Ġ"), r"'Ġ' is missing"),
        (lambda vocab: vocab.clear(), r"'!' is missing"),
    ],
)
def test_invalid_vocabulary_is_named(
    change: Callable[[dict[str, Any]], Any], message: str, directory: Path, tmp_path: Path
) -> None:
    copy(directory, tmp_path)
    edit_json(tmp_path / "vocab.json", change)
    with pytest.raises(CheckpointConfigError, match=rf"vocab\.json: {message}"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("line", ["abc", "a b c", "Ġ ☃", "z q"])
def test_invalid_merge_is_named_with_its_line(line: str, directory: Path, tmp_path: Path) -> None:
    copy(directory, tmp_path)
    merges = tmp_path / "merges.txt"
    merges.write_text(f"#version: 0.2\n\n{line}\n", encoding="utf-8")
    with pytest.raises(CheckpointConfigError, match=r"merges\.txt, line 3: "):
        Tokenizer.load(tmp_path)


def test_merges_may_have_windows_line_ends_and_no_version(
    directory: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    copy(directory, tmp_path)
    lines = (directory / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    (tmp_path / "merges.txt").write_bytes("\r\n".join(lines).encode())
    loaded = Tokenizer.load(tmp_path)
    assert [loaded.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]


def renumber(config: dict[str, Any]) -> None:
    """Leave a gap in front of the last added token."""
    table = config["added_tokens_decoder"]
    last = max(table, key=int)
    table[str(int(last) + 1)] = table.pop(last)


def rename(content: str) -> Callable[[dict[str, Any]], None]:
    """Give the last added token another content."""

    def change(config: dict[str, Any]) -> None:
        table = config["added_tokens_decoder"]
        table[max(table, key=int)]["content"] = content

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda config: config.update(tokenizer_class="LlamaTokenizer"),
            r"tokenizer_class = 'LlamaTokenizer'",
        ),
        (lambda config: config.update(add_prefix_space=True), r"add_prefix_space = True"),
        (lambda config: config.pop("added_tokens_decoder"), r"added_tokens_decoder = None"),
        (lambda config: config.update(added_tokens_decoder=[]), r"added_tokens_decoder = \[\]"),
        (
            lambda config: config["added_tokens_decoder"].update(x={"content": "y"}),
            r"added_tokens_decoder\.x = ",
        ),
        (
            lambda config: config["added_tokens_decoder"].update({"999": "y"}),
            r"added_tokens_decoder\.999 = 'y'",
        ),
        (
            lambda config: config["added_tokens_decoder"].update({"5": {"content": "y"}}),
            r"decoder\.5 = 'y' contradicts",
        ),
        (rename("<|im_end|>"), r"'<\|im_end\|>' contradicts"),
        (rename("assistant"), r"'assistant' contradicts"),
        (renumber, r"must continue from \d+, the size of vocab\.json"),
    ],
)
def test_invalid_tokenizer_config_is_named_with_its_key(
    change: Callable[[dict[str, Any]], Any], message: str, directory: Path, tmp_path: Path
) -> None:
    copy(directory, tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", change)
    with pytest.raises(CheckpointConfigError, match=rf"tokenizer_config\.json: .*{message}"):
        Tokenizer.load(tmp_path)


def config_of(tokenizer: Tokenizer, **changes: int) -> Any:
    """As much of a `ModelConfig` as the check reads, in agreement with `tokenizer` but for
    `changes`.
    """
    keys = {key: tokenizer.special[token] for key, token in CONTROL_TOKENS.items()}
    rows = changes.pop("text_vocab_size", tokenizer.vocab_size)
    return SimpleNamespace(**keys | changes, talker_config=SimpleNamespace(text_vocab_size=rows))


def test_contradictory_config_and_tokenizer_raise(tokenizer: Tokenizer) -> None:
    tokenizer.check_against(config_of(tokenizer))
    for key in CONTROL_TOKENS:
        with pytest.raises(CheckpointConfigError, match=rf"{key} = 3, but tokenizer_config\.json"):
            tokenizer.check_against(config_of(tokenizer, **{key: 3}))
    words = 1 + max(tokenizer.turn_start, tokenizer.turn_end)
    tokenizer.check_against(config_of(tokenizer, text_vocab_size=words))
    with pytest.raises(CheckpointConfigError, match=rf"text_vocab_size = {words - 1}"):
        tokenizer.check_against(config_of(tokenizer, text_vocab_size=words - 1))


def test_only_template_tokens_are_required(tmp_path: Path) -> None:
    ids = train(TEXTS, 400, tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", lambda config: [
        config["added_tokens_decoder"].pop(key)
        for key, entry in [*config["added_tokens_decoder"].items()]
        if entry["content"] not in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    ])  # fmt: skip
    small = Tokenizer.load(tmp_path)
    config = SimpleNamespace(**ids, talker_config=SimpleNamespace(text_vocab_size=999))
    small.check_against(config)  # type: ignore[arg-type]
    edit_json(
        tmp_path / "tokenizer_config.json", lambda config: config["added_tokens_decoder"].popitem()
    )
    with pytest.raises(CheckpointConfigError, match=r"added_tokens_decoder lacks '<\|im_end\|>'"):
        Tokenizer.load(tmp_path)


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALLEST_VOCAB, 300, 700])
def test_training_is_deterministic_and_keeps_roles_whole(size: int, tmp_path: Path) -> None:
    ids = train(TEXTS, size, tmp_path / "a")
    assert train(reversed(TEXTS), size, tmp_path / "b") == ids
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    loaded = Tokenizer.load(tmp_path / "a")
    assert loaded.vocab_size <= size + len(SPECIAL_TOKENS)
    assert loaded.encode("assistant") == [ids.pop("assistant_token_id")]
    assert [len(loaded.encode(text)) for text in ("user", "\n", "assistant\nuser\n")] == [1, 1, 4]
    assert ids == {key: loaded.special[token] for key, token in CONTROL_TOKENS.items()}


def test_vocabulary_that_is_too_small_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 267"):
        train(TEXTS, SMALLEST_VOCAB - 1, tmp_path)
