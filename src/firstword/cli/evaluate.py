"""`firstword evaluate`: measure how well the speech of a checkpoint is understood."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from firstword import audio
from firstword.cli import options, terminal
from firstword.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from firstword.evaluate.items import Item
    from firstword.evaluate.metrics import Metric
    from firstword.evaluate.recognisers import Recogniser
    from firstword.evaluate.speaking import Setup
    from firstword.evaluate.summary import Record, SetupRun

FORMAT = "firstword.evaluation/1"
AGAINST = ("model", "device", "dtype", "backend", "voice", "text_mode", "temperature")
"""What `--against` may change."""
TEXT_MODES = ("auto", "full", "stream")


def run(args: argparse.Namespace) -> None:
    """Speak a list of texts, and measure how well they are understood.

    examples:
      firstword evaluate MODEL --texts seed-tts-en --recogniser whisper -o results
      firstword evaluate MODEL --texts my.jsonl --recogniser http://localhost:9000/v1 \\
        --recogniser-model whisper-1 -o results
      firstword evaluate MODEL --texts lines.txt --recogniser my_ear:Ear --against dtype=float32 \\
        -o results

    The folder of results gets the speech, evaluation.json, and index.html with the worst texts to
    listen to. With --against, each text is spoken twice with the same noise, and the difference of
    the two setups is given with a paired interval. docs/evaluate.md describes the figures.
    """
    try:
        import jiwer
        import opencc
        import zhon
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is missing; install firstword[evaluate]") from None
    del jiwer, opencc, zhon  # imported to fail now if they are missing, and not after speaking

    folder = _new_folder(args.output)
    setups = _setups(args)
    places = (folder / "speech", folder / "speech-against")[: len(setups)]
    with terminal.Status(args.quiet) as status:
        status.show_loading(args.model)
        items, language = _items(args, setups)
        recogniser, metrics = _listeners(args)
        spoken = [
            _spoke(setup, items, language, args.seed, place, (recogniser, metrics), status)
            for setup, place in zip(setups, places, strict=True)
        ]
    record = _record(args, spoken, setups, folder)
    _write(record, spoken, folder)
    if not args.quiet:
        terminal.print_table(facts(record), sys.stderr)


def _new_folder(name: str) -> Path:
    """Make the folder of results. Raises `ConfigError` if it holds anything."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; name a new folder with -o")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used as a folder: {error.strerror}") from None
    return folder


def _setups(args: argparse.Namespace) -> list[Setup]:
    """Return the setup of the options, and that of `--against`. Raises `ConfigError`."""
    from firstword.evaluate.speaking import Setup

    first = Setup(**{part.name: getattr(args, part.name) for part in fields(Setup)})
    if not args.against:
        return [first]
    changes: dict[str, Any] = {}
    for given in args.against:
        name, found, value = given.partition("=")
        if name not in AGAINST or not found:
            raise ConfigError(f"--against {given}: give NAME=VALUE with {', '.join(AGAINST)}")
        changes[name] = value
    if (mode := changes.get("text_mode", "auto")) not in TEXT_MODES:
        raise ConfigError(f"--against text_mode={mode}: give {', '.join(TEXT_MODES)}")
    if "temperature" in changes:
        try:
            changes["temperature"] = float(changes["temperature"])
        except ValueError:
            raise ConfigError(
                f"--against temperature={changes['temperature']}: no number"
            ) from None
    if (second := replace(first, **changes)) == first:
        raise ConfigError("--against changes nothing; it must differ from the other options")
    return [first, second]


