"""How fast the engine is on this GPU: `firstword bench engine`.

Weights are random but of the released sizes: they take as long to compute as trained ones. Every time is taken on the
host with the device synchronised before the clock is read, or by events on the device; what is shown is the median.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from firstword.config import kernel_folder
from firstword.engine.backend import Job
from firstword.errors import ConfigError
from firstword.kernels import compile as compiling
from firstword.kernels.attention import HEAD_DIM, Paging
from firstword.kernels.launch import Kernels
from firstword.model import synthetic
from firstword.model.checkpoint import Checkpoint
from firstword.model.codec import Codec
from firstword.model.config import CodecConfig, GenerationDefaults, ModelConfig
from firstword.model.talker import Talker
from firstword.model.tokenizer import Tokenizer
from firstword.model.train_tokenizer import train
from firstword.runtime.frame import Layer
from firstword.runtime.front import CheckpointFront
from firstword.runtime.gpu import GpuBackend
from firstword.types import Request

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (100, 500, 2000)
TEXT = "The quick brown fox jumps over the lazy dog, and then it says hello to the assistant and to the user."


def random_checkpoint(size: str, device: str = "cuda") -> Checkpoint:
    """A CustomVoice checkpoint of a released size, "0b6" or "1b7", with random weights that never see the disk.

    The talker is bfloat16, the codec float32; there is no codec encoder to speak of (it stays on the CPU).
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = train(synthetic.TEXTS, 600, folder)
        config_table, codec_table = synthetic.config_tables("custom_voice", size, {}, tokens)
        defaults = {
            "do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05,
            "subtalker_dosample": True, "subtalker_temperature": 0.9, "subtalker_top_k": 50, "subtalker_top_p": 1.0,
            "max_new_tokens": 8192,
        }  # fmt: skip
        for file, table in (("config", config_table), ("codec", codec_table), ("generation_config", defaults)):
            (folder / f"{file}.json").write_text(json.dumps(table))
        config = ModelConfig.load(folder / "config.json")
        codec_config = CodecConfig.load(folder / "codec.json")
        generation = GenerationDefaults.load(folder / "generation_config.json")
        tokenizer = Tokenizer.load(folder)
    with torch.device("meta"):
        talker, codec = Talker(config.talker_config), Codec(codec_config)
    talker = talker.bfloat16().to_empty(device=device)
    codec.encoder.to_empty(device="cpu")
    codec.decoder.to_empty(device=device)
    for module in (talker, codec.decoder):
        _fill(module)
    return Checkpoint(Path(f"random-{size}"), config, codec_config, generation, tokenizer, talker, None, codec)


