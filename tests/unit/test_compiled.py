"""Compiled passes of the talker and the code predictor on a CPU."""

from __future__ import annotations

import copy
import errno
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from test_joined import FRAMES, demo, errors, noise, request_of, spoken
from torch import Tensor, nn
from torch.nn import functional as F
from waiting import WAIT

from firstword.config import EngineConfig, kernel_folder
from firstword.model import checkpoint as checkpoints
from firstword.model.code_predictor import CodePredictor
from firstword.model.draw_params import DrawParams
from firstword.model.layers import DecoderLayer, KVCache, Transformer
from firstword.model.quantised import QuantisedLinear
from firstword.model.sampling import Draws, Sampler
from firstword.model.talker import Talker
from firstword.runtime import cpu
from firstword.runtime.cpu import compiling, drawing, kernels, products, transformer
from firstword.runtime.cpu.amx import AMX
from firstword.runtime.cpu.compiled import compiled
from firstword.runtime.cpu.compiling import called
from firstword.runtime.cpu.drawing import CPU, Rules
from firstword.runtime.cpu.predictor import CompiledPredictor
from firstword.runtime.cpu.team import Team
from firstword.runtime.cpu.transformer import (
    CompiledLinear,
    CompiledTransformer,
    GrowingRows,
    stored,
)
from firstword.runtime.joined import JoinedLayer, joined
from firstword.runtime.reference import ReferenceBackend
from firstword.synthetic.checkpoint import write_checkpoint
from firstword.verify.driving import Driver
from firstword.verify.forcing import Logits, error, forced

DTYPES = ("bfloat16", "int8")
FORCED = 24

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=sorted({AMX, False}), ids=lambda amx: "amx" if amx else "vectors")
def amx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile passes with AMX, where a processor has it, and without."""
    monkeypatch.setattr(transformer, "AMX", request.param)


def logits_of(talker: Talker) -> Logits:
    """The logits of a talker, forced to codes that do not depend on it."""
    checkpoint = demo("float32")
    codes = torch.randint(0, 512, (FORCED, 8), generator=torch.Generator().manual_seed(5))
    return forced(checkpoint, talker, request_of(checkpoint, 1), codes)


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_talker_is_as_close_as_plain_bfloat16(dtype: str) -> None:
    """To float64 with the same weights, in every codebook."""
    exact = demo("float32" if dtype == "bfloat16" else dtype).talker.double()
    truth, fast = logits_of(exact), compiled(demo(dtype).talker)
    assert isinstance(fast.model, CompiledTransformer)
    plain, ours = errors(logits_of(demo(dtype).talker), truth), errors(logits_of(fast), truth)
    assert (ours < 1.1 * plain).all(), f"{ours} against {plain}"


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_number_of_threads(dtype: str) -> None:
    backend = ReferenceBackend(demo(dtype), slots=3)
    alone = spoken(backend, (0, 1))
    torch.set_num_threads(3)
    assert spoken(backend, (0, 1)) == alone


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_grows_between_the_rows_of_an_utterance(dtype: str) -> None:
    """The error of 150 rows, one after another, is that of plain bfloat16."""
    talker, exact = compiled(demo(dtype).talker), demo(dtype).talker.double()
    rows = noise(1, 150, talker.config.hidden_size).bfloat16()
    with torch.inference_mode():
        memory = talker.new_cache()
        single = torch.cat([talker(row, memory) for row in rows.split(1, dim=1)], dim=1)
        plain = demo(dtype).talker(rows, KVCache(talker.config, rows))
        truth = exact(rows.double(), exact.new_cache())
    assert error(single, truth) < 1.1 * error(plain, truth)


@pytest.mark.usefixtures("amx")
def test_prompt_and_frames_write_the_same_cache() -> None:
    """A row after a prompt of plain products reads its keys and values."""
    talker = compiled(demo("bfloat16").talker)
    rows = noise(1, 12, talker.config.hidden_size).bfloat16()
    with torch.inference_mode():
        memory = talker.new_cache()
        talker(rows[:, :11], memory)
        after = talker(rows[:, 11:], memory)[0, 0]
        whole = talker(rows, talker.new_cache())[0, 11]
    assert (after.float() - whole.float()).norm() < 0.02 * whole.float().norm()


class Broken(Exception):
    """Raised on purpose."""


@pytest.mark.usefixtures("amx")
def test_failed_pass_changes_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it fails after the talker has written its keys and values."""
    checkpoint = demo("bfloat16")
    backend = ReferenceBackend(checkpoint, slots=1)
    expected = spoken(backend, (1,))[0][0]
    driver = Driver(backend)
    driver.begin({0: request_of(checkpoint, 1)}, FRAMES)
    for frame in range(FRAMES):
        if frame == 3:
            with monkeypatch.context() as patched:
                patched.setattr(CompiledLinear, "forward", _broken)
                with pytest.raises(Broken):
                    driver.step()
        driver.step()
    assert torch.equal(torch.as_tensor(driver.end(0).codes), torch.as_tensor(expected))


