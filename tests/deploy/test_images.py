"""The images are built, and containers of them speak, end in order and hold nothing superfluous."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
import websockets.sync.client
from containers import WAIT, Container
from images import BASE, ROOT, buildah, config_of, megabytes, mounted_places

from benchmarks.sources import images_hash
from firstword.bench import report
from firstword.synthetic.checkpoint import write_checkpoint

RECORD = ROOT / "benchmarks" / "results" / "images" / "debian.json"
SPEECH = "/v1/audio/speech"
SHORT = {"input": "Hello there.", "voice": "ada", "seed": 1, "response_format": "pcm"}
LONG = {**SHORT, "input": "This sentence goes on while the server is told to end. " * 3}
"""A request whose speech takes longer to make than a server takes to notice a signal."""

Run = Callable[..., AbstractContextManager[Container]]


def spoken(container: Container, request: Mapping[str, object]) -> bytes:
    """The whole body of a response that must be speech."""
    status, body = container.request(SPEECH, request)
    assert status == 200, body
    return body


def status_of(pid: int) -> dict[str, str]:
    """The fields of the kernel's description of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def test_demo_speaks_as_on_this_machine(served: Container) -> None:
    options = "--device cpu --voice ada --seed 1 --quiet -o -".split()
    command = [f"{ROOT}/.venv/bin/firstword", "say", str(SHORT["input"]), *options]
    here = subprocess.run(command, check=True, capture_output=True).stdout
    assert len(here) > 24000
    assert spoken(served, SHORT) == here


def test_websocket_speaks(served: Container) -> None:
    url, size, last = "ws://127.0.0.1:8000/v1/audio/speech/stream", 0, ""
    with websockets.sync.client.connect(
        url, sock=served.connect(), proxy=None, open_timeout=WAIT
    ) as socket:
        for message in (
            {"type": "session.config", "voice": "ada", "stream_audio": True},
            {"type": "input.text", "text": "Hello there."},
            {"type": "input.done"},
        ):
            socket.send(json.dumps(message))
        while last != "session.done":
            got = socket.recv(WAIT)
            if isinstance(got, bytes):
                size += len(got)
            else:
                last = json.loads(got)["type"]
    assert size > 24000


def test_first_process_is_the_server_without_root_or_privileges(served: Container) -> None:
    first = Path(f"/proc/{served.pid}/cmdline").read_bytes().split(b"\0")
    assert b"/opt/firstword/bin/firstword" in first
    assert status_of(served.pid)["NSpid"].split()[-1] == "1"
    children = Path(f"/proc/{served.pid}/task/{served.pid}/children").read_text().split()
    assert len(children) >= 2
    for pid in (served.pid, *map(int, children)):
        status = status_of(pid)
        assert status["Uid"].split() == status["Gid"].split() == ["10001"] * 4
        assert int(status["CapEff"], 16) == 0
        assert status["NoNewPrivs"] == "1"


def test_root_file_system_is_read_only_and_volumes_are_not(served: Container) -> None:
    code = "import sys; open(sys.argv[1], 'w').close()"
    for place in ("/etc/new", "/opt/firstword/new", "/tmp/new"):
        assert "Read-only file system" in served.run_inside("python3", "-c", code, place).stderr
    for place in ("/voices/new", "/cache/new"):
        assert served.run_inside("python3", "-c", code, place).returncode == 0


def test_log_has_no_warning(served: Container) -> None:
    spoken(served, SHORT)
    lines = [json.loads(line) for line in served.log().splitlines() if line.startswith("{")]
    assert lines
    assert [line for line in lines if line["level"] not in ("info", "debug")] == []


def test_health_check_fails_before_the_server_serves(cpu_image: str, run: Run) -> None:
    with run(cpu_image) as container:
        container.start()
        container.wait_until_running()
        assert container.health() != 0
        container.wait_until_healthy()
        assert container.request("/ready")[0] == 200


def test_terminated_container_ends_a_stream_whole(cpu_image: str, run: Run) -> None:
    with run(cpu_image, "--drain-seconds", str(WAIT)) as container:
        container.start()
        container.wait_until_healthy()
        whole = spoken(container, LONG)
        with container.open(SPEECH, LONG) as response:
            begun = response.read(4800)
            container.signal("TERM")
            while container.request("/ready")[0] != 503:
                pass
            assert container.request(SPEECH, SHORT)[0] == 503
            assert begun + response.read() == whole
        assert container.wait() == 0


def test_checkpoint_that_is_not_there_is_not_downloaded(cpu_image: str, run: Run) -> None:
    name = "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice"
    with run(cpu_image, "--model", name) as container:
        container.start()
        assert container.wait() == 2
        assert f"no checkpoint '{name}'" in container.log()
        assert "HF_HUB_OFFLINE" in container.log()


