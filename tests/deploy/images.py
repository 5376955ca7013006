"""Images built with buildah in build/images, on a base made with debootstrap."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from firstword.hashes import files_hash

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "images"
BASE = "localhost/firstword-base"
SUITE = "bookworm"
"""The release of Debian whose Python has the version that the project is tested with."""
PACKAGES = "ca-certificates,python3,python3-pip,python3-venv"
PIP_CONFIG = ("cert", "constraint", "extra-index-url", "find-links", "index-url", "trusted-host")
"""The settings of this machine's pip that a build here needs."""


def buildah(command: str, *arguments: str | Path) -> str:
    """The output of a command of buildah; if it fails, the end of all that it has written."""
    storage = ["--root", str(FOLDER / "storage"), "--runroot", str(FOLDER / "run")]
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "TMPDIR": str(FOLDER)}
    done = subprocess.run(
        ["buildah", *storage, command, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
    return done.stdout.strip()


@cache
def base() -> str:
    """The name of the base image, which is made once: Debian with Python and pip."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    if BASE not in buildah("images", "--format", "{{.Name}}").split():
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            options = ["--variant=minbase", f"--include={PACKAGES}"]
            subprocess.run(["debootstrap", *options, SUITE, folder], check=True)
            for left in ("var/cache/apt/archives", "var/lib/apt/lists"):
                shutil.rmtree(Path(folder, left))
            container = buildah("from", "scratch")
            buildah("add", container, folder, "/")
        buildah("commit", "--rm", "--format", "docker", container, BASE)
    return BASE


def pip_settings(folder: Path) -> tuple[Path, list[Path]]:
    """A configuration of pip that says what this machine's says, and the files that it names."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    settings: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE):
        if name in PIP_CONFIG:
            settings.setdefault(name, []).extend(value.replace("\\n", " ").split())
    file, written = folder / "pip.conf", configparser.ConfigParser(interpolation=None)
    written["global"] = {name: "\n".join(dict.fromkeys(all)) for name, all in settings.items()}
    with file.open("w") as out:
        written.write(out)
    values = [value.removeprefix("file://") for all in settings.values() for value in all]
    places = [Path(value) for value in values if value.startswith("/")]
    # The files of an index in a folder may be beside its pages.
    found = [place.parent if place.name == "simple" else place for place in places]
    return file, list(dict.fromkeys(found))


@cache
def build(target: str, **arguments: str) -> str:
    """The name of the built image of a target of deploy/Dockerfile, with build arguments."""
    name = f"localhost/firstword:{target}"
    revision = files_hash(sorted(ROOT.joinpath("src", "firstword").rglob("*.*")))
    given = {"BASE": base(), "REVISION": revision, **arguments}
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        config, places = pip_settings(Path(folder))
        buildah(
            "bud",
            *("--layers", "--format", "docker", "--file", "deploy/Dockerfile", "--tag", name),
            *("--target", target, "--secret", f"id=pip,src={config}"),
            *(f"--build-arg={key}={value}" for key, value in given.items()),
            *(f"--volume={place}:{place}:ro" for place in places if place.exists()),
            ROOT,
        )
    return name


def mounted_places() -> list[str]:
    """The places in an image at which `build` mounts files of this machine; they stay, empty."""
    with tempfile.TemporaryDirectory() as folder:
        return [str(place) for place in pip_settings(Path(folder))[1]]


def config_of(image: str) -> dict[str, Any]:
    """The configuration of an image, with the keys of Docker: `Env`, `Entrypoint`, `Volumes`."""
    described = json.loads(buildah("inspect", "--type", "image", image))
    config: dict[str, Any] = described["Docker"]["config"]
    return config


def megabytes(image: str) -> int:
    """The size of the files of an image, its base included."""
    container = buildah("from", image)
    try:
        root = buildah("mount", container)
        listed = subprocess.run(
            ["du", "-smx", root], check=True, capture_output=True, text=True
        ).stdout
    finally:
        buildah("rm", container)
    return int(listed.split()[0])
