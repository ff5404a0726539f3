"""The engine process from start to exit: load, fit, hand the tokenizer to Redis, take a slot, run, give everything back.

Exit codes tell a supervisor what to do: 0 was told to stop, 78 (EX_CONFIG) will fail again the same way, 75 (EX_TEMPFAIL) was
fenced or lost Redis and should start again, 1 anything else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

from engine.bus import leases, transitions
from engine.bus.call import BusUnavailable, Fenced, UnfitRedis
from engine.bus.clock import BusClock
from engine.bus.connection import Bus
from engine.bus.tokenizers import put_tokenizer
from engine.config import EngineConfig
from engine.protocol import PROTOCOL_VERSION, EngineInfo, TokenizerBundle, encode
from engine.runtime.capacity import DoesNotFit
from engine.runtime.core import EngineCore
from engine.runtime.heartbeat import Heartbeat
from engine.runtime.intake import Intake
from engine.runtime.loop import EngineLoop
from engine.runtime.publisher import Publisher
from gpu.checkpoint.model_files import model_name
from gpu.checkpoint.tokenizer_files import load_tokenizer_files
from gpu.errors import CheckpointError, UnsupportedConfiguration
from gpu.executor import WorkerError

logger = logging.getLogger(__name__)

EXIT_CONFIG = 78
EXIT_TEMPORARY = 75


class Progress:
    """One JSON object a line to the process that started this one: {"phase": "load", "fraction": 0.4}, "ready", "failed".

    A failure is `permanent` where fewer engines would fail the same way.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def say(self, phase: str, **facts: Any) -> None:
        if self._fd is not None:
            try:
                os.write(self._fd, json.dumps({"phase": phase, **facts}).encode() + b"\n")
            except BrokenPipeError:
                self._fd = None  # the reader is gone

    def loading(self, fraction: float) -> None:
        self.say("load", fraction=fraction)


class StopSignals:
    """SIGTERM and SIGINT from the first moment on: one that comes while the model loads is remembered and obeyed."""

    def __init__(self) -> None:
        self.received = False
        self._obey: Callable[[], None] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def obey_with(self, stop: Callable[[], None]) -> None:
        self._obey = stop
        if self.received:
            stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if self._obey is not None:
            self._obey()
        else:
            raise SystemExit(0)


def run_engine(config: EngineConfig, progress_fd: int | None = None, shutdown_timeout: float = 0.0) -> int:
    """Serve one model on the Redis of `config.redis` until a signal; returns the exit code."""
    progress = Progress(progress_fd)
    signals = StopSignals()
    try:
        return _serve(config, progress, signals, shutdown_timeout)
    except (DoesNotFit, CheckpointError, UnfitRedis, UnsupportedConfiguration) as error:
        logger.error("%s", error)
        progress.say("failed", message=str(error), permanent=not isinstance(error, DoesNotFit))
        return EXIT_CONFIG
    except (Fenced, BusUnavailable) as error:
        logger.error("the engine was fenced or lost Redis: %s", error)
        progress.say("failed", message=str(error), permanent=False)
        return EXIT_TEMPORARY
    except WorkerError as error:
        logger.error("%s", error)
        progress.say("failed", message=str(error), permanent=error.permanent)
        return EXIT_CONFIG if error.permanent else 1


def _serve(config: EngineConfig, progress: Progress, signals: StopSignals, shutdown_timeout: float) -> int:
    bundle = tokenizer_bundle(config)
    name = (config.served_model_name or [model_name(config.model.model)])[0]
    clock = BusClock()
    core = EngineCore(config, progress.loading, clock)
    try:
        with Bus(config.redis.redis_url) as bus:
            tokenizer = hashlib.sha256(encode(bundle)).hexdigest()
            bus.run(put_tokenizer(name, tokenizer, bundle))
            clock.ask(bus)
            info = engine_info(config, core, name, tokenizer)
            info.slot, info.incarnation = bus.run(leases.claim_slot(name, info, wanted=config.parallel.data_parallel_rank))
            bus.run(transitions.fail_engine(name, info.slot, info.incarnation - 1))
            loop = connect(core, bus, info, config.redis.record_retention, clock)
            signals.obey_with(lambda: loop.stop(shutdown_timeout))
            logger.info("%s", describe(info))
            progress.say("ready", model=name, slot=info.slot, max_model_len=info.max_model_len, num_blocks=info.num_blocks)
            loop.run()
        return 0
    finally:
        core.shutdown()


def connect(core: EngineCore, bus: Bus, info: EngineInfo, retention: float, clock: BusClock) -> EngineLoop:
    """A loop around `core` with its side threads, for the slot that `info` names."""
    clients: list[str] = []
    loop = EngineLoop(core, info.model, clients)
    place = (bus, info.model, info.slot, info.incarnation)
    loop.attach(
        Intake(*place, loop.inbox, core, loop.fail),
        Publisher(*place, clients, loop.fail, retention),
        Heartbeat(bus, core, info, clock, loop.fail),
    )
    return loop


def engine_info(config: EngineConfig, core: EngineCore, name: str, tokenizer: str) -> EngineInfo:
    capacity, limits = core.capacity, core.limits
    return EngineInfo(
        slot="",
        incarnation=0,
        model=name,
        served_names=config.served_model_name or [name],
        fingerprint=capacity.fingerprint,
        protocol_versions=[PROTOCOL_VERSION],
        tokenizer=tokenizer,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=config.cache.block_size,
        num_blocks=limits.num_blocks,
        vocab_size=capacity.vocab_size,
        max_logprobs=config.model.max_logprobs,
        dtype=capacity.dtype,
        device=capacity.device,
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        pid=os.getpid(),
        host=socket.gethostname(),
        started=core.clock(),
        scheduling_policy=config.scheduler.scheduling_policy,
    )


def describe(info: EngineInfo) -> str:
    kv = f"{info.num_blocks} KV blocks of {info.block_size} tokens, context {info.max_model_len} tokens"
    step = f"{info.max_num_batched_tokens} tokens a step, {info.max_num_seqs} requests at once"
    return f"engine {info.slot} of {info.model} is ready: {kv}, {step}"


def tokenizer_bundle(config: EngineConfig) -> TokenizerBundle:
    """The parts of the model's files that API servers need. Raises CheckpointError."""
    files = load_tokenizer_files(config.model.model)
    return TokenizerBundle(
        tokenizer_json=files.tokenizer_json,
        chat_template=files.chat_template,
        bos_token=files.bos_token,
        eos_token=files.eos_token,
        eos_token_ids=files.eos_token_ids,
        generation_config=files.generation_config,
        tokenizer_config=dict(files.tokenizer_config),
    )
