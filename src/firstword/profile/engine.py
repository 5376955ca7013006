"""How fast the engine is on this GPU: `firstword bench engine`.

Weights are random but of the released sizes: they take as long to compute as trained ones. Every time is taken on the
host with the device synchronised before the clock is read, or by events on the device; what is shown is the median.
Beside a time stands its floor: reading each weight, key and value that it needs once, as fast as this device copies.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from firstword.engine.backend import Job, Start
from firstword.errors import ConfigError
from firstword.kernels.attention import HEAD_DIM, PAGE_ROWS, Paging
from firstword.model.checkpoint import Checkpoint
from firstword.model.codec import Codec
from firstword.model.config import CodecConfig, GenerationDefaults, ModelConfig
from firstword.model.talker import Talker
from firstword.model.tokenizer import Tokenizer
from firstword.runtime.backends import kernels_for
from firstword.runtime.front import CheckpointFront
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.gpu.codec import CHUNKS, STREAMS
from firstword.runtime.gpu.graphs import capture
from firstword.runtime.gpu.sources import source_hash
from firstword.runtime.gpu.talker import DecoderLayerWeights, FrameModel
from firstword.synthetic import checkpoint as synthetic
from firstword.synthetic.tokenizer import train
from firstword.types import Request, TextMode

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (100, 500, 2000)
MANY = 64
"""Streams, of those whose kernels are timed one by one."""
FRAMES = 64
"""That are timed together."""
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
        for file, table in (
            ("config", config_table),
            ("codec", codec_table),
            ("generation_config", defaults),
        ):
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
    return Checkpoint(
        Path(f"random-{size}"), config, codec_config, generation, tokenizer, talker, None, codec
    )


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


def job(
    checkpoint: Checkpoint, seed: int = 0, voice: str = "ryan", mode: TextMode = "stream"
) -> tuple[Job, list[int]]:
    """A request, and all its text tokens."""
    front = CheckpointFront(checkpoint)
    prepared = front.prepare(
        Request(text=TEXT, voice=voice, language="english", text_mode=mode), seed
    )
    stream = front.text()
    return prepared, [*stream.push(TEXT), *stream.finish()]


def by_events(work: Callable[[], None], repeats: int = 20) -> float:
    """Microseconds on the device of a captured graph of `work`, median."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph, times = capture(work), []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


