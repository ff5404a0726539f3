"""Runs one role in this process: what `headrace api` and `headrace engine` do, started by hand, by `serve`, or in a container."""

from __future__ import annotations

import socket

from engine.config import EngineConfig, ServeConfig
from ops import listen
from ops.logs import configure_logging
from ops.settings import Resolved


def engine_config(config: ServeConfig) -> EngineConfig:
    """The engine's part of the tree."""
    return EngineConfig(
        model=config.model,
        cache=config.cache,
        parallel=config.parallel,
        scheduler=config.scheduler,
        redis=config.redis,
        log=config.log,
        served_model_name=config.api.served_model_name,
    )


def run_engine(resolved: Resolved, progress_fd: int | None) -> int:
    """Serve one model on a Redis until a signal; returns the exit status."""
    from engine import process
    from ops.serve import check, fetch_model, silent

    configure_logging(resolved.config.log, "engine")
    check(resolved.config)
    fetch_model(resolved, silent)
    return process.run_engine(engine_config(resolved.config), progress_fd)


def run_api(resolved: Resolved, descriptor: int | None) -> int:
    """Answer HTTP until a signal, on the inherited listening socket or on one of its own; returns the exit status."""
    from api import server

    configure_logging(resolved.config.log, "api")
    listener = listen.bind(resolved.config.api) if descriptor is None else socket.socket(fileno=descriptor)
    with listener:
        return server.run(resolved.config.api, resolved.config.redis.redis_url, listener)
