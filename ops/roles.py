"""Runs one role in this process: the commands `headrace api`, `engine` and `maintenance`. Each imports its own code."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from typing import Any

from engine.config import EngineConfig, ServeConfig
from ops import listen
from ops.errors import SettingError
from ops.logs import begin_logging
from ops.prepare import check, fetch_model, name_model, place_weights, tell_of_no_effect
from ops.settings import Resolved, shown

log = logging.getLogger(__name__)


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
    begin_logging(resolved, "engine")
    check(resolved.config)
    if progress_fd is None:  # else `serve` has told
        tell_of_no_effect(resolved)
    fetch_model(resolved)
    name_model(resolved)
    place_weights(resolved)
    from engine.runtime import process

    return process.run_engine(engine_config(resolved.config), progress_fd, resolved.config.api.shutdown_timeout)


def run_api(resolved: Resolved, descriptor: int | None, progress_fd: int | None) -> int:
    """Answer HTTP until a signal, on the inherited listening socket or on one of its own; returns the exit status."""
    from api import server
    from engine.runtime.progress import Progress

    config = resolved.config
    begin_logging(resolved, "api")
    listener = listen.bind(config.api) if descriptor is None else socket.socket(fileno=descriptor)
    progress = Progress(progress_fd)
    address = config.api.uds or listen.url_of(listener, config.api)

    def tell_up() -> None:
        _tell_up(resolved, f"the API server answers at {address}", descriptor is not None)
        progress.say("ready")

    return server.run_api(config.api, config.redis, listener, tell_up)


def run_maintenance(resolved: Resolved, is_of_serve: bool) -> int:
    """Run Celery with beat until a signal; returns the exit status."""
    from celery.apps import worker as celery_worker
    from celery.signals import setup_logging, worker_ready

    _demand_fit_redis(resolved.config.redis.redis_url)
    # ops.celery_app reads the Redis to use when it is imported
    os.environ["HEADRACE_REDIS_URL"] = resolved.config.redis.redis_url
    from ops.celery_app import app

    def keep_ours(**_: Any) -> None:
        begin_logging(resolved, "maintenance")

    def tell_up(**_: Any) -> None:
        _tell_up(resolved, "the maintenance process is up", is_of_serve)

    setup_logging.connect(keep_ours)
    worker_ready.connect(tell_up)
    vars(celery_worker)["safe_say"] = lambda message, *_: log.info(message)  # its own writes past all loggers
    warnings.filterwarnings("ignore", "(?s).*superuser privileges")  # which matter where messages are unpickled
    options = ["--beat", "--pool", "solo", "--without-gossip", "--without-mingle"]
    return app.start(["--quiet", "worker", *options]) or 0


def _tell_up(resolved: Resolved, what: str, is_of_serve: bool) -> None:
    """`serve` has a ready line of its own, for all of its processes."""
    level = logging.DEBUG if is_of_serve else logging.INFO
    log.log(level, "%s, with Redis at %s", what, shown("redis_url", resolved.config.redis.redis_url))


def _demand_fit_redis(url: str) -> None:
    """Raises SettingError where Redis will never do. Where it is away, it may come."""
    from engine.bus.call import BusUnavailable, UnfitRedis
    from engine.bus.connection import Bus
    from engine.bus.leases import check_server

    try:
        with Bus(url, patience=0.0) as bus:
            bus.run(check_server())
    except UnfitRedis as error:
        raise SettingError(f"cannot use Redis at {shown('redis_url', url)}: {error}") from None
    except BusUnavailable:
        pass