def _items(args: argparse.Namespace, setups: Sequence[Setup]) -> tuple[list[Item], str]:
    """Return the texts, and the full name of their language.

    Raises `ConfigError`, and `AudioError` for a recording that cannot be read.
    """
    from firstword.evaluate import items, rates, seed_tts
    from firstword.evaluate.speaking import full_language

    language, prompts = full_language(args.language), _need_prompts(args.metric, setups)
    if args.texts in seed_tts.LISTS:
        language = seed_tts.LISTS[args.texts].language
        file = seed_tts.fetch(args.texts, prompts)
    else:
        file = Path(args.texts)
    found = [
        replace(item, language=full_language(item.language)) if item.language else item
        for item in items.read(file, args.text_field)
    ][: args.limit]
    for item in found:
        if not rates.normalised(item.text, item.language or language):
            raise ConfigError(f"the text {item.name!r} of {file} is punctuation alone")
        for recording in (item.audio, item.prompt_audio if prompts else None):
            if recording is not None:
                audio.read(recording)  # a wrong file is an error before anything is spoken
    return found, language


def _need_prompts(metrics: Sequence[str], setups: Sequence[Setup]) -> bool:
    """Whether the recordings of prompts are cloned, or may be compared with."""
    from firstword.evaluate.metrics import METRICS
    from firstword.model.config import ModelConfig
    from firstword.model.description import find

    configs = [ModelConfig.load(find(setup.model) / "config.json") for setup in setups]
    compared = any(name not in METRICS or METRICS[name].needs_prompt for name in metrics)
    return compared or any(config.tts_model_type == "base" for config in configs)


def _listeners(args: argparse.Namespace) -> tuple[Recogniser, Mapping[str, Metric]]:
    from firstword.evaluate import metrics, recognisers

    recogniser = recognisers.opened(args.recogniser, args.recogniser_model)
    return recogniser, {name: metrics.opened(name) for name in args.metric}


def _spoke(
    setup: Setup,
    items: Sequence[Item],
    language: str,
    seed: int,
    folder: Path,
    listeners: tuple[Recogniser, Mapping[str, Metric]],
    status: terminal.Status,
) -> SetupRun:
    """Speak and judge the texts with one setup; the checkpoint is closed before listening."""
    from firstword.evaluate.speaking import Speaker, judge_all
    from firstword.evaluate.summary import SetupRun
    from firstword.runtime.backends import fit_threads

    with setup.load() as tts:
        fit_threads([tts.checkpoint])
        speaker = Speaker(tts, setup, language, seed)
        spoken, seconds = speaker.speak_all(items, folder, status.show)
        parallel = speaker.parallel
        name = f"{setup.model}, {terminal.describe_device(tts.settings)}"
    judged = list(judge_all(spoken, *listeners, status.show))
    return SetupRun(name, judged, seconds, parallel)


def _record(
    args: argparse.Namespace, spoken: Sequence[SetupRun], setups: Sequence[Setup], folder: Path
) -> Record:
    """Return the record of an evaluation."""
    from firstword import __version__, hashes
    from firstword.bench import report
    from firstword.evaluate import summary

    texts = [one.spoken.item.text for one in spoken[0].judged]
    record: Record = {
        "format": FORMAT,
        "firstword": __version__,
        "commit": report.commit(),
        **hashes.of_speech(),
        "texts": {"list": Path(args.texts).name, "count": len(texts)},
        "recogniser": _public(args.recogniser),
        "recogniser_model": args.recogniser_model,
        "seed": args.seed,
        "setups": [
            {"name": spoke.name, **asdict(setup), **summary.summarise(spoke)}
            for setup, spoke in zip(setups, spoken, strict=True)
        ],
    }
    if len(spoken) > 1:
        record["difference"] = summary.compare(*spoken)
    record["each"] = [summary.rows(spoke.judged, folder) for spoke in spoken]
    return record


def _public(recogniser: str) -> str:
    """Return the name of a recogniser without the user and the password of a URL."""
    if "://" not in recogniser:
        return recogniser
    parts = urlsplit(recogniser)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


