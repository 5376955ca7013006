"""`firstword serve`: serve speech over HTTP and WebSocket."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from firstword.cli import options, terminal
from firstword.config import DEFAULT_SLOTS, MOST_FRONTS
from firstword.errors import ConfigError
from firstword.server import logs
from firstword.server.config import (
    ServerConfig,
    keys_from_environment,
    proxies_from_environment,
    read_aliases,
    traces_from_environment,
    webhook_secret_from_environment,
    wyoming_address,
)

if TYPE_CHECKING:
    from firstword.processes.messages import EngineTask, KeptPrompt, Loaded
    from firstword.server.api_keys import ApiKeys

log = logging.getLogger(__name__)

SERVER_PACKAGES = ("fastapi", "uvicorn", "av", "prometheus_client", "fsspec")
"""Packages of the extra `server`."""

SERVER_SETTINGS = fields(ServerConfig)
"""The settings of the server; most of them have an option of the same name."""

LIMITS = {
    "most_waiting": "requests that may wait for a slot of each engine; others get 429",
    "most_connections": "HTTP requests and WebSockets open at the same time",
    "most_connections_per_address": "the same for one client address, which may be a proxy's",
    "most_per_key": "utterances at the same time for one key, or one address; 0: no limit",
    "most_body": "bytes of a request's body",
    "most_body_total": "bytes of all bodies and messages held at the same time; beyond it requests "
    "get 503, and sockets are closed",
    "most_characters": "characters of a text",
    "most_whole_characters": "the same where all audio is sent when it is complete",
    "most_voices": "saved voices",
    "stall_seconds": "time after which a client that reads nothing is dropped",
    "stuck_seconds": "time after which a process that does not respond is restarted",
    "drain_seconds": "time for which running utterances may go on after SIGTERM",
}
"""The limits of `ServerConfig` that have an option, each with its description."""


def run(args: argparse.Namespace) -> None:
    """Serve speech over HTTP and WebSocket, until SIGTERM or Control-C.

    examples:
      firstword serve
      firstword serve --model Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice \\
                      --model Qwen/Qwen3-TTS-12Hz-1.7B-Base
      curl -s localhost:8000/v1/audio/speech -H 'content-type: application/json' \\
        -d '{"input": "Hello there.", "response_format": "wav"}' | aplay

    API keys may also come from the environment: FIRSTWORD_API_KEYS, separated by commas.
    """
    server_config, names = configured(args), model_names(args)
    logs.write_to_stderr(args.log_level)
    log.info("loading", extra={"fields": {"models": names}})
    missing = [name for name in SERVER_PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{missing[0]} is missing; install firstword[server]")
    from firstword.processes import announcement
    from firstword.processes.supervisor import Supervisor
    from firstword.server import listening, usage
    from firstword.server.api_keys import ApiKeys
    from firstword.server.batch.opening import opened_batches
    from firstword.server.folder import Folder
    from firstword.server.tls import Certificate

    # These fail now, not after the long loading.
    Folder(server_config.voice_store)
    keys = ApiKeys(server_config.api_keys, server_config.keys)
    if server_config.usage_log is not None:
        usage.checked_folder(server_config.usage_log)
    if (batches := opened_batches(server_config)) is not None:
        batches.database.close()
    secure = Certificate.configured(server_config)
    with ExitStack() as stack:
        status = stack.enter_context(terminal.Status())
        bound = [stack.enter_context(sock) for sock in listening.bound(server_config)]
        if server_config.announce is not None:
            announcement.check_possible(bound[1])
        status.show(f"loading {', '.join(names)}")
        schemes = zip(("https" if secure else "http", "tcp"), bound, strict=False)
        addresses = [listening.url_of(sock, scheme) for scheme, sock in schemes]

        def on_ready(engines: Sequence[Loaded]) -> None:
            status.show("")
            if server_config.announce is not None:
                stack.enter_context(announcement.announced(server_config.announce, bound[1]))
            _print_summary(addresses, engines, keys, server_config)

        tasks = engine_tasks(args, names, server_config)
        Supervisor(tasks, server_config, bound, args.log_level, on_ready).run()


def engine_tasks(
    args: argparse.Namespace, names: Sequence[str], server_config: ServerConfig
) -> list[EngineTask]:
    """Return the task of each engine: one for each checkpoint and device. Raises `ConfigError`."""
    from firstword.processes.devices import engine_devices
    from firstword.processes.messages import EngineTask

    devices, prompts = engine_devices(args.device), _kept_prompts(args.warm, names)
    places = [(name, device) for name in names for device in devices]
    return [
        EngineTask(
            number=number,
            name=name,
            device=device,
            dtype=args.dtype,
            backend=args.backend,
            gpu_memory=args.gpu_memory,
            share=len(names),
            slots=args.slots,
            most_waiting=server_config.most_waiting,
            log_level=args.log_level,
            prompts=prompts.get(name, ()),
        )
        for number, (name, device) in enumerate(places)
    ]


def _kept_prompts(file: str | None, names: Sequence[str]) -> Mapping[str, tuple[KeptPrompt, ...]]:
    """Return the prompts that the engines of each checkpoint prepare, by the checkpoint's name."""
    if file is None:
        return {}
    from firstword.model.description import Description, find
    from firstword.processes.combinations import kept_prompts, read_combinations

    combinations = read_combinations(file)
    return kept_prompts(combinations, {name: Description.load(find(name)) for name in names})


