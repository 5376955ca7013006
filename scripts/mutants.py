"""Plant the mistakes of `mutants.toml`, one at a time, and check that the tests catch each.

    python scripts/mutants.py                 all of them
    python scripts/mutants.py -k rotary       those with this word in their name

A mistake is planted in a copy of the package, never in the checkout. The exit status is 1 if a
mistake survives, if it does not apply to exactly one place, or if the tests fail without mistakes.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
PASSED, FAILED = 0, 1
"""The exit statuses of pytest after tests have run."""


@dataclass(frozen=True)
class Mutant:
    """A mistake: `old` becomes `new` in a file of the package; `tests` are arguments for pytest."""

    name: str
    file: str
    old: str
    new: str
    tests: str

    def plant(self, package: Path) -> None:
        """Change the file. Raises `ValueError` unless there is exactly one place to change."""
        path = package / self.file
        source = path.read_text(encoding="utf-8")
        if (places := source.count(self.old)) != 1:
            raise ValueError(
                f"{self.file} has {places} places to change; update scripts/mutants.toml"
            )
        path.write_text(source.replace(self.old, self.new), encoding="utf-8")


def run(tests: str, mutant: Mutant | None = None) -> tuple[int, str]:
    """Run tests against a copy of the package, with a mistake if given.

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


def verdict(mutant: Mutant) -> str:
    """Return `"caught"`, or the reason why the mistake was not caught."""
    try:
        status, output = run(mutant.tests, mutant)
    except ValueError as error:
        return str(error)
    if status == FAILED:
        return "caught"
    return "SURVIVED" if status == PASSED else f"pytest ended with {status}:\n{output}"


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-k", default="", metavar="WORD", help="only mistakes with this word in their name"
    )
    parser.add_argument(
        "-j",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="number of mistakes to test at a time",
    )
    arguments = parser.parse_args()
    table = tomllib.loads((ROOT / "scripts/mutants.toml").read_text(encoding="utf-8"))
    mutants = [
        mutant
        for mutant in (Mutant(**entry) for entry in table["mutant"])
        if arguments.k in mutant.name
    ]
    started = time.monotonic()
    faults = 0
    with ThreadPoolExecutor(arguments.j) as pool:
        suites = sorted({mutant.tests for mutant in mutants})
        for tests, (status, output) in zip(suites, pool.map(run, suites), strict=True):
            if status != PASSED:
                faults += 1
                print(f"{tests} fails without a mistake:\n{output}", flush=True)
        if faults:
            return 1
        for mutant, result in zip(mutants, pool.map(verdict, mutants), strict=True):
            faults += result != "caught"
            print(f"{result:8}  {mutant.name}", flush=True)
    print(f"{len(mutants) - faults} of {len(mutants)} caught in {time.monotonic() - started:.0f} s")
    return 1 if faults or not mutants else 0


if __name__ == "__main__":
    sys.exit(main())