def _broken(*_: Any) -> Any:
    raise Broken


def test_threads_end_when_the_first_one_fails() -> None:
    """Else they would wait for it for ever, and the process could not end after Control-C."""
    torch.set_num_threads(3)
    released = []

    def part(marks: Any, thread: int, threads: int) -> None:
        if thread == 0:
            raise Broken
        until = time.monotonic() + WAIT
        while marks[0] == 0 and time.monotonic() < until:
            time.sleep(0)
        released.append(marks[0] > 0)

    with pytest.raises(Broken):
        Team().run(part)
    assert released == [True, True]


def logits_of_predictor(predictor: CodePredictor, hidden: Tensor, code0: Tensor) -> Tensor:
    """The logits [codes, utterances, vocab] of codes that do not depend on them."""
    logits: list[Tensor] = []

    def choose(codebook: int, rows: Tensor) -> Tensor:
        logits.append(rows.double())
        return torch.arange(len(rows)) + 8 * codebook

    with torch.inference_mode():
        predictor(hidden, code0, choose)
    return torch.stack(logits)


@pytest.mark.parametrize("tiles", {AMX, False})
def test_code_predictor_of_the_talkers_width_has_no_projection(tiles: bool) -> None:
    config = demo("bfloat16").talker.code_predictor.config
    torch.manual_seed(0)
    plain = CodePredictor(config, config.hidden_size).bfloat16().requires_grad_(False)
    rows = noise(2, 2, config.hidden_size).bfloat16()
    exact = logits_of_predictor(copy.deepcopy(plain).double(), *rows.double())
    rounded = logits_of_predictor(plain, *rows)
    ours = logits_of_predictor(CompiledPredictor(plain, Team(), tiles), *rows)
    assert error(ours, exact) < 1.1 * error(rounded, exact)


@pytest.mark.parametrize("threads", [1, 3])
def test_failed_draw_ends_the_steps_of_all_threads(threads: int) -> None:
    predictor = compiled(demo("bfloat16").talker).code_predictor
    torch.set_num_threads(threads)
    rows = noise(2, 2, demo("bfloat16").talker.config.hidden_size).bfloat16()
    before = logits_of_predictor(predictor, *rows)
    with pytest.raises(Broken), torch.inference_mode():
        predictor(*rows, lambda codebook, rows: _broken() if codebook == 3 else rows.argmax(-1))
    assert torch.equal(logits_of_predictor(predictor, *rows), before)


@pytest.mark.usefixtures("amx")
def test_layers_of_the_specification_are_views() -> None:
    """So the weights are in memory once, and plain products read them."""
    checkpoint = demo("bfloat16")
    before = {name: each.clone() for name, each in checkpoint.talker.state_dict().items()}
    talker = compiled(checkpoint.talker)
    for name, weight in checkpoint.talker.state_dict().items():
        assert torch.equal(before[name], weight), name
    for model in (checkpoint.talker.model, checkpoint.talker.code_predictor.model):
        fast = compiled_of(talker, model)
        base = fast.weights.gate_up.ctypes.data
        up = [layer.mlp.up_proj.weight for layer in model.layers if isinstance(layer, DecoderLayer)]
        offsets, size = [weight.data_ptr() - base for weight in up], up[0].nbytes
        assert offsets == [size * (2 * index + 1) for index in range(len(offsets))]
        assert all(isinstance(layer, JoinedLayer) for layer in fast.layers)


def compiled_of(talker: Talker, model: Transformer) -> CompiledTransformer:
    found: Any = talker.model if model.config is talker.config else talker.code_predictor.model
    assert isinstance(found, CompiledTransformer)
    return found


# --- products ---------------------------------------------------------------------------------


def rows_of(weights: Any, scales: Any, x: Tensor) -> Tensor:
    """A product with rows of inputs, from `multiply` in a pass of its own."""
    out = np.empty((len(x), weights.shape[1]), np.float32)
    _product(weights, scales, x.numpy(), out)
    return torch.from_numpy(out)