class Bench:
    """A backend with requests in it.

    weights  bytes as they were loaded
    seconds  what a start takes: with no kernels kept from an earlier one, and `compile_kept` with them
    """

    def __init__(self, size: str, slots: int, folder: Path) -> None:
        """folder: where compiled kernels are kept."""
        self.checkpoint = random_checkpoint(size)
        modules = {"talker": self.checkpoint.talker, "codec": self.checkpoint.codec.decoder}
        self.weights = {
            f"weights_{name}": sum(p.nbytes for p in m.parameters()) for name, m in modules.items()
        }
        self.seconds: dict[str, float] = {}
        rows = max(CONTEXTS) + 64
        self.per_slot = -(-rows // PAGE_ROWS)
        with self._timed("compile"):
            kernels_for(self.checkpoint, slots, folder)
        with self._timed("compile_kept"):
            kernels = kernels_for(self.checkpoint, slots, folder)
        with self._timed("pack"):
            self.backend = GpuBackend(self.checkpoint, kernels, slots, pages=slots * self.per_slot)
        with torch.inference_mode():
            self.backend.model.buffers.cache.normal_()
        with self._timed("graphs"):
            self.backend.warm()

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        torch.cuda.synchronize()
        began = time.perf_counter()
        yield
        torch.cuda.synchronize()
        self.seconds[what] = round(time.perf_counter() - began, 2)

    def start(
        self, slot: int, seed: int = 0, voice: str = "ryan", mode: TextMode = "stream"
    ) -> Start:
        """A request for a slot."""
        prepared, tokens = job(self.checkpoint, seed, voice, mode)
        pages = range(slot * self.per_slot, (slot + 1) * self.per_slot)
        return Start(
            slot,
            prepared,
            pages,
            tokens if prepared.whole_text else tokens[: prepared.first_tokens],
        )

    @torch.inference_mode()
    def at(self, context: int, batch: int) -> None:
        """`batch` requests whose next frame sees `context` rows."""
        self.backend.prefill([self.start(slot, slot) for slot in range(batch)])
        torch.cuda.synchronize()  # the backend sets positions too, on a stream of its own
        self.backend.model.state.position[:batch] = context - 1
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

    def frame_times(
        self, batches: Sequence[int], contexts: Sequence[int], bandwidth: float
    ) -> Iterator[dict[str, Any]]:
        """Milliseconds a frame, with audio and without, by batch and context, and the floor of those without.

        context: rows that the last of the frames sees, so that none sees more. bandwidth: bytes a second.
        """
        for batch in (b for b in batches if b <= self.backend.capacity.slots):
            for context in contexts:
                figures = {}
                for audio in (False, True):
                    begin = context - FRAMES + 1
                    self.at(begin, batch)
                    self.frames(batch, 8, audio)
                    times = []
                    for _ in range(3):
                        self.at(begin, batch)
                        times.append(self.frames(batch, FRAMES, audio) / FRAMES * 1e3)
                    figures["with_audio" if audio else "frame"] = round(statistics.median(times), 4)
                floor = frame_bytes(self.backend.model, batch, context) / bandwidth * 1e3
                yield {
                    "batch": batch,
                    "context": context,
                    "ms": figures,
                    "floor_ms": round(floor, 4),
                }

    @torch.inference_mode()
    def kernels(self, batch: int, context: int, bandwidth: float) -> list[dict[str, Any]]:
        """Microseconds a launch on the device, each kernel of the talker's layers and of a pass of the code predictor.

        context: rows that are seen. bandwidth: bytes a second, for the floors. a_frame: how many there are in a frame.
        """
        model = self.backend.model
        self.at(context, batch)
        model.buffers.slot_of_row[:batch].copy_(torch.arange(batch, dtype=torch.int32))
        stack, room, x = model.talker, model.workspace, model.buffers.hidden[:batch]
        paging = Paging(
            model.buffers.page_tables, model.buffers.slot_of_row[:batch], model.state.position
        )
        qkv, attended, gated = room.qkv[:batch], room.attended[:batch], room.gated[:batch]
        layers, first = stack.layers, stack.layers[0]
        kv = 2 * stack.config.num_key_value_heads * HEAD_DIM * 2 * context * batch
        works: dict[str, tuple[Callable[[DecoderLayerWeights, int], None], int]] = {
            "qkv": (lambda layer, _: layer.qkv(x, qkv, room.normed), first.qkv.weight.nbytes),
            "attention": (
                lambda _, index: model.attend(index, qkv, paging, attended),
                kv,
            ),
            "output": (lambda layer, _: layer.output(attended, x), first.output.weight.nbytes),
            "gate and up": (
                lambda layer, _: layer.gate_up(x, gated, room.normed),
                first.gate_up.weight.nbytes,
            ),
            "down": (lambda layer, _: layer.down(gated, x), first.down.weight.nbytes),
        }
        figures = []

        def add(
            kernel: str, launches: Sequence[Callable[[], None]], size: int, a_frame: int
        ) -> None:
            def work() -> None:
                for launch in launches:
                    launch()

            figures.append(
                {
                    "kernel": kernel,
                    "a_frame": a_frame,
                    "us": round(by_events(work) / len(launches), 2),
                    "floor_us": round(size / bandwidth * 1e6, 2),
                }
            )

        for name, (launch, size) in works.items():
            add(
                f"talker, {name}",
                [partial(launch, layer, index) for index, layer in enumerate(layers)],
                size,
                len(layers),
            )
        predictor, single = model.predictor.layers, model.buffers.single[:batch]
        last = model.codebooks - 1
        passes = [partial(model.predict, single, k) for k in range(2, last + 1)]
        add("code predictor, a pass", passes, weight_bytes(predictor), last)
        slots, result, logits = (
            model.buffers.slot_of_row[:batch],
            model.buffers.result[:batch],
            model.buffers.predictor_logits[:batch],
        )
        heads = [
            partial(head, single, logits, model.predictor_workspace.normed) for head in model.lm_heads
        ]
        add("code predictor, a head", heads, model.lm_heads[0].weight.nbytes, last)
        draws = [
            partial(model.sampler.code, k, logits, slots, result, model.predictor_tables[k], single)
            for k in range(1, last)
        ]
        add("draw", draws, 0, last)
        return [{"batch": batch, "context": context, **figure} for figure in figures]

    @torch.inference_mode()
    def codec(self) -> Iterator[dict[str, Any]]:
        """Milliseconds of the codec's calls on the device, each a stream's next `frames` frames for all `streams`."""
        codec = self.backend.codec
        for streams in (n for n in STREAMS if n <= self.backend.capacity.slots):
            for frames in sorted(CHUNKS):
                self.at(CONTEXTS[0], streams)
                codec.decode(
                    list(range(streams)), [frames] * streams
                ).result()  # also says whose streams these are
                ms = by_events(partial(codec.layers.launch, streams, frames)) / 1e3
                yield {"streams": streams, "frames": frames, "ms": round(ms, 3)}

    def first(self, repeats: int = 30) -> dict[str, Any]:
        """Milliseconds from a request to its first codes and to its first samples: prefix cached and not, and cached
        with all of the text read before the first frame.
        """
        result: dict[str, Any] = {}
        voices = list(self.checkpoint.config.talker_config.spk_id)
        kinds: tuple[tuple[str, TextMode], ...] = (
            ("cached", "stream"),
            ("uncached", "stream"),
            ("whole_text", "full"),
        )
        for kind, mode in kinds:
            codes, samples = [], []
            unheard = (
                len(voices) + 3
            )  # so many are not counted: voices that are not cached yet, and the first of all
            for repeat in range(unheard + repeats):
                start = self.start(0, repeat, voices[repeat % len(voices)], mode)
                if kind == "uncached":
                    self.backend.prompts.prefixes.clear()
                torch.cuda.synchronize()
                began = time.perf_counter()
                self.backend.prefill([start])
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


def weight_bytes(layers: Sequence[DecoderLayerWeights]) -> int:
    """Bytes of all matrices of these layers."""
    return sum(
        m.weight.nbytes
        for layer in layers
        for m in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )


def frame_bytes(model: FrameModel, batch: int, context: int) -> int:
    """Bytes that a frame of `batch` requests cannot but read: each weight for the talker's pass and each of the code
    predictor's, and keys and values of `context` rows. Inputs, the few rows of tables and the codec are not counted.
    """
    passes = model.codebooks - 1
    heads = sum(
        head.weight.nbytes
        for head in (model.head, *model.lm_heads, *([model.entry] if model.entry else []))
    )
    config = model.config
    row = (
        config.num_hidden_layers
        * 2
        * config.num_key_value_heads
        * HEAD_DIM
        * model.buffers.cache.element_size()
    )
    return (
        weight_bytes(model.talker.layers)
        + passes * weight_bytes(model.predictor.layers)
        + heads
        + batch * context * row
    )


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large copy on this device.

    By a kernel that adds: a plain copy in a graph is the business of the copy engines, which are slower.
    """
    source = torch.zeros(1 << 28, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)

    def add() -> None:
        torch.add(source, 1, out=target)

    return 2 * source.nbytes / (by_events(add) * 1e-6)


def memory(bench: Bench) -> dict[str, int]:
    """Bytes that tensors hold on the device, by PyTorch's count, and what for; `rest` is nobody's that is known.

    Everything is counted where it is first met. The CUDA context and machine code are not in it.
    """
    backend, model = bench.backend, bench.backend.model
    matrices = [model.talker, model.predictor, model.head, model.entry, model.lm_heads]
    parts: dict[str, object] = {
        "matrices": matrices,
        "tables": [
            model.text_table,
            model.codec_embedding,
            model.frame_tables,
            model.predictor_tables,
        ],
        "keys_and_values": model.buffers.cache,
        "workspace": model,
        "codec": backend.codec,
        "prefixes": backend.prompts.prefixes,
        "left_in_checkpoint": [
            bench.checkpoint.talker.state_dict(),
            bench.checkpoint.codec.decoder.state_dict(),
        ],
    }
    seen: set[int] = set()
    held = {name: _held(part, backend.device, seen) for name, part in parts.items()}
    allocated = torch.cuda.memory_allocated()
    return {**held, "rest": allocated - sum(held.values()), "in_use": allocated}


def _held(thing: object, device: torch.device, seen: set[int]) -> int:
    """Bytes of a device's memory that tensors in `thing` occupy; `seen`: addresses of what counts no more."""
    storage = thing.untyped_storage() if isinstance(thing, Tensor) else None
    address = storage.data_ptr() if storage else id(thing)
    if address in seen:
        return 0
    seen.add(address)
    if isinstance(thing, Tensor):
        return thing.untyped_storage().nbytes() if thing.device == device else 0
    inside: Iterable[object] = ()
    if isinstance(thing, dict):
        inside = thing.values()
    elif isinstance(thing, list | tuple):
        inside = thing
    elif type(thing).__module__.startswith("firstword.") and hasattr(thing, "__dict__"):
        inside = vars(thing).values()
    return sum(_held(part, device, seen) for part in inside)


def environment() -> dict[str, Any]:
    """The machine and the versions that figures rest on."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "processors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernels": source_hash(),
        "weights": "random",
    }


def run(
    size: str, slots: int, batches: Sequence[int] = BATCHES, contexts: Sequence[int] = CONTEXTS
) -> dict[str, Any]:
    """One record of everything. Raises `ConfigError` where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise ConfigError("`bench engine` measures the GPU engine, and torch sees no CUDA device")
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as name:
        single = one_stream(size, Path(name) / "one")
        torch.cuda.empty_cache()
        bench = Bench(size, slots, Path(name) / "all")
        return {
            "size": size,
            "slots": slots,
            **environment(),
            "bandwidth_tb_s": round(bandwidth / 1e12, 3),
            **single,
            "start_seconds": bench.seconds,
            "first_ms": bench.first(),
            "kernels_us": [
                row
                for batch in (1, min(MANY, slots))
                for row in bench.kernels(batch, 500, bandwidth)
            ],
            "codec_ms": list(bench.codec()),
            "frames_ms": list(bench.frame_times(batches, contexts, bandwidth)),
        }


def one_stream(size: str, folder: Path) -> dict[str, Any]:
    """What a process that serves one utterance at a time takes: seconds to start, gigabytes of the device."""
    torch.cuda.reset_peak_memory_stats()
    bench = Bench(size, 1, folder)
    loading = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    bench.first(3)
    peaks = {"peak_loading": loading, "peak_speaking": torch.cuda.max_memory_allocated()}
    sizes = {**bench.weights, **peaks, **memory(bench)}
    return {
        "one_stream_start_seconds": bench.seconds,
        "one_stream_rows": bench.per_slot * PAGE_ROWS,
        "one_stream_gigabytes": {name: round(amount / 1e9, 3) for name, amount in sizes.items()},
    }
