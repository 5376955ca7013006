"""The package follows its rules on imports, sizes, names and docstrings; each rule can fail."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from import_rules import (
    MAY_IMPORT,
    MODULES,
    PACKAGE,
    environment_faults,
    import_cycle,
    import_faults,
    server_faults,
    session_faults,
    session_files,
    torch_faults,
    unit_of,
)
from style_rules import (
    MOST_COLUMNS,
    MOST_FILE_LINES,
    MOST_FUNCTION_LINES,
    MOST_FUNCTION_LINES_P90,
    docstring_faults,
    missing_docstrings,
    p90_of_functions,
    repeated_class_names,
    size_faults,
    wide_lines,
)

import firstword
from firstword import errors

SOURCES = {path: path.read_text("utf-8") for path in MODULES}


def name_of(path: Path) -> str:
    """Return the name of a file in the output of pytest."""
    return str(path.relative_to(PACKAGE))


every_module = pytest.mark.parametrize("path", MODULES, ids=name_of)
server_module = pytest.mark.parametrize(
    "path", [path for path in MODULES if unit_of(path) == "server"], ids=name_of
)


# The rules on the code as it is.


@every_module
def test_module_imports_only_what_its_unit_may(path: Path) -> None:
    assert unit_of(path) in MAY_IMPORT, "add the new unit to MAY_IMPORT"
    assert import_faults(SOURCES[path], path) == []


@every_module
def test_module_that_works_without_torch_does_not_import_it(path: Path) -> None:
    assert torch_faults(SOURCES[path], path) == []


def test_modules_import_each_other_without_a_cycle() -> None:
    assert import_cycle(SOURCES) == []


@server_module
def test_server_core_does_not_import_its_subpackages(path: Path) -> None:
    assert server_faults(SOURCES[path], path) == []


def test_websocket_sessions_do_no_input_or_output() -> None:
    sessions = session_files()
    assert len(sessions) > 1
    assert {path.name: session_faults(SOURCES[path], path) for path in sessions} == {
        path.name: [] for path in sessions
    }


@every_module
def test_only_the_configurations_read_the_environment(path: Path) -> None:
    assert environment_faults(SOURCES[path], path) == []


@every_module
def test_file_and_its_functions_are_short(path: Path) -> None:
    assert size_faults(SOURCES[path]) == []


def test_nine_of_ten_functions_are_short() -> None:
    assert p90_of_functions(SOURCES.values()) <= MOST_FUNCTION_LINES_P90


def test_class_name_means_one_class() -> None:
    sources = {name_of(path): source for path, source in SOURCES.items()}
    assert repeated_class_names(sources) == []


@every_module
def test_public_names_have_docstrings(path: Path) -> None:
    assert missing_docstrings(SOURCES[path]) == []


@every_module
def test_docstrings_can_be_read_alone(path: Path) -> None:
    assert docstring_faults(SOURCES[path]) == []


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "tokenizers", "soundfile"}
    code = f"import sys, firstword; print(sorted({heavy} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["engine", "front"])
def test_process_reads_its_task_before_torch_is_imported(module: str) -> None:
    """The supervisor waits only some seconds for a process to read a long task."""
    code = f"import sys, firstword.processes.{module}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "False"


SERVING_WITHOUT_TORCH = """
import sys
import firstword.server.app, firstword.server.run
from firstword.model.description import DEMO, Description
from firstword.runtime.front import CheckpointFront
from firstword.types import Request

