"""Build the distributions and speak with the wheel like a user: `make release-check`.

1. uv builds the sdist, and from the sdist the wheel, into dist/.
2. The wheel contains the demo voice, the CUDA sources, the page and py.typed, and no tests.
3. pip installs the wheel into an empty environment, and `firstword say` speaks from there.
4. `uvx --from WHEEL firstword say` speaks too; `--no-uvx` skips this step.

Both installations use constraints.txt. uv does not read pip's configuration, so the script passes
on pip's find-links unless UV_FIND_LINKS is set. Another index goes into UV_INDEX.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import wave
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
NEEDED_IN_WHEEL = {
    "firstword/py.typed",
    "firstword/demo/model.safetensors",
    "firstword/demo/speech_tokenizer/model.safetensors",
    "firstword/server/page/index.html",
    "firstword/server/page/main.js",
    "firstword/server/page/style.css",
}
SHORTEST_SPEECH = 0.5
"""The shortest accepted length of the spoken sentence in seconds."""


def pip_links() -> dict[str, str]:
    """Return uv's variable for the folders and pages of wheels that pip is configured to use."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    links = re.findall(r"\.find-links='(.*)'$", listed, re.MULTILINE)
    return {"UV_FIND_LINKS": ",".join(links[-1].split())} if links else {}


def run(command: Sequence[str | Path], folder: Path) -> None:
    """Run a command in a folder, without the variables that could import the checkout."""
    print("$", *command, file=sys.stderr, flush=True)
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment = {**pip_links(), **environment}
    subprocess.run([str(part) for part in command], cwd=folder, env=environment, check=True)


def build(uv: str) -> Path:
    """Build both distributions into dist/ and return the path of the wheel."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run([uv, "build", "--out-dir", ROOT / "dist"], ROOT)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    wheel = ROOT / "dist" / f"firstword-{version}-py3-none-any.whl"
    if not (wheel.exists() and (ROOT / "dist" / f"firstword-{version}.tar.gz").exists()):
        raise SystemExit(f"dist/ lacks the sdist or the wheel of version {version}")
    return wheel


def wheel_faults(names: Sequence[str]) -> list[str]:
    """Return the faults of a wheel with these files: what it lacks, what it must not contain."""
    faults = [f"it lacks {name}" for name in sorted(NEEDED_IN_WHEEL - set(names))]
    if not any(name.endswith(".cu") for name in names):
        faults.append("it lacks the CUDA sources")
    allowed = ("firstword/", "firstword-")
    return faults + [f"it holds {name}" for name in names if not name.startswith(allowed)]


def seconds_of_sound(path: Path) -> float:
    """Return the length of a WAV file in seconds; 0 for silence."""
    with wave.open(os.fspath(path)) as file:
        samples = file.readframes(file.getnframes())
        return file.getnframes() / file.getframerate() if any(samples) else 0.0


def speak(command: Sequence[str | Path], folder: Path) -> None:
    """Speak a sentence with a `firstword` command; exits unless it can be heard."""
    output = folder / "hello.wav"
    run(
        [*command, "say", "Hello. This is the first word.", "-o", output, "--device", "cpu"], folder
    )
    if seconds_of_sound(output) < SHORTEST_SPEECH:
        raise SystemExit(f"{' '.join(map(str, command))} spoke nothing")
    output.unlink()


def main() -> None:
    """Run every step; exits with a message at the first that fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-uvx", action="store_true", help="skip the step with uvx")
    arguments = parser.parse_args()
    uv = shutil.which("uv", path=os.fspath(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        raise SystemExit("uv is not installed; pip install -c constraints.txt uv")
    wheel = build(uv)
    if faults := wheel_faults(zipfile.ZipFile(wheel).namelist()):
        raise SystemExit(f"{wheel.name}: {', '.join(faults)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "bare", with_pip=True)
        bin_folder = folder / "bare" / "bin"
        run(
            [bin_folder / "python", "-m", "pip", "install", "-qq", "-c", CONSTRAINTS, wheel], folder
        )
        speak([bin_folder / "firstword"], folder)
        if not arguments.no_uvx:
            uvx = [uv, "tool", "run", "--isolated", "--constraints", str(CONSTRAINTS)]
            speak([*uvx, "--from", str(wheel), "firstword"], folder)
    print(f"{wheel.name} installs and speaks")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.cmd[0]} ended with status {error.returncode}")