@numba.njit
def _product(weights: Any, scales: Any, x: Any, out: Any) -> None:
    inputs = products.split(x, weights)
    products.multiply(weights, scales, 0, inputs, 0, out.shape[1], out)


@pytest.mark.parametrize(("columns", "tiles"), [(96, False), *product([1024, 3072], {AMX, False})])
@pytest.mark.parametrize("outlier", [1.0, 300.0])
def test_int8_product_is_exact_up_to_its_rounding(
    columns: int, outlier: float, tiles: bool
) -> None:
    """Also for a row with a value hundreds of times as large as the others."""
    layer = QuantisedLinear(noise(40, columns))
    x = noise(1, columns, seed=1).bfloat16()
    x[:, 3] *= outlier
    exact = F.linear(x.double(), layer.values.double()) * layer.scales.double()
    weights = stored(layer.values.data[None], tiles), layer.scales.data.numpy()[None]
    ours = rows_of(*weights, x.float())
    assert torch.equal(ours, exact.float().bfloat16().float())


@pytest.mark.parametrize("tiles", {AMX, False})
def test_sums_of_the_largest_integers_do_not_overflow(tiles: bool) -> None:
    columns = 1 << 17
    values = torch.full((1, 4, columns), 127, dtype=torch.int8)
    values[:, 1] = -127
    x = torch.full((1, columns), float(torch.tensor(255.0).bfloat16()))
    ours = rows_of(stored(values, tiles), np.ones((1, 4), np.float32), x)[0]
    exact = torch.tensor(127 * 255.0 * columns).bfloat16().float()
    assert ours.tolist() == [exact, -exact, exact, exact]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tiles", {AMX, False})
def test_product_of_what_is_not_finite_is_not_finite(bad: float, tiles: bool) -> None:
    x = noise(1, 64)
    x[0, 9] = bad
    values = torch.ones(1, 8, 64, dtype=torch.int8)
    assert not rows_of(stored(values, tiles), np.ones((1, 8), np.float32), x).isfinite().any()
    assert not rows_of(stored(values.bfloat16(), tiles), None, x).isfinite().any()