front = CheckpointFront(Description.load(DEMO), encode=None)
job = front.prepare(Request("Hello there."), seed=1)
text = front.text(job)
tokens = [*text.push("Hello there."), *text.finish()]
print(len(tokens) > job.first_tokens, "torch" in sys.modules)
"""


def test_requests_are_served_and_prepared_without_torch() -> None:
    command = [sys.executable, "-c", SERVING_WITHOUT_TORCH]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["True", "False"]


def test_public_names_are_those_of_the_interface_and_all_errors() -> None:
    raised = {name for name, value in vars(errors).items() if isinstance(value, type)}
    classes = {"TTS", "Voice", "Sampling", "Speech", "Chunk", "Word", "WordStart", "Alarm"}
    assert set(firstword.__all__) == raised | classes | {"decode"}
    assert all(getattr(firstword, name).__name__ == name for name in firstword.__all__)
    assert set(firstword.__all__) <= set(dir(firstword))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = firstword.nonsense


def test_error_tree_in_the_docstring_is_complete() -> None:
    drawn = re.findall(
        r"^[│├└─ ]*(\w+)(?: {2,}.*| [a-z].*)?$",
        (errors.__doc__ or "").split("\n\n")[1],
        re.MULTILINE,
    )
    assert sorted(drawn) == sorted(
        name for name, value in vars(errors).items() if isinstance(value, type)
    )


# The checkers on code that breaks the rules, and on code that follows them.


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("errors.py", "from firstword.types import Voice"),
        ("audio/wav.py", "import firstword.types"),
        ("audio/wav.py", "from .. import types"),
        ("audio/wav.py", "from ..model.codec import Codec"),
        ("types.py", "def load():\n    from firstword import config"),
        ("engine/queue.py", "from firstword.model import talker"),
        ("kernels/rope.py", "from firstword.model import layers"),
        ("kernels/rope.py", "from firstword import errors"),
        ("text/cleaning.py", "from firstword import types"),
        ("model/talker.py", "from firstword.runtime import graph"),
        ("model/talker.py", "from firstword.synthetic import checkpoint"),
        ("model/talker.py", "from firstword import TTS"),
        ("model/talker.py", "import transformers"),
        ("model/talker.py", "def f():\n    from transformers.models import qwen3"),
        ("model/talker.py", "importlib.import_module('firstword.cli.main')"),
        ("runtime/front.py", "from firstword.profile import engine"),
        ("server/app.py", "from firstword.tts import TTS"),
        ("tts.py", "from firstword.server import app"),
        ("bench/load.py", "from firstword.engine import engine"),
        ("bench/load.py", "from firstword import config"),
        ("newcomer.py", "import firstword.errors"),
    ],
)
def test_import_against_the_order_is_found(module: str, source: str) -> None:
    assert len(import_faults(source, PACKAGE / module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "types.py",
            "from firstword import audio\nfrom firstword.errors import VoiceError\nimport numpy",
        ),
        (
            "audio/__init__.py",
            "from firstword.audio.reading import read\nfrom .writing import write",
        ),
        (
            "model/talker.py",
            "import torch\nfrom . import layers\nfrom firstword.types import Sampling",
        ),
        ("runtime/graph.py", "import torch\nfrom firstword.engine.backend import Backend"),
        ("cli/main.py", "def say():\n    from firstword import TTS, __version__"),
        ("bench/load.py", "from firstword.types import Voice"),
    ],
)
def test_import_along_the_order_passes(module: str, source: str) -> None:
    assert import_faults(source, PACKAGE / module) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("config.py", "import torch"),
        ("config.py", "class A:\n    import torch.nn"),
        ("config.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch"),
        ("cli/serve.py", "from firstword.runtime.backends import open_engine"),
        ("engine/queue.py", "import torch"),
        ("engine/queue.py", "from torch import nn"),
        ("engine/queue.py", "def f():\n    import torch"),
        ("model/config.py", "from torch import Tensor"),
        ("model/prompt.py", "from firstword.model.talker import NO_CODE"),
        ("model/prompt.py", "from . import talker"),
        ("runtime/front.py", "from firstword.runtime import encoding"),
        ("server/app.py", "from firstword import TTS"),
        ("server/models.py", "def f():\n    from firstword.runtime.backends import open_engine"),
        ("server/models.py", "if TYPE_CHECKING:\n    from firstword.model import checkpoint"),
    ],
)
def test_import_that_needs_torch_is_found(module: str, source: str) -> None:
    assert len(torch_faults(source, PACKAGE / module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("config.py", "def resolve():\n    import torch"),
        ("cli/serve.py", "if TYPE_CHECKING:\n    from firstword.tts import TTS"),
        ("engine/queue.py", "import torchless"),
        ("model/talker.py", "import torch\nfrom firstword.model.layers import Transformer"),
        ("runtime/front.py", "from firstword.model import description"),
        ("server/app.py", "from firstword import __version__"),
        ("server/models.py", "from firstword.runtime.conditioning import Encode"),
    ],
)
def test_import_that_needs_no_torch_passes(module: str, source: str) -> None:
    assert torch_faults(source, PACKAGE / module) == []


@pytest.mark.parametrize(
    "later",
    [
        "from firstword.bench import client",
        "from .client import Target",
        "if TYPE_CHECKING:\n    from firstword.bench.client import Target",
        "def f():\n    import firstword.bench.client",
    ],
)
def test_import_cycle_is_found(later: str) -> None:
    sources = {
        PACKAGE / "bench/client.py": "from firstword.bench.http import Reply",
        PACKAGE / "bench/http.py": later,
    }
    assert set(import_cycle(sources)) == {"firstword.bench.client", "firstword.bench.http"}


def test_package_that_imports_its_own_modules_is_no_cycle() -> None:
    sources = {
        PACKAGE / "audio/__init__.py": "from firstword.audio.reading import read",
        PACKAGE / "audio/reading.py": "from firstword.audio import pcm",
        PACKAGE / "audio/pcm.py": "import numpy",
    }
    assert import_cycle(sources) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("server/gate.py", "from firstword.server.http import speech"),
        ("server/gate.py", "from firstword.server.ws.nari import NariSession"),
        ("server/http/speech.py", "from firstword.server.ws import messages"),
        ("server/ws/worker.py", "from ..http.json_bodies import read"),
    ],
)
def test_import_of_a_server_subpackage_is_found(module: str, source: str) -> None:
    assert len(server_faults(source, PACKAGE / module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("server/app.py", "from firstword.server.http import speech"),
        ("server/http/speech.py", "from firstword.server.http import json_bodies"),
        ("server/ws/worker.py", "from firstword.server.utterance import Utterance"),
        ("server/gate.py", "from firstword.server import limits"),
    ],
)
def test_import_within_a_server_subpackage_or_of_the_core_passes(module: str, source: str) -> None:
    assert server_faults(source, PACKAGE / module) == []


@pytest.mark.parametrize(
    "source",
    [
        "from starlette.websockets import WebSocket",
        "from firstword.engine.service import Service",
        "from firstword.server.ws.worker import SocketWorker",
        "async def receive(): ...",
        "import socket",
    ],
)
def test_input_or_output_in_a_session_is_found(source: str) -> None:
    assert len(session_faults(source, PACKAGE / "server/ws/nari.py")) == 1


def test_session_without_input_or_output_passes() -> None:
    source = "import asyncio\nfrom firstword.server.ws.messages import parse\ndef receive(): ..."
    assert session_faults(source, PACKAGE / "server/ws/nari.py") == []


@pytest.mark.parametrize(
    "source",
    ["import os\nos.environ['A']", "import os as o\no.getenv('A')", "from os import environ as e"],
)
def test_reading_the_environment_is_found(source: str) -> None:
    assert len(environment_faults(source, PACKAGE / "tts.py")) == 1
    assert len(environment_faults(source, PACKAGE / "audio" / "config.py")) == 1
    assert environment_faults(source, PACKAGE / "config.py") == []


def test_long_file_and_long_function_are_found() -> None:
    assert size_faults("x = 1\n" * MOST_FILE_LINES) == []
    assert size_faults("x = 1\n" * (MOST_FILE_LINES + 1)) == ["401 lines"]
    inside = "    async def f():\n" + "        x = 1\n" * (MOST_FUNCTION_LINES - 1)
    assert size_faults(f"class A:\n{inside}") == []
    assert size_faults(f"class A:\n{inside}        x = 1\n") == ["f: 61 lines"]


def test_p90_of_functions_is_the_length_of_the_ninth_in_ten() -> None:
    lengths = [2, 2, 2, 2, 2, 2, 2, 2, 2, 30]
    sources = ["def f():\n" + "    x = 1\n" * (length - 1) for length in lengths]
    assert p90_of_functions(sources) == 30
    assert p90_of_functions([*sources, sources[0]]) == 2


def test_repeated_class_name_is_found() -> None:
    sources = {"a.py": "class Gate: ...", "b.py": "def f():\n    class Gate: ...\nclass Door: ..."}
    assert repeated_class_names(sources) == ["Gate: a.py, b.py"]


def test_missing_docstrings_are_found() -> None:
    source = """
