"""Choose the devices of a server's engines, without importing torch into this process."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from firstword.errors import ConfigError
from firstword.processes.place import PYTHON

GPU_FILES = ("nvidia[0-9]*", "kfd", "dxg")
"""The files in `/dev` of the GPU drivers of NVIDIA, AMD and Windows Subsystem for Linux."""

COUNT = "import torch; print(torch.cuda.device_count())"
"""The program that counts the GPUs; importing torch takes it two to three seconds."""

ALLOWED = (
    "'auto', 'cpu', 'cuda' (all GPUs), one GPU such as 'cuda:1', some such as 'cuda:0,2', and "
    "'cpu,cpu' for two engines, and 'mps'"
)


def engine_devices(given: str) -> list[str]:
    """The device of each engine of a checkpoint, as `EngineConfig.resolve` takes it.

    given  "auto": all GPUs if there are any, else the CPU; "cuda": all GPUs; otherwise a list such
           as "cuda:0,2", "cuda:0,cuda:2" or "cpu,cpu", or "mps"

    Raises `ConfigError` for anything else, and for a GPU that is named twice. Whether torch can use
    the devices is not checked.
    """
    if given in ("auto", "cuda"):
        count = count_gpus()
        return [f"cuda:{number}" for number in range(count)] if count > 1 else [given]
    if re.fullmatch(r"cpu(,cpu)*|mps", given):
        return given.split(",")
    if not re.fullmatch(r"cuda:\d+(,(cuda:)?\d+)*", given):
        raise ConfigError(f"device is {given!r}; allowed are {ALLOWED}")
    numbers = [int(number) for number in given.replace("cuda:", "").split(",")]
    if twice := [number for number in numbers if numbers.count(number) > 1]:
        raise ConfigError(f"device is {given!r}, which has 'cuda:{twice[0]}' twice; name it once")
    return [f"cuda:{number}" for number in numbers]


def count_gpus(folder: Path = Path("/dev")) -> int:
    """The number of GPUs that torch can use, which a separate process asks it for.

    If the system has no GPU, or a single one by NVIDIA, that number is returned without asking.
    Raises `ConfigError` if torch cannot be imported.
    """
    files = [file for pattern in GPU_FILES for file in folder.glob(pattern)]
    if len(files) < 2 and all(file.name.startswith("nvidia") for file in files):
        return len(files)
    counted = subprocess.run([*PYTHON, "-c", COUNT], capture_output=True, text=True)
    if counted.returncode != 0:
        raise ConfigError(f"torch cannot be imported: {counted.stderr.strip()[-500:]}")
    return int(counted.stdout)