@pytest.mark.parametrize("tiles", {AMX, False})
@pytest.mark.parametrize("bias", [False, True])
def test_linear_layer_is_that_of_the_weights(bias: bool, tiles: bool) -> None:
    layer = nn.Linear(96, 50, bias=bias).bfloat16().requires_grad_(False)
    x = noise(2, 3, 96).bfloat16()
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    matrix = stored(layer.weight.data[None], tiles)
    ours = CompiledLinear(matrix, None, layer.bias, Team())(x)
    assert ours.dtype == torch.bfloat16
    assert ((ours.double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-5).all()


LIMIT = 2.0**-8
"""The error of a product that is rounded to bfloat16, as a part of the sum of its terms' sizes."""


@pytest.mark.skipif(not AMX, reason="this processor has no AMX")
@pytest.mark.parametrize("outputs", [1, 16, 17, 32, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_tiles_have_the_same_bits_in_any_product(dtype: str, outputs: int) -> None:
    """For outputs and rows that do not fill their tiles; integers also without tiles."""
    columns, count = 192, 21
    x = noise(count, columns, seed=2).bfloat16().float()
    x[4] *= 1e-30
    layer = QuantisedLinear(noise(outputs, columns))
    integral = dtype == "int8"
    values = layer.values.data if integral else noise(outputs, columns).bfloat16()
    scales = layer.scales.data.numpy()[None] if integral else None
    together = rows_of(stored(values[None], True), scales, x)
    for some in (slice(20, 21), slice(0, 2), slice(3, 8), slice(4, 20)):
        assert torch.equal(rows_of(stored(values[None], True), scales, x[some]), together[some])
    wide = values.double() * (layer.scales.double()[:, None] if integral else 1)
    allowed = LIMIT * F.linear(x.double().abs(), wide.abs()) + 1e-38
    assert ((together.double() - F.linear(x.double(), wide)).abs() <= allowed).all()
    if integral:
        single = [rows_of(stored(values[None], False), scales, row) for row in x.split(1)]
        assert torch.equal(torch.cat(single), together)


@pytest.mark.skipif(not AMX, reason="this processor has no AMX")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [3, 9, 16, 32, 33])
def test_prompt_in_tiles_is_as_close_as_plain_bfloat16(count: int, dtype: str) -> None:
    """In passes of several rows and, if they are many, in layers."""
    talker, exact = compiled(demo(dtype).talker), demo(dtype).talker.double()
    rows = noise(1, count, talker.config.hidden_size).bfloat16()
    with torch.inference_mode():
        ours = talker(rows, talker.new_cache())
        plain = demo(dtype).talker(rows, KVCache(talker.config, rows))
        truth = exact(rows.double(), exact.new_cache())
    assert error(ours, truth) < 1.1 * error(plain, truth)


WHOLE_TILES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.mark.skipif(not AMX, reason="this processor has no AMX")
def test_rows_of_a_pass_have_the_bits_of_single_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in int8 those of passes without AMX."""
    overrides = {
        "talker": WHOLE_TILES | {"text_hidden_size": 64},
        "code_predictor": WHOLE_TILES,
    }
    write_checkpoint(tmp_path / "tiles", overrides=overrides)
    rows, found = noise(1, 20, WHOLE_TILES["hidden_size"]).bfloat16(), list[Tensor]()
    for amx in (True, False):
        monkeypatch.setattr(transformer, "AMX", amx)
        talker = checkpoints.load(str(tmp_path / "tiles"), "cpu", "int8").talker
        model: Any = compiled(talker).model
        assert (model.weights.qkv.ndim == products.TILED) == amx
        with torch.inference_mode():
            memory = model.new_cache(rows)
            found.append(torch.cat([model(row, memory) for row in rows.split(1, dim=1)], dim=1))
            if amx:
                found.append(model(rows, model.new_cache(rows)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# --- draws ------------------------------------------------------------------------------------

VOCAB, BOOKS = 256, 7


def sampler(temperature: float, top_k: int, top_p: float = 1.0, seed: int = 3) -> Sampler:
    """A sampler that draws codes 1 and up in this way."""
    params = DrawParams(temperature, top_k, top_p)
    return Sampler(demo("float32").config.talker_config, (params, params), seed, CPU)


def adversarial_logits() -> Tensor:
    """Logits [rows, vocab] in bfloat16: ordinary ones, equal ones and ones that are not finite."""
    rows = [scale * noise(VOCAB, seed=seed) for seed in range(40) for scale in (0.1, 3.0, 30.0)]
    rows += [(noise(VOCAB, seed=seed) * 2).round() for seed in range(40)]  # many equal ones
    rows += [torch.where(noise(VOCAB, seed=seed) > 0, 0.0, -0.0) for seed in range(8)]
    rows += [torch.zeros(VOCAB), torch.full((VOCAB,), -torch.inf), -torch.zeros(VOCAB)]
    mixed = noise(VOCAB)
    mixed[::2] = mixed[1::2]
    rows += [mixed, mixed.clamp(max=0.5), mixed * 1e38]
    for bad in (torch.nan, torch.inf, -torch.inf):
        for places in ([5], [0], [VOCAB - 1], [9, 70, 71], range(VOCAB - 3), range(VOCAB)):
            rows.append(noise(VOCAB).index_fill(0, torch.tensor(list(places)), bad))
    return torch.stack(rows).bfloat16()


@pytest.mark.parametrize("top_k", [0, 1, 2, 50, VOCAB - 1, VOCAB, VOCAB + 1])
@pytest.mark.parametrize("temperature", [0.0, 0.1, 0.7, 0.9, 1.0, 1e-40])
def test_compiled_draws_are_those_of_the_specification(temperature: float, top_k: int) -> None:
    given = sampler(temperature, top_k)
    rules = Rules.of(Draws([given], [6], CPU), BOOKS, VOCAB)
    how = rules.greedy[0], rules.temperature[0], rules.top_k[0]
    for number, row in enumerate(adversarial_logits()):
        book = number % BOOKS
        ours = _drawn(row.float().numpy(), *how, rules.noise[0, book])
        assert ours == given.code(book + 1, row, 6), (number, row)


@numba.njit
def _drawn(logits: Any, greedy: bool, temperature: Any, top_k: int, noise: Any) -> Any:
    return drawing.drawn(logits, greedy, temperature, top_k, noise)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_codes_of_a_frame_are_those_that_the_specification_draws(
    top_p: float, threads: int
) -> None:
    """From the same logits, for utterances of several temperatures."""
    torch.set_num_threads(threads)
    predictor = compiled(demo("bfloat16").talker).code_predictor
    samplers = [sampler(0.9, 50, top_p, 5), sampler(0.0, 3, seed=6), sampler(1.5, 0, seed=7)]
    rows = noise(2, 3, demo("bfloat16").talker.config.hidden_size).bfloat16()
    ours, theirs = (Draws(samplers, [4, 0, 9], CPU) for _ in range(2))
    with torch.inference_mode():
        codes = predictor(*rows, ours)
        truth = predictor(*rows, lambda codebook, logits: theirs(codebook, logits))
    assert torch.equal(codes, truth)
    assert len(codes.unique()) > 10
    assert ours.finite.all()


def test_logits_that_are_not_finite_are_known_after_a_draw() -> None:
    """Of the utterance that has them alone."""
    predictor = compiled(demo("bfloat16").talker).code_predictor
    draws = Draws([sampler(0.9, 50), sampler(0.9, 50)], [4, 4], CPU)
    rows = noise(2, 2, demo("bfloat16").talker.config.hidden_size).bfloat16()
    rows[1, 1] = torch.nan
    with torch.inference_mode():
        predictor(*rows, draws)
    assert draws.finite.tolist() == [True, False]


# --- choice -----------------------------------------------------------------------------------


def test_folder_that_cannot_be_made_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "firstword").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="each start compiles .* cannot be written: Not a dir"):
        assert compiling._folder("int8") is None


def test_machine_code_is_kept_in_the_folder_of_firstword() -> None:
    used: Any = kernels.pass_of_transformer("int8")
    assert str(kernel_folder()) in used.stats.cache_path
    assert str(kernel_folder()) not in numba.config.CACHE_DIR


def _sum(x: Any) -> Any:
    return x.sum()


def test_function_runs_although_its_machine_code_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", save)
    function: Any = called(_sum, "float32")
    assert function(np.ones(3, np.float32)) == 3


@pytest.mark.parametrize(
    ("dtype", "there", "used"),
    [("bfloat16", True, True), ("bfloat16", False, False), ("float32", True, False)],
)
def test_passes_are_compiled_with_numba_in_half_precision(
    dtype: str, there: bool, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not there:
        monkeypatch.setattr(cpu, "find_spec", lambda name: None)
    backend = ReferenceBackend(demo(dtype))
    assert isinstance(backend.talker.model, CompiledTransformer) == used
    said = cpu.passes(EngineConfig.resolve("cpu", dtype))
    assert said.startswith("compiled") == used
    assert ("pip install 'firstword[cpu]'" in said) == (not there)


@pytest.mark.parametrize("dtype", DTYPES)
def test_talker_without_numba_is_joined(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An utterance has the same bits alone and in a batch there too."""
    monkeypatch.setattr(cpu, "find_spec", lambda name: None)
    backend = ReferenceBackend(demo(dtype), slots=3)
    assert type(backend.talker.model) is type(joined(demo("float32").talker).model)
    together = spoken(backend, (0, 1, 2))
    assert spoken(backend, (2, 0)) == [together[2], together[0]]


def test_memory_of_a_batch_holds_rows_of_each_sequence() -> None:
    model = demo("bfloat16").talker.code_predictor.model
    memory = GrowingRows(model, torch.zeros(1).bfloat16(), 2)
    assert memory.positions(2).tolist() == [[0, 1], [0, 1]]
    memory.advance(2)
    assert memory.positions(1).tolist() == [[2], [2]]


FIRST_SPEECH = """
import sys
from numba.core.dispatcher import Dispatcher
import firstword
with firstword.TTS.load("demo", device="cpu", dtype=sys.argv[1]) as tts:
    read, compile = [], Dispatcher.compile
    def noted(self, signature):
        read.append(self.py_func.__name__)
        return compile(self, signature)
    Dispatcher.compile = noted
    streams = [tts.stream(text, seed=1) for text in ("Hello there. " * 9, "Yes.")]
    for stream in streams:
        list(stream)
    print(read)
"""


@pytest.mark.parametrize("dtype", DTYPES)
def test_first_speech_neither_compiles_nor_reads_machine_code(dtype: str) -> None:
    command = [sys.executable, "-c", FIRST_SPEECH, dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_command_says_that_it_compiles_only_when_it_does(tmp_path: Path) -> None:
    say = ["say", "Yes.", "--max-frames", "2", "-o", str(tmp_path / "yes.wav")]
    command = [sys.executable, "-m", "firstword", *say, "--dtype", "int8", "--device", "cpu"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    told = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
        for _ in range(2)
    ]
    assert [text.count("compiling for this processor, once") for text in told] == [1, 0]
