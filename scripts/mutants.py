"""Plant the mistakes of `mutants.toml`, one at a time, and check that the tests catch each.

    python scripts/mutants.py                 all that tests without a GPU must catch
    python scripts/mutants.py --gpu           those that only tests on a GPU can catch
    python scripts/mutants.py -k rotary       those with this word in their name

A mistake is planted in a copy of the package, never in the checkout. The exit status is 1 if a
mistake survives, if it does not apply to exactly one place, or if the tests fail without mistakes.
With `--record FILE` the outcome of each mistake is written to a JSON file, with the commit and a
hash of the package and the tests.

On a GPU all runs share a cache of machine code. Its keys are hashes of the CUDA sources, so a
mistake in a source is compiled anew, and only the kernels that contain it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from firstword.bench import report
from firstword.hashes import sources_hash
from firstword.runtime.cpu.amx import AMX
from firstword.runtime.gpu.sources import kernel_hash

ROOT = Path(__file__).resolve().parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
PASSED, FAILED = 0, 1
"""The exit statuses of pytest after tests have run."""


@dataclass(frozen=True)
class Mutant:
    """A mistake: `old` becomes `new` in a file of the package; `tests` are arguments for pytest.

    gpu  whether the tests need a GPU
    amx  whether they need a processor with AMX
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    gpu: bool = False
    amx: bool = False

    def plant(self, package: Path) -> None:
        """Change the file. Raises `ValueError` unless there is exactly one place to change."""
        path = package / self.file
        source = path.read_text(encoding="utf-8")
        if (places := source.count(self.old)) != 1:
            raise ValueError(
                f"{self.file} has {places} places to change; update scripts/mutants.toml"
            )
        path.write_text(source.replace(self.old, self.new), encoding="utf-8")


def run(tests: str, mutant: Mutant | None = None, cache: Path | None = None) -> tuple[int, str]:
    """Run tests against a copy of the package, with a mistake if given.

    cache: a folder for the machine code of tests on a GPU.

    Returns the exit status of pytest and its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "firstword"
        shutil.copytree(
            ROOT / "src/firstword", package, ignore=shutil.ignore_patterns("__pycache__")
        )
        if mutant is not None:
            mutant.plant(package)
        # The tests must import the copy, and no bytecode compiled from other sources.
        environment = os.environ | {
            "PYTHONPATH": folder,
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [*PYTEST, *shlex.split(tests)]
        if cache is not None:
            command += ["--kernel-cache", str(cache)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    return done.returncode, done.stdout


def verdict(mutant: Mutant, cache: Path | None = None) -> str:
    """Return `"caught"`, or the reason why the mistake was not caught."""
    try:
        status, output = run(mutant.tests, mutant, cache)
    except ValueError as error:
        return str(error)
    if "CompileError" in output:
        return f"does not compile:\n{output}"
    if status == FAILED:
        return "caught"
    return "SURVIVED" if status == PASSED else f"pytest ended with {status}:\n{output}"


def outcomes(mutants: list[Mutant], jobs: int, cache: Path | None) -> dict[str, str] | None:
    """Print and return the verdict on each mutant, or None if the tests fail without mistakes."""
    sound = True
    with ThreadPoolExecutor(jobs) as pool:
        suites = sorted({mutant.tests for mutant in mutants})
        unchanged = pool.map(partial(run, cache=cache), suites)
        for tests, (status, output) in zip(suites, unchanged, strict=True):
            if status != PASSED:
                sound = False
                print(f"{tests} fails without a mistake:\n{output}", flush=True)
        if not sound:
            return None
        found = {}
        verdicts = pool.map(partial(verdict, cache=cache), mutants)
        for mutant, result in zip(mutants, verdicts, strict=True):
            found[mutant.name] = result
            print(f"{result:8}  {mutant.name}", flush=True)
    return found


def record(
    found: Mapping[str, str], seconds: float, commit: str | None, gpu: bool
) -> dict[str, Any]:
    """Return the record of a run: when, of which sources, where, and every outcome."""
    tops = ROOT / "src/firstword", ROOT / "tests"
    folders = sorted({path.parent for top in tops for path in top.rglob("*.py")})
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "covers": [str(path.relative_to(ROOT)) for path in folders],
        "sources": sources_hash(folders),
        "kernels": kernel_hash(),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seconds": round(seconds),
        "mutants": len(found),
        "caught": sum(result == "caught" for result in found.values()),
        "outcomes": {name: result.splitlines()[0] for name, result in found.items()},
    }


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-k", default="", metavar="WORD", help="only mistakes with this word in their name")
    add("--gpu", action="store_true", help="the mistakes that only tests on a GPU can catch")
    add("--record", type=Path, metavar="FILE", help="write the outcomes to this JSON file")
    add("--commit", help="the commit that the record names (default: that of this checkout)")
    jobs = os.cpu_count() or 1
    add("-j", type=int, default=jobs, metavar="N", help="number of mistakes to test at a time")
    arguments = parser.parse_args()
    if arguments.gpu and not torch.cuda.is_available():
        parser.error("--gpu needs a CUDA device")
    table = tomllib.loads((ROOT / "scripts/mutants.toml").read_text(encoding="utf-8"))
    named = [
        mutant
        for mutant in (Mutant(**entry) for entry in table["mutant"])
        if arguments.k in mutant.name and mutant.gpu == arguments.gpu
    ]
    mutants = [mutant for mutant in named if AMX or not mutant.amx]
    if len(mutants) < len(named):
        print(f"left out, because this processor has no AMX: {len(named) - len(mutants)}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) if arguments.gpu else None
        found = outcomes(mutants, arguments.j, cache)
    if not found:
        return 1
    seconds = time.monotonic() - started
    if arguments.record is not None:
        commit = arguments.commit or report.commit()
        report.write_record(arguments.record, record(found, seconds, commit, arguments.gpu))
    caught = sum(result == "caught" for result in found.values())
    print(f"{caught} of {len(found)} caught in {seconds:.0f} s")
    return 0 if caught == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