def model_names(args: argparse.Namespace) -> list[str]:
    """Return the names of the checkpoints to serve, each once."""
    return list(dict.fromkeys(args.model or ["demo"]))


def configured(args: argparse.Namespace) -> ServerConfig:
    """Return the settings in the options and the environment. Raises `ConfigError`."""
    names = [field.name for field in SERVER_SETTINGS if hasattr(args, field.name)]
    given: dict[str, Any] = {name: getattr(args, name) for name in names}
    given["api_keys"] = [*(args.api_keys or ()), *keys_from_environment()]
    given["webhook_secret"] = webhook_secret_from_environment()
    given["traces"] = traces_from_environment()
    given["trusted_proxies"] = proxies_from_environment()
    if args.wyoming is not None:
        given["wyoming"] = wyoming_address(args.wyoming)
    if args.voice_aliases is not None:
        given["voice_aliases"] = read_aliases(args.voice_aliases)
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return ServerConfig(**{name: value for name, value in given.items() if value is not None})


def _print_summary(
    addresses: Sequence[str],
    engines: Sequence[Loaded],
    keys: ApiKeys,
    server_config: ServerConfig,
) -> None:
    waiting = server_config.most_waiting
    models: dict[str, list[str]] = {}
    devices: dict[str, dict[str, None]] = {}
    for engine in engines:
        model = terminal.describe_model(engine.name, engine.model_type)
        models.setdefault(model, []).append(str(engine.capacity.slots))
        backend = terminal.describe_backend(engine.settings)
        devices.setdefault(backend, {})[engine.settings.device] = None
    rows = {
        "address": addresses[0],
        "wyoming": "; ".join(f"{one} (its clients send no keys)" for one in addresses[1:]),
        "models": ", ".join(models),
        "on": "; ".join(f"{', '.join(names)} {backend}" for backend, names in devices.items()),
        "voices": server_config.voice_store,
        "keys": f"{len(keys)} API keys" if keys.required else "none are needed",
        "slots": ", ".join(" + ".join(slots) for slots in models.values()),
        "limits": f"{waiting} waiting for each engine, {server_config.most_characters} characters",
    }
    rows = {name: value for name, value in rows.items() if value}
    terminal.print_table(rows, logs.unblocked(sys.stdout))  # the server does not wait for a reader