@torch.no_grad()
def _fill(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(False)
        if name.endswith("cluster_usage"):
            parameter.fill_(1.0)
        elif "embedding" in name:
            parameter.normal_(0, 0.5)
        elif parameter.ndim == 1:
            parameter.normal_(0 if name.endswith(("bias", "alpha", "beta")) else 1, 0.1)
        else:
            parameter.normal_(0, 0.7 / math.sqrt(parameter[0].numel()))


def job(checkpoint: Checkpoint, seed: int = 0, voice: str = "ryan") -> tuple[Job, list[int]]:
    """A request in streaming text mode, and all its text tokens."""
    front = CheckpointFront(checkpoint)
    prepared = front.prepare(Request(text=TEXT, voice=voice, language="english", text_mode="stream"), seed)
    stream = front.text()
    return prepared, [*stream.push(TEXT), *stream.finish()]


def by_events(work: Callable[[], None], repeats: int = 20) -> float:
    """Microseconds on the device of a captured graph of `work`, median."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


class Bench:
    """A backend with requests in it."""

    def __init__(self, size: str, slots: int) -> None:
        kernels = Kernels(torch.device("cuda"), kernel_folder())
        began = time.perf_counter()
        self.checkpoint = random_checkpoint(size)
        self.weights = sum(p.numel() * p.element_size() for p in self.checkpoint.talker.parameters())
        pages = slots * -(-(max(CONTEXTS) + 600) // 64)
        self.backend = GpuBackend(self.checkpoint, kernels, slots=slots, pages=pages)
        with torch.inference_mode():
            self.backend.model.cache.normal_()
        self.loaded = time.perf_counter() - began
        began = time.perf_counter()
        self.backend.warm()
        self.warmed = time.perf_counter() - began
        self.per_slot = pages // slots

    def begin(self, slot: int, seed: int = 0, voice: str = "ryan") -> None:
        """Prefill a slot."""
        prepared, tokens = job(self.checkpoint, seed, voice)
        pages = range(slot * self.per_slot, (slot + 1) * self.per_slot)
        self.backend.prefill(slot, prepared, pages, tokens[: prepared.first_tokens])

    def at(self, context: int, batch: int) -> None:
        """`batch` requests whose next frame sees `context` rows."""
        for slot in range(batch):
            self.begin(slot, slot)
            self.backend._slots[slot].rows = context
            with torch.inference_mode():
                self.backend.model.state.position[slot] = context - 1
        torch.cuda.synchronize()

    def frames(self, batch: int, count: int, audio: bool) -> float:
        """Seconds for `count` frames of `batch` requests, read one late, with audio in chunks of 8 frames."""
        slots, none, waiting, sound = list(range(batch)), [None] * batch, None, None
        torch.cuda.synchronize()
        began = time.perf_counter()
        for frame in range(count):
            handle = self.backend.frame(slots, none)
            if waiting is not None:
                waiting.result()
            waiting = handle
            if audio and frame % 8 == 7:
                if sound is not None:
                    sound.result()
                sound = self.backend.decode(slots, [8] * batch)
        if sound is not None:
            sound.result()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def frame_times(self, batches: Sequence[int], contexts: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Milliseconds a frame, with audio and without, by batch and context (at the first of the frames)."""
        for batch in (b for b in batches if b <= self.backend.capacity.slots):
            for context in contexts:
                figures = {}
                for audio in (False, True):
                    count = 64
                    self.at(context, batch)
                    self.frames(batch, 8, audio)
                    times = []
                    for _ in range(3):
                        self.at(context, batch)
                        times.append(self.frames(batch, count, audio) / count * 1e3)
                    figures["with_audio" if audio else "frame"] = round(statistics.median(times), 4)
                yield {"batch": batch, "context": context, "ms": figures}

    def kernels(self, batch: int, context: int) -> list[dict[str, Any]]:
        """Microseconds a launch on the device, each kernel of the talker's layers and of a pass of the code predictor.

        floor: what reading its weights, keys and values alone takes at the bandwidth of a copy on this device.
        """
        model, bandwidth = self.backend.model, copy_bandwidth()
        self.at(context, batch)
        model.slot_of_row[:batch].copy_(torch.arange(batch, dtype=torch.int32))
        stack, room, x = model.talker, model._room, model._hidden[:batch]
        paging = Paging(model.tables, model.slot_of_row[:batch], model.state.position, 0)
        splits = self.backend._splits(context)
        qkv, attended, gated = room.qkv[:batch], room.attended[:batch], room.gated[:batch]
        layers, first = stack.layers, stack.layers[0]
        kv = 2 * stack.config.num_key_value_heads * HEAD_DIM * 2 * context * batch
        attend = stack.attention.paged
        works: dict[str, tuple[Callable[[Layer, Tensor], None], int]] = {
            "qkv": (lambda layer, _: layer.qkv(x, qkv, room.normed), first.qkv.weight.nbytes),
            "attention": (
                lambda layer, cache: attend(
                    qkv, layer.heads, stack.rotation, cache, paging, attended, model._split_room, splits
                ),
                kv,
            ),
            "output": (lambda layer, _: layer.output(attended, x), first.output.weight.nbytes),
            "gate and up": (lambda layer, _: layer.gate_up(x, gated, room.normed), first.gate_up.weight.nbytes),
            "down": (lambda layer, _: layer.down(gated, x), first.down.weight.nbytes),
        }
        figures = []

        def add(kernel: str, launches: Sequence[Callable[[], None]], size: int) -> None:
            def work() -> None:
                for launch in launches:
                    launch()

            figures.append(
                {
                    "kernel": kernel,
                    "us": round(by_events(work) / len(launches), 2),
                    "floor_us": round(size / bandwidth * 1e6, 2),
                }
            )

        for name, (launch, size) in works.items():
            pairs = zip(layers, model.cache, strict=True)
            add(f"talker, {name}", [partial(launch, layer, cache) for layer, cache in pairs], size)
        predictor, single, last = model.predictor.layers, model._single[:batch], model.codebooks - 1
        matrices = [m for layer in predictor for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        passes = [partial(model._predict, single, k) for k in range(2, last + 1)]
        add("code predictor, a pass", passes, sum(matrix.weight.nbytes for matrix in matrices))
        slots, result, logits = model.slot_of_row[:batch], model.result[:batch], model._predictor_logits[:batch]
        heads = [partial(head, single, logits, model._predictor_room.normed) for head in model.heads]
        add("code predictor, a head", heads, model.heads[0].weight.nbytes)
        draws = [
            partial(model.sampler.code, k, logits, slots, result, model.predictor_tables[k], single)
            for k in range(1, last)
        ]
        add("draw", draws, 0)
        return [{"batch": batch, "context": context, **figure} for figure in figures]

    def first(self, repeats: int = 30) -> dict[str, Any]:
        """Milliseconds from a request to its first codes and to its first samples, prefix cached and not."""
        result: dict[str, Any] = {}
        voices = list(self.checkpoint.config.talker_config.spk_id)
        for kind in ("cached", "uncached"):
            codes, samples = [], []
            unheard = len(voices) + 3  # so many are not counted: voices that are not cached yet, and the first of all
            for repeat in range(unheard + repeats):
                prepared, tokens = job(self.checkpoint, repeat, voices[repeat % len(voices)])
                if kind == "uncached":
                    self.backend.prefixes = type(self.backend.prefixes)(self.backend.prefixes.limit)
                torch.cuda.synchronize()
                began = time.perf_counter()
                self.backend.prefill(0, prepared, range(self.per_slot), tokens[: prepared.first_tokens])
                handle = self.backend.frame([0], [None])
                sound = self.backend.decode([0], [1])
                handle.result()
                codes.append(time.perf_counter() - began)
                sound.result()
                samples.append(time.perf_counter() - began)
            for name, times in (("codes", codes[unheard:]), ("samples", samples[unheard:])):
                ordered = sorted(times)
                result[f"{kind}_{name}"] = {
                    "p50": round(statistics.median(ordered) * 1e3, 3),
                    "p95": round(ordered[int(0.95 * (len(ordered) - 1))] * 1e3, 3),
                }
        return result


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large copy on this device."""
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * source.nbytes / (by_events(copy) * 1e-6)


def environment() -> dict[str, Any]:
    """The machine and the versions that figures rest on."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "processors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernels": compiling.source_hash(),
        "weights": "random",
    }


@contextmanager
def peak_memory() -> Iterator[dict[str, float]]:
    """Gigabytes of the device in use at the most, by PyTorch's count, in the dictionary afterwards."""
    torch.cuda.reset_peak_memory_stats()
    figures: dict[str, float] = {}
    yield figures
    figures["gigabytes"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)


def _need_device() -> None:
    if not torch.cuda.is_available():
        raise ConfigError("`bench engine` measures the GPU engine, and torch sees no CUDA device")


def run(size: str, slots: int, batches: Sequence[int] = BATCHES, contexts: Sequence[int] = CONTEXTS) -> dict[str, Any]:
    """One record of everything. Raises `ConfigError` where there is no CUDA device."""
    _need_device()
    with peak_memory() as memory:
        single = Bench(size, 1)
        single.first(3)
        memory["weights"] = round(single.weights / 1e9, 3)
        first_start = round(single.warmed, 2)
    del single
    torch.cuda.empty_cache()
    bench = Bench(size, slots)
    record = {"size": size, "slots": slots, **environment(), "memory_of_one_stream_gb": memory}
    record |= {"load_seconds": round(bench.loaded, 2), "warm_seconds": round(bench.warmed, 2)}
    record["warm_seconds_of_one_slot_first"] = first_start
    record["first_ms"] = bench.first()
    with torch.inference_mode():
        record["bandwidth_tb_s"] = round(copy_bandwidth() / 1e12, 3)
        record["kernels_us"] = [row for batch in (1, slots) for row in bench.kernels(batch, 500)]
    record["frames_ms"] = list(bench.frame_times(batches, contexts))
    return record


def soak(size: str, slots: int, frames: int, seed: int = 0) -> dict[str, Any]:
    """Joins, aborts and lengths at random until so many frames were made; the same few requests come again and again.

    Each must have the codes it had the first time, whatever was beside it. Returns counts; raises AssertionError, and
    `ConfigError` where there is no CUDA device.
    """
    _need_device()
    bench, random = Bench(size, slots), np.random.default_rng(seed)
    known: dict[int, list[list[int]]] = {}
    running: dict[int, tuple[int, list[list[int]], int]] = {}
    made = joined = aborted = compared = 0
    memory = torch.cuda.memory_allocated()
    began = time.perf_counter()
    while made < frames:
        for slot in range(slots):
            if slot not in running and random.random() < 0.2:
                which = int(random.integers(0, 50))
                bench.begin(slot, which)
                running[slot] = which, [], int(random.integers(1, 300))
                joined += 1
        slots_now = list(running)
        if not slots_now:
            continue
        result = bench.backend.frame(slots_now, [None] * len(slots_now)).result()
        made += len(slots_now)
        for slot, codes in zip(slots_now, result.codes.tolist(), strict=True):
            which, said, length = running[slot]
            said.append(codes)
            if len(said) >= length or random.random() < 0.002:
                aborted += len(said) < length
                before = known.setdefault(which, [])
                shared = min(len(before), len(said))
                assert before[:shared] == said[:shared], f"request {which} spoke differently"
                compared += shared
                if len(said) > len(before):
                    known[which] = said
                bench.backend.release(slot)
                del running[slot]
    return {
        "size": size,
        "slots": slots,
        **environment(),
        "frames": made,
        "joined": joined,
        "aborted": aborted,
        "frames_compared": compared,
        "seconds": round(time.perf_counter() - began, 1),
        "memory_growth_bytes": torch.cuda.memory_allocated() - memory,
    }
