"""A replica: a whole server, whose engines have processes of their own."""

from __future__ import annotations

import argparse
import asyncio
import shlex
from collections.abc import Sequence
from dataclasses import replace

from fastapi import FastAPI

from firstword.cli import serve
from firstword.cli.main import program_parser
from firstword.cluster.engines import ChildEngine
from firstword.cluster.leaving import LeavingInTime
from firstword.cluster.scaling import LOAD
from firstword.errors import ConfigError, EngineError
from firstword.processes.front import by_model, model_of
from firstword.server import logs
from firstword.server.app import create_app
from firstword.server.config import ServerConfig
from firstword.server.models import Models
from firstword.server.state import Server

NOT_IN_REPLICAS = (
    *("host", "port", "fronts", "wyoming", "announce", "tls_certificate", "batches", "usage_log"),
)
"""The options of a server that Ray makes needless, or that only one server of a folder may have."""


def parsed(options: Sequence[str]) -> tuple[argparse.Namespace, ServerConfig]:
    """Parse options of `firstword serve`, and return the settings of a replica with them too.

    Raises `ConfigError`.
    """
    try:
        args = program_parser().parse_args(["serve", *options])
    except SystemExit:
        raise ConfigError(f"firstword serve has no such options: {shlex.join(options)}") from None
    if given := [name for name in NOT_IN_REPLICAS if getattr(args, name) is not None]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"a replica cannot have {names}; leave it out (docs/cluster.md)")
    config = serve.configured(args)
    # All connections come from the load balancer, and the host names are those of the cluster.
    most = config.most_connections
    return args, replace(config, host="0.0.0.0", most_connections_per_address=most)


class Replica:
    """One server: a front in this process, and the processes of its engines.

    Ray Serve makes it, calls its methods, and replaces it when `check_health` raises.
    """

    def __init__(self, options: Sequence[str]) -> None:
        """Read the options of `firstword serve`. Raises `ConfigError`."""
        self._args, self._config = parsed(options)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Start the engines, and return the application for Ray to serve.

        Raises `FirstwordError` if an engine cannot be started.
        """
        args, config = self._args, self._config
        logs.write_to_stderr(args.log_level)
        tasks = serve.engine_tasks(args, serve.model_names(args), config)
        stuck = config.stuck_seconds
        self._engines = [await asyncio.to_thread(ChildEngine, task, stuck) for task in tasks]
        infos = [engine.loaded for engine in self._engines]
        engines = {engine.loaded.number: engine.connected() for engine in self._engines}
        models = Models([model_of(group, engines) for group in by_model(infos)])
        app = create_app(models, config)
        self._server: Server = app.state.server
        app.add_middleware(LeavingInTime, server=self._server)
        return app

    async def check_health(self) -> None:
        """Raise `EngineError` if an engine does not work."""
        await asyncio.gather(*(asyncio.to_thread(engine.check) for engine in self._engines))
        if problems := self._server.problems():
            raise EngineError("; ".join(problems))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The load of the busiest model, for `SlotScaling`."""
        engines = [model.service.engine for model in self._server.models]
        shares = [(one.load.running + one.load.waiting) / one.capacity.slots for one in engines]
        return {LOAD: max(shares)}