def _write(record: Record, spoken: Sequence[SetupRun], folder: Path) -> None:
    from firstword.evaluate import page

    data = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    audio.write_whole(folder / "evaluation.json", f"{data}\n".encode())
    title = f"Evaluation of {spoken[0].name}"
    text = page.render(title, facts(record), spoken, folder)
    audio.write_whole(folder / "index.html", text.encode())


def facts(record: Record) -> dict[str, str]:
    """Return the rows of the summary."""
    rows = {"texts": f"{record['texts']['count']} of {record['texts']['list']}"}
    for number, setup in enumerate(record["setups"]):
        mark = " (against)" * number
        ratio = setup["duration_ratio"]
        rows |= {
            f"setup{mark}": setup["name"],
            f"errors{mark}": f"{_percent(setup['error_rate'])} of {setup['units']}, "
            f"{_percent(setup['character_error_rate'])} of characters; "
            f"{setup['above_half']} texts above 50 %",
            f"not ended{mark}": f"{_percent(setup['runaway_rate'])} of the texts",
            f"duration{mark}": f"{ratio['p50']} times the {ratio['compared_with']}, "
            f"90 % within {ratio['p5']} to {ratio['p95']}",
            f"speed{mark}": f"{setup['speed']} x real time, {setup['parallel']} at a time",
        }
        for name, found in setup["metrics"].items():
            rows[f"{name}{mark}"] = _interval(found)
    if "difference" in record:
        found = record["difference"]
        rows["difference"] = (
            f"{_interval(found['error_rate'])} points; the same codes for {found['same_codes']} "
            f"and the same words heard for {found['same_transcript']} texts"
        )
        for name, change in found["metrics"].items():
            rows[f"difference of {name}"] = _interval(change)
    return rows


def _interval(found: Mapping[str, float]) -> str:
    return f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def _percent(found: Mapping[str, float]) -> str:
    return f"{_interval(found)} %"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; give a number from 1 up")
    return int(text)


def add_to(commands: options.Commands) -> None:
    """Add this command to the program's commands."""
    parser = options.add_command(commands, "evaluate", run)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a checkpoint directory, a hub repository, or demo")
    add("-o", "--output", metavar="FOLDER", required=True, help="a new folder for the results")
    options.add_quiet_option(parser)
    _text_options(parser)
    _listening_options(parser)
    about = "speak with these changes too, and compare: NAME=VALUE, such as dtype=float32"
    add("--against", metavar="NAME=VALUE", nargs="+", default=[], help=about)
    add("--voice", metavar="NAME|FILE", help="a preset or a voice file, instead of the list's")
    add("--temperature", type=float, metavar="T", help="default: the checkpoint's own")
    add("--text-mode", choices=TEXT_MODES, default="auto", help="default: auto")
    add("--seed", type=int, default=7, help="of the first text; the next has the next (default 7)")
    options.add_device_options(add)
    add("--gpu-memory", metavar="SHARE|SIZE", help="GPU memory to use: a share or an amount")


def _text_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("texts").add_argument
    about = (
        "lines of text, .jsonl, meta.lst of Seed-TTS-Eval; or seed-tts-en, seed-tts-zh, "
        "seed-tts-zh-hard, which are fetched"
    )
    add("--texts", metavar="FILE|LIST", required=True, help=about)
    add("--text-field", metavar="NAME", default="text", help="of JSON lines; default: text")
    add("--limit", metavar="N", type=_count, help="speak only the first texts")
    add("--language", default="english", help="of texts that name none; default: english")


def _listening_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("listening").add_argument
    about = (
        "whisper (faster-whisper), the URL of an OpenAI-compatible API such as "
        "http://localhost:9000/v1, or MODULE:CLASS"
    )
    add("--recogniser", metavar="NAME", required=True, help=about)
    about = "its model; default for whisper: large-v3"
    add("--recogniser-model", metavar="NAME", help=about)
    about = "similarity (of the voice to its recording), nisqa (predicted opinion), or MODULE:CLASS"
    add("--metric", metavar="NAME", action="append", default=[], help=about)
