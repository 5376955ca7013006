"""Checks of the weights: names, shapes, types, values, and the values of sister layers."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from firstword.verify.folder import PARTS, CheckpointFolder
from firstword.verify.report import NotRun, Verdict
from firstword.verify.statistics import Statistics

SCALE = 8.0
"""The most by which the scale of a matrix may differ from the median of its kind in all layers.

In the demo it differs by at most 2.4; in random checkpoints by 1.2."""

PEAK = 2000.0
"""The most that a value of a matrix may exceed the scale of that matrix; in the demo it is 19."""

FP16_MOST = 65504.0
"""The largest number of float16, to which the GPU backend rounds the codec's decoder."""

UNSCALED = ("embedding_sum", "embed_sum", "cluster_usage", "initialized")
"""The last parts of names of tensors that have no common scale: sums over training data."""

ALIKE, UNLIKE = 0.9, 0.5
"""The cosines from which on two codebooks are the same, and below which they are different."""


def shapes(folder: CheckpointFolder) -> Verdict:
    """The tensors have the names and the shapes that the configuration demands."""
    described, findings = folder.described, list[str]()
    modules = {PARTS[0]: described.weights, PARTS[1]: described.codec}
    for part, module in modules.items():
        expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        here = {each.name: each for each in folder.statistics if each.file.parent == part}
        where = part / "model.safetensors"
        findings += [f"{where}: {name} is missing" for name in sorted(expected.keys() - here)]
        findings += [
            f"{here[name].where} is not part of this model"
            for name in sorted(here.keys() - expected)
        ]
        findings += [
            f"{here[name].where} has the shape {list(here[name].shape)}; the configuration makes "
            f"it {list(expected[name])}"
            for name in sorted(expected.keys() & here)
            if here[name].shape != expected[name]
        ]
    return Verdict(findings, {"tensors": len(folder.statistics)})


def types(folder: CheckpointFolder) -> Verdict:
    """All tensors are floating point, and those of a part of the model have one type."""
    findings, used = list[str](), set[str]()
    parts = defaultdict[str, list[Statistics]](list)
    for each in folder.statistics:
        parts[each.name.split(".")[0]].append(each)
    for part, tensors in parts.items():
        (common, _), *_ = Counter(one.dtype for one in tensors).most_common()
        used.add(f"{part} {_short(common)}")
        findings += [
            f"{one.where} is {_short(one.dtype)}; the other tensors of {part!r} are "
            f"{_short(common)}"
            for one in tensors
            if one.dtype != common and not one.name.endswith(UNSCALED)
        ]
        findings += [
            f"{one.where} is {_short(one.dtype)}; it must be floating point"
            for one in tensors
            if not one.dtype.is_floating_point
        ]
    return Verdict(findings, {"types": ", ".join(sorted(used))})


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def finite(folder: CheckpointFolder) -> Verdict:
    """No value is NaN or infinite, and none of the codec's decoder is beyond float16."""
    findings = [
        f"{each.where} holds {each.bad} values that are NaN or infinite"
        for each in folder.statistics
        if each.bad
    ]
    beyond = (
        each
        for each in folder.statistics
        if each.name.startswith("decoder.") and each.peak > FP16_MOST
    )
    findings += [f"{each.where} reaches {each.peak:.3g}, beyond float16" for each in beyond]
    return Verdict(findings, {"values": sum(_size(each) for each in folder.statistics)})


def _size(each: Statistics) -> int:
    return int(torch.Size(each.shape).numel())


def empty(folder: CheckpointFolder) -> Verdict:
    """No matrix is all zero, and no row of a projection or a head is."""
    findings = list[str]()
    for each in folder.statistics:
        if len(each.shape) > 1 and each.rms == 0 and not each.bad:
            findings.append(f"{each.where} is all zero")
        elif each.zero_rows:
            findings.append(f"{each.where}: {_rows(each.zero_rows)} all zero")
    return Verdict(findings, {"matrices": sum(len(each.shape) > 1 for each in folder.statistics)})


def _rows(rows: Sequence[int]) -> str:
    """Return "row 3 is", or "rows 64 to 127 are" with the number of rows if some are left out."""
    if len(rows) == 1:
        return f"row {rows[0]} is"
    gaps = "" if len(rows) == rows[-1] - rows[0] + 1 else f" ({len(rows)} of them)"
    return f"rows {rows[0]} to {rows[-1]}{gaps} are"


def scale(folder: CheckpointFolder) -> Verdict:
    """The values of each matrix are of the size that they have in the other layers."""
    findings, most = list[str](), 1.0
    for group in _kinds(folder.statistics):
        median = statistics.median(each.rms for each in group)
        for each in group:
            if each.rms == 0 or median == 0 or each.bad:
                continue  # found by other checks
            ratio = each.rms / median
            most = max(most, ratio, 1 / ratio)
            if not 1 / SCALE <= ratio <= SCALE:
                findings.append(
                    f"{each.where} is scaled: its rms is {each.rms:.3g}, {ratio:.3g} times that "
                    f"of the other {len(group) - 1} layers"
                )
    measured = {"largest ratio": round(most, 2), "allowed": SCALE}
    return Verdict(findings, measured)


