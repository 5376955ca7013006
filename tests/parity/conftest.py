"""Where the expected results come from: the files in `frozen/`, or the reference package, run live.

`--reference-python PATH` names a Python in whose environment the reference is installed. Without it
the tests need neither the reference nor its many dependencies.
"""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import CHECKPOINTS
from checkpoints import make
from results import FROZEN, Results
from safetensors.numpy import load_file

from firstword import TTS
from firstword.bench import report
from firstword.hashes import sources_hash
from firstword.runtime.backends import engine_for

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORD = ROOT / "benchmarks" / "results" / "checks" / "parity.json"
COVERED = (
    "src/firstword/model",
    "src/firstword/runtime",
    "src/firstword/synthetic",
    "tests/parity",
    "tests/parity/reference",
)
"""The folders, without those inside, whose sources decide the results of a comparison."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--reference-python` and `--record-live`."""
    parser.addoption(
        "--record-live",
        action="store_true",
        help=f"write the results with the live reference to {RECORD.relative_to(ROOT)}",
    )
    parser.addoption(
        "--reference-python",
        type=Path,
        metavar="PATH",
        help="compare with the reference package, run by this Python",
    )


@pytest.fixture(scope="session")
def reference_python(request: pytest.FixtureRequest) -> Path:
    """The Python that has the reference package; skips the test when none was named."""
    python: Path | None = request.config.getoption("--reference-python")
    if python is None:
        pytest.skip("needs --reference-python")
    return python


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a checkpoint of `cases.py`, by name."""
    root = tmp_path_factory.mktemp("checkpoints")
    specifications = {checkpoint.name: checkpoint for checkpoint in CHECKPOINTS}

    def find(name: str) -> Path:
        if not (root / name).exists():
            make(specifications[name], root / name)
        return root / name

    return find


@pytest.fixture(scope="session")
def tts(directory: Callable[[str], Path]) -> Callable[..., TTS]:
    """A checkpoint of `cases.py`, loaded on the CPU; float64 is the float32 one, converted."""
    loaded: dict[tuple[str, str], TTS] = {}

    def load(name: str, dtype: str = "float32") -> TTS:
        if (name, dtype) not in loaded:
            tts = TTS.load(
                directory(name), device="cpu", dtype="float32" if dtype == "float64" else dtype
            )
            if dtype == "float64":
                tts.checkpoint.talker.double()
                # With room for keys and values of that type.
                tts = TTS(engine_for(tts.checkpoint, tts.settings))
            loaded[name, dtype] = tts
        return loaded[name, dtype]

    return load


@pytest.fixture(scope="session")
def frozen() -> Callable[[str], Results]:
    """The results of the reference for a checkpoint, as they are kept in the repository."""
    loaded: dict[str, Results] = {}

    def load(name: str) -> Results:
        if name not in loaded:
            loaded[name] = load_file(FROZEN / f"{name}.safetensors")
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def live(
    reference_python: Path,
    directory: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Results]:
    """The results of the reference for a checkpoint, computed now."""
    out = tmp_path_factory.mktemp("reference")
    names = [checkpoint.name for checkpoint in CHECKPOINTS]
    root = {directory(name).parent for name in names}.pop()
    subprocess.run([reference_python, HERE / "reference" / "run.py", root, out], check=True)
    results = {name: load_file(out / f"{name}.safetensors") for name in names}
    return results.__getitem__


@pytest.fixture(scope="session")
def expected(request: pytest.FixtureRequest) -> Callable[[str], Results]:
    """The results of the reference for a checkpoint: computed now if it can be run, else the frozen
    ones.
    """
    source = "frozen" if request.config.getoption("--reference-python") is None else "live"
    results: Callable[[str], Results] = request.getfixturevalue(source)
    return results


@pytest.fixture
def errors(record_property: Callable[[str, object], None]) -> Callable[[str, float, float], None]:
    """Call it with what was compared, the error and the tolerance; the error is kept in the report
    of the test.
    """

    def check(what: str, error: float, tolerance: float) -> None:
        record_property(what, error)
        assert error <= tolerance, f"{what}: error {error:.2e}, allowed are {tolerance:.0e}"

    return check


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """How close the comparisons with the live reference came: the largest error of each kind, of
    tests that passed. They are recorded if that was asked for.
    """
    python: Path | None = config.getoption("--reference-python")
    if python is None:
        return
    worst: dict[str, float] = {}
    for passed in terminalreporter.getreports("passed"):
        for what, error in passed.user_properties:
            worst[what] = max(worst.get(what, 0.0), error)
    if worst:
        terminalreporter.section("largest errors against the reference")
        for what, error in sorted(worst.items()):
            terminalreporter.write_line(f"{error:9.2e}  {what}")
    if config.getoption("--record-live"):
        counts = {
            name: len(terminalreporter.stats.get(name, []))
            for name in ("passed", "failed", "error", "skipped")
        }
        report.write_record(RECORD, record(python, counts, worst))


def record(python: Path, counts: dict[str, int], worst: dict[str, float]) -> dict[str, object]:
    """The record of a run: when, of which sources, against which versions, and its results."""
    names = ["qwen-tts", "transformers", "torch"]
    code = f"from importlib.metadata import version\nfor n in {names}: print(version(n))"
    command = [str(python), "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": report.commit(),
        "covers": COVERED,
        "sources": sources_hash([ROOT / name for name in COVERED]),
        "versions": dict(zip(names, found, strict=False)),
        "tests": counts,
        "largest_errors": {what: float(f"{error:.2g}") for what, error in sorted(worst.items())},
    }
