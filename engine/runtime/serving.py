"""What an engine does while its workers load and then: hand the tokenizer to Redis, take a slot, run, give everything back."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from engine.bus import failover, leases
from engine.bus.alarms import count_alarm
from engine.bus.clock import BusClock
from engine.bus.connection import Bus
from engine.bus.tokenizers import put_tokenizer
from engine.config import EngineConfig
from engine.protocol import READ_VERSIONS, EngineInfo, TokenizerBundle, encode
from engine.runtime.core import EngineCore
from engine.runtime.heartbeat import Heartbeat
from engine.runtime.intake import Intake
from engine.runtime.loop import EngineLoop
from engine.runtime.owned_requests import OwnedRequests
from engine.runtime.progress import Progress
from engine.runtime.publisher import Publisher
from engine.runtime.reconciliation import Reconciler
from engine.runtime.slot_owner import SlotOwner
from engine.runtime.stop_signals import StopSignals
from engine.runtime.watchdog import DEFAULT_TIMEOUT, Alarm, Watchdog
from gpu.checkpoint.model_files import model_name
from gpu.checkpoint.tokenizer_files import load_tokenizer_files
from gpu.executor import Executor

logger = logging.getLogger(__name__)


def serve(config: EngineConfig, executor: Executor, progress: Progress, signals: StopSignals) -> None:
    """Serves until told to stop, on the executor's workers, which may load yet. The caller shuts the executor down."""
    bundle = tokenizer_bundle(config)
    name = (config.served_model_name or [model_name(config.model.model)])[0]
    clock = BusClock()
    core = EngineCore(config, progress.loading, clock, executor)
    with Bus(config.redis.redis_url) as bus:
        tokenizer = hashlib.sha256(encode(bundle)).hexdigest()
        bus.run(put_tokenizer(name, tokenizer, bundle))
        clock.ask(bus)
        info = engine_info(config, core, name, tokenizer)
        info.slot, info.incarnation = bus.run(
            leases.claim_slot(name, info, wanted=config.parallel.data_parallel_rank, failover_timeout=config.redis.failover_timeout)
        )
        bus.run(failover.takeover(name, info.slot, info.incarnation - 1))
        owner = SlotOwner(bus, info, bundle)
        watching = {"alarmed": partial(end_at_once, owner, progress)} if config.scheduler.watchdog_timeout > 0 else {}
        loop = connect(core, owner, clock, config.redis.failover_timeout, tell_alive=progress.alive, **watching)
        signals.obey_with(loop.stop)
        logger.info("%s", describe(info))
        progress.say("ready", model=name, slot=info.slot, max_model_len=info.max_model_len, num_blocks=info.num_blocks)
        loop.run()


def connect(
    core: EngineCore,
    owner: SlotOwner,
    clock: BusClock,
    failover_timeout: float = leases.FAILOVER_TIMEOUT,
    alarmed: Callable[[Alarm], None] = lambda alarm: None,
    tell_alive: Callable[[], None] = lambda: None,
) -> EngineLoop:
    """A loop around `core` with its side threads, for the slot of `owner`; `alarmed` and `tell_alive` as in `Watchdog`."""
    clients: list[str] = []
    loop = EngineLoop(core, owner.model, clients)
    owned = OwnedRequests()
    reconciler = Reconciler(owner, owned, loop.inbox)
    publisher = Publisher(owner, owned, reconciler, clients, loop.fail)
    watchdog = Watchdog(core, publisher, core.config.scheduler.watchdog_timeout or DEFAULT_TIMEOUT, alarmed, tell_alive)
    loop.attach(
        owner,
        Intake(owner, owned, reconciler, loop.inbox, core, loop.fail),
        publisher,
        Heartbeat(owner, watchdog.gets_on, clock, loop.fail, failover_timeout),
        watchdog,
    )
    return loop


def end_at_once(owner: SlotOwner, progress: Progress, alarm: Alarm) -> None:
    """The way out of an engine that does not get on, whatever its main thread does. Its requests go on at another engine; what
    Redis has not heard yet is computed again."""
    with suppress(Exception):  # Redis may be the trouble
        owner.bus.run(count_alarm(owner.model, alarm.kind))
    progress.say("failed", message=f"watchdog: {alarm.reason}", permanent=False)
    os._exit(1)


def engine_info(config: EngineConfig, core: EngineCore, name: str, tokenizer: str) -> EngineInfo:
    capacity, limits = core.capacity, core.limits
    return EngineInfo(
        slot="",
        incarnation=0,
        model=name,
        served_names=config.served_model_name or [name],
        fingerprint=capacity.fingerprint,
        protocol_versions=list(READ_VERSIONS),
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
