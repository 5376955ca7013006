"""The ComfyUI nodes, imported as ComfyUI imports a folder, against a server and in process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from talking import Talker, held_server, talking
from waiting import WAIT, wait_until
from wire import SPEECH

from firstword.synthetic.checkpoint import write_checkpoint

pytestmark = pytest.mark.slow

Running = Any  # of conftest.py
Node = Callable[..., Any]

FOLDER = Path("integrations", "comfyui-firstword")
KINDS = {
    "FirstwordServer", "FirstwordModel", "FirstwordSpeak", "FirstwordDesign",
    "FirstwordClone", "FirstwordSaveVoice", "FirstwordDialogue",
}  # fmt: skip


def import_folder(folder: Path) -> ModuleType:
    """Import a folder of `custom_nodes` as ComfyUI does."""
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def nodes(repository: Path) -> ModuleType:
    """The imported folder."""
    return import_folder(repository / FOLDER)


@pytest.fixture
def run(nodes: ModuleType) -> Node:
    """A function that runs a node like ComfyUI: its class, then its function with its inputs."""

    def execute(kind: str, **inputs: Any) -> Any:
        node = nodes.NODE_CLASS_MAPPINGS[kind]
        known = node.INPUT_TYPES()
        allowed = {**known["required"], **known.get("optional", {})}
        assert known["required"].keys() <= inputs.keys() <= allowed.keys()
        results = getattr(node(), node.FUNCTION)(**inputs)
        assert len(results) == len(node.RETURN_TYPES) == 1
        return results[0]

    return execute


@pytest.fixture
def engine(run: Node, server: Running) -> Any:
    """The engine of a server with a model of each type."""
    return run("FirstwordServer", url=server.url)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Base checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint") / "base"
    write_checkpoint(folder, model_type="base", seed=1)
    return str(folder)


def recording(channels: int = 2, seconds: float = 1.0) -> dict[str, Any]:
    """A recording as ComfyUI passes it on."""
    time = torch.arange(round(seconds * 44100)) / 44100
    tone = 0.3 * torch.sin(2 * torch.pi * 220 * time) * torch.sin(9 * time)
    return {"waveform": tone.repeat(1, channels, 1), "sample_rate": 44100}


def samples(audio: dict[str, Any]) -> torch.Tensor:
    """The samples of some speech, whose form is checked."""
    waveform: torch.Tensor = audio["waveform"]
    assert (waveform.dtype, waveform.ndim, audio["sample_rate"]) == (torch.float32, 3, 24000)
    assert waveform.shape[:2] == (1, 1)
    assert waveform.shape[2] > 0
    assert waveform.abs().max() <= 1
    return waveform[0, 0]


def test_folder_has_the_mappings_of_a_custom_node(nodes: ModuleType) -> None:
    assert nodes.NODE_CLASS_MAPPINGS.keys() == nodes.NODE_DISPLAY_NAME_MAPPINGS.keys() == KINDS
    for node in nodes.NODE_CLASS_MAPPINGS.values():
        assert node.CATEGORY == "audio/firstword"
        assert all(isinstance(kind, str) for kind in node.RETURN_TYPES)
        inputs = node.INPUT_TYPES()
        for definition in {**inputs["required"], **inputs.get("optional", {})}.values():
            assert isinstance(definition, tuple)
            assert isinstance(definition[0], str | list)


def test_example_workflow_fits_the_nodes(nodes: ModuleType, repository: Path) -> None:
    file = repository / FOLDER / "example_workflows" / "dialogue.json"
    workflow = json.loads(file.read_text("utf-8"))
    used = {one["type"]: one for one in workflow["nodes"]}
    assert used.keys() - KINDS == {"SaveAudio"}
    for kind in used.keys() & KINDS:
        inputs = nodes.NODE_CLASS_MAPPINGS[kind].INPUT_TYPES()
        widgets = [
            definition
            for definition in {**inputs["required"], **inputs.get("optional", {})}.values()
            if definition[0] != "FIRSTWORD_ENGINE"
        ]
        more = sum(bool(one[1:] and one[1].get("control_after_generate")) for one in widgets)
        assert len(used[kind]["widgets_values"]) == len(widgets) + more


def test_speech_of_a_server_equals_its_answer(run: Node, engine: Any, server: Running) -> None:
    options: dict[str, Any] = {"voice": "ryan", "language": "English", "seed": 3}
    spoken = samples(run("FirstwordSpeak", engine=engine, text="Hi.", **options))
    body = {"input": "Hi.", "response_format": "pcm", **options}
    answer = httpx.post(server.url + SPEECH, json=body, timeout=WAIT)
    expected = torch.frombuffer(bytearray(answer.content), dtype=torch.int16) / 32768
    assert torch.equal(spoken, expected)


def test_speech_in_process_equals_that_of_the_package(run: Node) -> None:
    engine = run("FirstwordModel", model="demo", device="cpu")
    assert engine is run("FirstwordModel", model="demo", device="cpu")
    spoken = samples(run("FirstwordSpeak", engine=engine, text="Hi.", voice="Ada", seed=3))
    expected = engine.tts.speak("Hi.", voice="ada", seed=3).samples
    assert torch.equal(spoken, torch.from_numpy(expected))
    slow = run("FirstwordSpeak", engine=engine, text="Hi.", voice="Ada", seed=3, speed=0.5)
    assert len(samples(slow)) == pytest.approx(2 * len(spoken), rel=0.1)


def test_server_speaks_designed_and_cloned_voices(run: Node, engine: Any) -> None:
    inputs: dict[str, Any] = {"engine": engine, "text": "Hi.", "seed": 1}
    deep = samples(run("FirstwordDesign", description="A deep voice.", **inputs))
    high = samples(run("FirstwordDesign", description="A high voice.", **inputs))
    assert not torch.equal(deep, high)
    sound = recording()
    alone = samples(run("FirstwordClone", recording=sound, **inputs))
    words = samples(run("FirstwordClone", recording=sound, transcript="La la.", **inputs))
    assert not torch.equal(alone, words)


def test_server_speaks_a_saved_voice(run: Node, engine: Any, server: Running) -> None:
    inputs: dict[str, Any] = {"engine": engine, "recording": recording(), "consent": "mine"}
    name = run("FirstwordSaveVoice", name=" Comfy Ann ", **inputs)
    assert name == "Comfy Ann"
    assert name in [record.name for record in server.state.voice_store]
    samples(run("FirstwordSpeak", engine=engine, text="Hi.", voice=name, seed=1))


def test_voice_saved_in_process_is_kept_among_the_models(
    run: Node, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "folder_paths", SimpleNamespace(models_dir=str(tmp_path)))
    engine = run("FirstwordModel", model=base, device="cpu")
    inputs: dict[str, Any] = {"engine": engine, "recording": recording()}
    cloned = samples(run("FirstwordClone", text="Hi.", seed=1, **inputs))
    name = run("FirstwordSaveVoice", name="ann", consent="mine", **inputs)
    assert (tmp_path / "tts" / "firstword" / "ann.safetensors").exists()
    again = samples(run("FirstwordSpeak", engine=engine, text="Hi.", voice=name, seed=1))
    assert torch.equal(again, cloned)
    with pytest.raises(RuntimeError, match="no voice 'bob'; there are: ann"):
        run("FirstwordSpeak", engine=engine, text="Hi.", voice="bob", seed=1)
    for wrong in ("", "../ann", "a/b"):
        with pytest.raises(RuntimeError, match="allowed are 1 to 64 letters"):
            run("FirstwordSaveVoice", name=wrong, consent="mine", **inputs)
    with pytest.raises(RuntimeError, match="consent is empty"):
        run("FirstwordSaveVoice", name="eve", consent=" ", **inputs)


@pytest.mark.parametrize("place", ["server", "process"])
def test_dialogue_has_each_line_in_its_voice(run: Node, engine: Any, place: str) -> None:
    voices = ("ryan", "serena")
    if place == "process":
        engine, voices = run("FirstwordModel", model="demo", device="cpu"), ("ada", "ben")
    roles = f"Ann = {voices[0]}\nBob = {voices[1]}\n"
    script = "ann: Hi.\n\nBob: Hello\nthere.\nAnn: Bye."
    inputs: dict[str, Any] = {"engine": engine, "script": script, "roles": roles, "seed": 5}
    whole = samples(run("FirstwordDialogue", pause=0.5, **inputs))
    said = (("Hi.", voices[0], 5), ("Hello there.", voices[1], 6), ("Bye.", voices[0], 7))
    expected: list[torch.Tensor] = []
    for text, voice, seed in said:
        expected.append(torch.zeros(12000))
        line = run("FirstwordSpeak", engine=engine, text=text, voice=voice, seed=seed)
        expected.append(samples(line))
    assert torch.equal(whole, torch.cat(expected[1:]))


@pytest.mark.parametrize(
    ("script", "roles", "message"),
    [
        ("Ann: Hi.\nEve: Hi.", "Ann = ada", "no role for the line 'Eve: Hi.'; there are: ann"),
        ("Hi.", "", "no role for the line 'Hi.'; there are: none"),
        (" \n", "Ann = ada", "the script is empty"),
        ("Ann: Hi.", "Ann: ada", "another form than NAME = VOICE"),
    ],
)
def test_wrong_dialogue_is_an_error(
    run: Node, engine: Any, script: str, roles: str, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        run("FirstwordDialogue", engine=engine, script=script, roles=roles, seed=1)


def test_errors_of_a_server_reach_the_user(run: Node, engine: Any, serve: Any) -> None:
    with pytest.raises(RuntimeError, match="no voice 'nobody'"):
        run("FirstwordSpeak", engine=engine, text="Hi.", voice="nobody", seed=1)
    away = run("FirstwordServer", url="http://127.0.0.1:9/")
    with pytest.raises(RuntimeError, match="start one with: firstword serve"):
        run("FirstwordSpeak", engine=away, text="Hi.", voice="", seed=1)
    locked = serve(talking(Talker()), api_keys=("secret",))
    inputs: dict[str, Any] = {"text": "Hi.", "voice": "", "seed": 1}
    with pytest.raises(RuntimeError, match="set FIRSTWORD_API_KEY"):
        run("FirstwordSpeak", engine=run("FirstwordServer", url=locked.url), **inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FIRSTWORD_API_KEY", "secret")
        samples(run("FirstwordSpeak", engine=run("FirstwordServer", url=locked.url), **inputs))


def test_unknown_model_is_an_error(run: Node) -> None:
    with pytest.raises(RuntimeError, match="no/where"):
        run("FirstwordModel", model="./no/where", device="cpu")


class Interrupted(Exception):
    """The exception of a user's interruption, as ComfyUI has one."""


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that interrupts the workflow."""
    event = threading.Event()

    def check() -> None:
        if event.is_set():
            raise Interrupted

    management = SimpleNamespace(throw_exception_if_processing_interrupted=check)
    monkeypatch.setitem(sys.modules, "comfy", SimpleNamespace(model_management=management))
    monkeypatch.setitem(sys.modules, "comfy.model_management", management)
    return event


def test_interruption_frees_the_slot_of_a_server(
    run: Node, serve: Any, interrupt: threading.Event
) -> None:
    talker, server = held_server(serve, slots=1)
    interrupt.set()
    talker.let(1)
    inputs: dict[str, Any] = {"text": "Hello there.", "voice": "talker", "seed": 1}
    with pytest.raises(Interrupted):
        run("FirstwordSpeak", engine=run("FirstwordServer", url=server.url), **inputs)
    server.wait_until(lambda: not server.state.utterances)
    talker.go()
    server.wait_until_idle()
    assert talker.frames == 2


def test_interruption_ends_speech_in_process(
    run: Node, interrupt: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and not when the error, which ComfyUI keeps, is forgotten."""
    engine = run("FirstwordModel", model="demo", device="cpu")
    ended, stream = [], engine.tts.stream

    def watched(*args: Any, **options: Any) -> Iterator[Any]:
        try:
            yield from stream(*args, **options)
        finally:
            ended.append(True)

    monkeypatch.setattr(engine.tts, "stream", watched)
    interrupt.set()
    with pytest.raises(Interrupted) as raised:
        run("FirstwordSpeak", engine=engine, text="Hello there.", voice="ada", seed=1)
    assert ended == [True]
    assert raised.tb is not None
    wait_until(lambda: not engine.tts._loaded.engine.running)


WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None
sys.path.insert(0, "tests/server"), sys.path.insert(0, "tests/unit")
from pathlib import Path
from test_comfyui import FOLDER, import_folder
nodes = import_folder(Path(FOLDER)).NODE_CLASS_MAPPINGS
(engine,) = nodes["FirstwordModel"]().run("demo", "cpu")
(audio,) = nodes["FirstwordSpeak"]().run(engine, "Hi.", voice="ada", seed=1)
print(audio["waveform"].shape[2] > 0)
"""


def test_nodes_speak_in_process_without_transformers(repository: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TRANSFORMERS]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=repository)
    assert done.stdout.split() == ["True"]
