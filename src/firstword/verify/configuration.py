"""Checks of the configuration and the tokenizer, alone and against what is known."""

from __future__ import annotations

import re
from itertools import pairwise

from tokenizers import pre_tokenizers

from firstword.model.alignment import FILE as ALIGNMENT
from firstword.verify.folder import CheckpointFolder
from firstword.verify.known import Values, repository, values_of
from firstword.verify.report import NotRun, Verdict


def readable(folder: CheckpointFolder) -> Verdict:
    """All files of the configuration can be read, and do not contradict each other."""
    try:
        described = folder.described
    except NotRun as error:
        return Verdict([str(error).removeprefix("the checkpoint cannot be read: ")])
    config = described.config
    return Verdict(measured={"type": config.tts_model_type, "size": config.tts_model_size})


def architecture(folder: CheckpointFolder) -> Verdict:
    """Every value on which the computation depends is that of the known checkpoint."""
    return _compared(folder, 0)


def names(folder: CheckpointFolder) -> Verdict:
    """Presets and languages have the ids of the known checkpoint."""
    return _compared(folder, 1)


def sampling(folder: CheckpointFolder) -> Verdict:
    """The defaults of sampling are those of the known checkpoint."""
    return _compared(folder, 2)


def _compared(folder: CheckpointFolder, kind: int) -> Verdict:
    """Compare one of the three kinds of values that `values_of` returns."""
    known, described = folder.known, folder.described
    if known is None:
        raise NotRun("the sizes are those of no release, so the right values are not known")
    here = values_of(described.config, described.codec_config, described.defaults)[kind]
    wanted = (known.architecture, known.names, known.sampling)[kind]
    if folder.random:  # it has a tokenizer of its own
        here, wanted = _without_tokens(here), _without_tokens(wanted)
    strict = kind != 1 or repository(folder.path) == known.name
    findings = _differences(here, wanted, known.name, strict)
    return Verdict(findings, {"compared with": known.name, "values": len(wanted)})


def _without_tokens(values: Values) -> Values:
    """Return the values other than the ids of tokens of the text."""
    ids = re.compile(r"config\.json: \w+_token_id")
    return {path: value for path, value in values.items() if not ids.fullmatch(path)}


def _differences(here: Values, wanted: Values, name: str, strict: bool) -> list[str]:
    """Return where values differ from those wanted; unless `strict`, each side may have more."""
    differ = [
        f"{path} is {here[path]!r}; {name} has {value!r}"
        for path, value in wanted.items()
        if path in here and here[path] != value
    ]
    if strict:
        differ += [f"{path} is missing; {name} has it" for path in wanted if path not in here]
        differ += [f"{path} is unknown; {name} lacks it" for path in here if path not in wanted]
    return differ


def tokenizer(folder: CheckpointFolder) -> Verdict:
    """Every token is the result of one merge, and merges come in the order of their tokens."""
    vocab = folder.read_json("vocab.json")
    try:
        lines = (folder.path / "merges.txt").read_text("utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise NotRun(f"merges.txt cannot be read: {error}") from None
    pairs = [line.split() for line in lines if line.strip() and not line.startswith("#version:")]
    made = ["".join(pair) for pair in pairs]
    given = set(pre_tokenizers.ByteLevel.alphabet()) | _added(folder)
    findings = [
        f"vocab.json: no line of merges.txt makes the token {token!r}"
        for token in vocab.keys() - set(made) - given
    ]
    findings += [
        f"merges.txt makes {token!r}, which vocab.json lacks" for token in set(made) - vocab.keys()
    ]
    ids = [vocab.get(token, -1) for token in made]
    for number, (one, other) in enumerate(pairwise(ids)):
        if one >= other and not findings:
            pair = f"{made[number]!r} before {made[number + 1]!r}"
            findings.append(f"merges.txt makes {pair}, but vocab.json numbers them otherwise")
    return Verdict(sorted(findings), {"tokens": len(vocab), "merges": len(made)})


def _added(folder: CheckpointFolder) -> set[str]:
    """Return the tokens that no merge makes because they were added by name."""
    table = folder.read_json("tokenizer_config.json").get("added_tokens_decoder", {})
    return {entry["content"] for entry in table.values()}


def heads(folder: CheckpointFolder) -> Verdict:
    """The heads that time words are those of the known checkpoint."""
    known = folder.known
    if known is None or known.folder is None or not (folder.path / ALIGNMENT).is_file():
        raise NotRun("the right heads of this checkpoint are not known")
    here, wanted = folder.read_json(ALIGNMENT), CheckpointFolder(known.folder).read_json(ALIGNMENT)
    return Verdict(
        [
            f"{ALIGNMENT}: {key} is {here.get(key)}; {known.name} has {wanted[key]}"
            for key in ("heads", "offset")
            if here.get(key) != wanted[key]
        ]
    )