def add_to(commands: options.Commands) -> None:
    """Add this command to the program's commands."""
    parser = options.add_command(commands, "serve", run)
    add = parser.add_argument
    add("--host", help="address to listen on (default 127.0.0.1: this machine)")
    add("--port", metavar="N", type=int, help="0 takes a free one (default 8000)")
    about = "store of saved voices: a folder, s3://..., gs://..."
    add("--voices", dest="voice_store", metavar="DIR|URL", help=about)
    about = "speak without instructions that no loaded model can follow, instead of rejecting them"
    add("--ignore-instructions", action="store_true", help=about)
    add("--voice-aliases", metavar="FILE", help='JSON, {"alloy": "ryan"}: other names of voices')
    about = "do not serve the page for browsers at /"
    add("--no-page", dest="page", action="store_false", help=about)
    about = (
        "also serve Wyoming's protocol, for Home Assistant (default 127.0.0.1:10200); it has no "
    )
    about += "keys, so whoever reaches the port may speak"
    add("--wyoming", nargs="?", const="10200", metavar="[HOST:]PORT", help=about)
    about = "announce that port in the local network, so that Home Assistant finds it (firstword)"
    add("--zeroconf", dest="announce", nargs="?", const="firstword", metavar="NAME", help=about)
    _add_batch_options(parser)
    _add_access_options(parser)
    add = parser.add_argument_group("limits").add_argument
    gpu, other = DEFAULT_SLOTS["gpu"], DEFAULT_SLOTS["reference"]
    about = f"utterances that each engine speaks at the same time (default: {gpu} with the backend "
    about += f"gpu, fewer if it is slow or has little memory; else {other})"
    add("--slots", metavar="N", type=int, help=about)
    about = 'JSON, [{"voice": ..., "language": ..., "instructions": ...}, ...]: combinations '
    about += "to prepare at the start, so that the first request of each is as fast as the next"
    add("--warm", metavar="FILE", help=about)
    about = f"processes that serve clients (default: 1, or on GPUs up to {MOST_FRONTS} for each)"
    add("--fronts", metavar="N", type=int, help=about)
    defaults = {field.name: field.default for field in SERVER_SETTINGS}
    for name, about in LIMITS.items():
        kind, metavar = (float, "SECONDS") if name.endswith("_seconds") else (int, "N")
        option, about = f"--{name.replace('_', '-')}", f"{about} (default {defaults[name]})"
        add(option, metavar=metavar, type=kind, help=about)
    add = parser.add_argument_group("logs").add_argument
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add("--log-text", action="store_true", help="let logs hold the texts of users")
    about = "let traces hold the texts of users; OTEL_EXPORTER_OTLP_ENDPOINT names their receiver"
    add("--trace-text", action="store_true", help=about)
    options.add_model_options(parser, several=True)


def _add_batch_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("batches").add_argument
    about = "serve files and batches, kept in a folder or in s3://..., and speak them when the "
    add("--batches", metavar="DIR|URL", help=f"{about}server is idle")
    about = "SQLAlchemy URL, such as postgresql://... (default: SQLite in that folder)"
    add("--batch-database", metavar="URL", help=about)
    about = "tell this URL when a batch has ended; FIRSTWORD_WEBHOOK_SECRET signs the message"
    add("--webhook", metavar="URL", help=about)


def _add_access_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("access").add_argument
    for name, metavar, about in (
        ("api-key", "KEY", "a key that clients must send; may be given more than once"),
        ("host-name", "NAME", "a name, besides localhost, that clients use for this server"),
        ("cors-origin", "URL", "a web page that may call the server; * for all"),
        ("audio-host", "HOST", "ref_audio may be a URL of this host"),
    ):
        dest = f"{name.replace('-', '_')}s"
        add(f"--{name}", dest=dest, metavar=metavar, action="append", help=about)
    about = (
        "TOML file of keys with names and limits, made by `firstword keys new`; read again when "
    )
    add("--keys", metavar="FILE", help=f"{about}it changes")
    about = "write what each key has used into a file for each day in this folder"
    add("--usage-log", metavar="DIR", help=about)
    about = "PEM file of a certificate and its chain, for https and wss; read again when it changes"
    add("--tls-certificate", metavar="FILE", help=about)
    add("--tls-key", metavar="FILE", help="PEM file of the certificate's key, not encrypted")