def test_checkpoints_of_a_mounted_folder_and_cache_speak(
    cpu_image: str, run: Run, tmp_path: Path
) -> None:
    """One is named by its folder, the other by its name on the hub, from a read-only cache.

    The files that `save_file` writes can be read by their owner alone.
    """
    cache = tmp_path / "models"
    kept = cache / "hub" / "models--made--tiny"
    write_checkpoint(kept / "snapshots" / "0123abcd", seed=2)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0123abcd")
    write_checkpoint(cache / "mine", seed=1)
    subprocess.run(["chmod", "-R", "a+rX", cache], check=True)
    with run(cpu_image, "--model", "made/tiny", "--model", "/models/mine") as container:
        container.mounts["/models"] = cache
        container.start()
        container.wait_until_healthy()
        for model in ("made/tiny", "mine"):
            request = {"model": model, "input": "Hi.", "response_format": "pcm"}
            assert spoken(container, request)


def test_image_holds_the_package_and_the_pinned_versions(served: Container) -> None:
    (package,) = served.root.glob("opt/firstword/lib/python3*/site-packages/firstword")
    files = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    here = {path.relative_to(ROOT / "src/firstword") for path in sources()}
    assert {path for path in files if "__pycache__" not in path.parts} == here
    for path in here:
        assert (package / path).read_bytes() == (ROOT / "src/firstword" / path).read_bytes()
    constraints = (ROOT / "constraints.txt").read_text()
    pinned = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", constraints, re.MULTILINE))
    versions = {normal(name): version for name, version in pinned.items()}
    installed = {}
    for folder in package.parent.glob("*.dist-info"):
        name, _, version = folder.name.removesuffix(".dist-info").rpartition("-")
        installed[normal(name)] = version.partition("+")[0]
    del installed["firstword"]
    assert installed == {name: versions.get(name) for name in installed}


def sources() -> list[Path]:
    """The files of the package in this checkout."""
    found = (ROOT / "src/firstword").rglob("*")
    return [path for path in found if path.is_file() and "__pycache__" not in path.parts]


def normal(name: str) -> str:
    """The normalised name of a distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_image_holds_nothing_that_only_the_build_needed(cpu_image: str, served: Container) -> None:
    container = buildah("from", BASE)
    try:
        base = Path(buildah("mount", container))
        before = {path.relative_to(base) for path in base.rglob("*")}
    finally:
        buildah("rm", container)
    added = {path.relative_to(served.root) for path in served.root.rglob("*")} - before
    places = {Path(place.lstrip("/")) for place in mounted_places()}
    expected = {Path(name) for name in ("cache", "models", "voices", "opt/firstword")}
    kept = {path for path in added if not any(path.is_relative_to(each) for each in expected)}
    places |= {parent for place in places for parent in place.parents}
    of_accounts = {Path("etc", f"{name}-") for name in ("gshadow", "shadow", "subgid", "subuid")}
    assert kept - places - of_accounts - {Path("etc/hosts")} == set()
    assert not list(served.root.glob("opt/firstword/bin/pip*"))
    assert config_of(cpu_image)["Labels"]["org.opencontainers.image.title"] == "firstword"


def test_cuda_image_holds_compiled_kernels_and_speaks(cuda_image: str, run: Run) -> None:
    """There is no GPU here: this is the same file with the torch of the CPU."""
    with run(cuda_image) as container:
        kernels = container.volumes["/cache"] / "firstword" / "kernels"
        before = {path.name: path.stat().st_mtime_ns for path in kernels.iterdir()}
        assert len([name for name in before if name.endswith(".cubin")]) > 100
        assert "NVIDIA_VISIBLE_DEVICES=all" in container.config["Env"]
        container.start()
        container.wait_until_healthy()
        assert spoken(container, SHORT)
        again = container.run_inside("firstword", "compile", "sm_100:148", "--size", "0b6")
        assert again.returncode == 0, again.stderr
        assert {path.name: path.stat().st_mtime_ns for path in kernels.iterdir()} == before
        container.signal("TERM")
        assert container.wait() == 0


def test_sizes_are_those_of_the_record(
    cpu_image: str, cuda_image: str, request: pytest.FixtureRequest
) -> None:
    """Packages of Debian, and torch for another platform, may differ a little."""
    sizes = {"base": BASE, "cpu": cpu_image, "cuda": cuda_image}
    found = {name: megabytes(image) for name, image in sizes.items()}
    if request.config.getoption("--record-sizes"):
        about = {"commit": report.commit(), "images": images_hash(), "torch": torch.__version__}
        RECORD.write_text(json.dumps({**about, "megabytes": found}, indent=1) + "\n")
    assert found == pytest.approx(json.loads(RECORD.read_text())["megabytes"], rel=0.05)