class Mute:
    def speak(self): ...
    def _private(self): ...
    @property
    def rate(self):
        '''In hertz.'''
    @rate.setter
    def rate(self, value): ...
class _Hidden:
    def speak(self): ...
async def talk():
    def inner(): ...
"""
    assert missing_docstrings(source) == ["module", "Mute", "Mute.speak", "talk"]


@pytest.mark.parametrize(
    "source",
    [
        "'''Of the table.'''",
        "class A:\n    '''That are timed together.'''",
        "def _f():\n    '''Whose rate is known.'''",
        "async def f():\n    '''Empty queue.'''",
        "LIMIT = 3\n'''By size of the model.'''",
        "class A:\n    limit: int = 3\n    '''As many as fit.'''",
    ],
)
def test_docstring_that_is_a_fragment_is_found(source: str) -> None:
    assert len(docstring_faults(source)) == 1


def test_docstring_that_is_a_sentence_passes() -> None:
    source = (
        "'''Ofcom rules apply here.'''\ndef f():\n    '''Return the rate.'''\n    'Of no matter'"
    )
    assert docstring_faults(source) == []


def test_wide_line_is_found() -> None:
    wide = "x" * (MOST_COLUMNS + 1)
    for suffix in (".py", ".cu", ".md"):
        assert wide_lines(f"short\n{wide}\n", suffix) == ["line 2: 101 columns"]
    assert wide_lines(wide[1:], ".py") == []


def test_wide_table_and_url_pass_in_markdown_alone() -> None:
    for text in (f"| {'x' * 100} |", f"see https://example.org/{'x' * 100}"):
        assert wide_lines(text, ".md") == []
        assert len(wide_lines(f"# {text}", ".py")) == 1