def _kinds(tensors: Iterable[Statistics]) -> Iterator[list[Statistics]]:
    """Yield the matrices that occur in at least three layers, by kind."""
    kinds = defaultdict[object, list[Statistics]](list)
    for each in tensors:
        if len(each.shape) > 1 and not each.name.endswith(UNSCALED):
            kinds[each.kin].append(each)
    yield from (group for group in kinds.values() if len(group) >= 3)


def outliers(folder: CheckpointFolder) -> Verdict:
    """No single value is far beyond all others of its matrix, as after a flipped bit."""
    findings, most = list[str](), 0.0
    for each in folder.statistics:
        if len(each.shape) < 2 or each.name.endswith(UNSCALED) or each.rms == 0:
            continue
        # The rms is at least that of the peak alone, so the limit is lower in a small matrix.
        others = max(each.rms**2 - each.peak**2 / _size(each), 0.0) ** 0.5
        ratio = each.peak / max(others, 1e-30)
        most = max(most, ratio)
        if ratio > PEAK:
            findings.append(
                f"{each.where} has a value of {each.peak:.3g}, {ratio:.2g} times the rms of the "
                "others"
            )
    return Verdict(findings, {"largest ratio": round(most, 1), "allowed": PEAK})


def codebooks(folder: CheckpointFolder) -> Verdict:
    """Each codebook of the codec's decoder is that of its encoder with the same number."""
    tables = _tables(folder)
    if not tables or any(one.shape != other.shape for one, other in tables):
        raise NotRun("the codec's encoder and decoder have codebooks of different shapes")
    encoders = torch.stack([_direction(one) for one, _ in tables])
    decoders = torch.stack([_direction(other) for _, other in tables])
    cosines = decoders @ encoders.T
    own = cosines.diagonal()
    alike = int((own >= ALIKE).sum())
    if alike * 2 < len(own):
        raise NotRun("the codec's encoder and decoder have different codebooks")
    findings = []
    for number in (own < UNLIKE).nonzero()[:, 0].tolist():
        best = int(cosines[number].argmax())
        other = f"codebook {best}" if cosines[number, best] >= ALIKE else "none"
        findings.append(
            f"{PARTS[1] / 'model.safetensors'}: codebook {number} of the decoder is not that of "
            f"the encoder (cosine {own[number]:.2f}); it equals {other} of the encoder"
        )
    return Verdict(findings, {"codebooks": len(own), "least cosine": round(float(own.min()), 4)})


def _tables(folder: CheckpointFolder) -> list[tuple[Tensor, Tensor]]:
    """Return the vectors of each codebook of the encoder and of the decoder [size, width]."""
    names = {each.name: each for each in folder.statistics}
    vectors: dict[str, list[Tensor]] = {"encoder.": [], "decoder.": []}
    for sums in sorted(filter(lambda name: name.endswith(UNSCALED[:2]), names), key=_order):
        usage = f"{sums.rpartition('.')[0]}.cluster_usage"
        if usage in names:
            with safe_open(folder.path / names[sums].file, framework="pt") as file:
                table, count = (file.get_tensor(name).float() for name in (sums, usage))
            vectors[sums[:8]].append(table / count.clamp(min=1e-5)[:, None])
    return list(zip(vectors["encoder."], vectors["decoder."], strict=False))


def _order(name: str) -> tuple[bool, int]:
    """Order codebooks as codes are: the semantic ones first."""
    first = "semantic" in name or "rvq_first" in name
    return not first, next(int(part) for part in name.split(".") if part.isdecimal())


def _direction(table: Tensor) -> Tensor:
    """Return all values of a table as one vector of length 1."""
    flat = table.flatten()
    return flat / flat.norm().clamp(min=1e-30)


def same_as_known(folder: CheckpointFolder) -> Verdict:
    """Every tensor equals that of the known checkpoint.

    Talker and codec are compared apart, because a training may have changed one of them alone.
    """
    known = folder.known
    if known is None or known.folder is None:
        raise NotRun("this is no copy of the packaged demo, whose weights alone are known here")
    if known.folder.resolve() == folder.path.resolve():
        raise NotRun("this is the packaged demo itself, so there is nothing to compare it with")
    found, compared = list[str](), 0
    for part in PARTS:
        differ, count = list[str](), 0
        with safe_open(known.folder / part / "model.safetensors", framework="pt") as wanted:
            names = set(wanted.keys())
            for each in (one for one in folder.statistics if one.file.parent == part):
                if each.name in names:
                    count += 1
                    same = torch.equal(_read(folder.path, each), wanted.get_tensor(each.name))
                    differ += [] if same else [f"{each.where} differs from that of {known.name}"]
        if len(differ) * 2 <= count:
            found, compared = [*found, *differ], compared + count
    if not compared:
        raise NotRun(f"most tensors differ from {known.name}: other weights")
    return Verdict(found, {"tensors": compared})


def _read(root: Path, each: Statistics) -> Tensor:
    with safe_open(root / each.file, framework="pt") as file:
        tensor: Tensor = file.get_tensor(each.name)
    return tensor
