"""What headrace adds to a model's step: null model, embedded Valkey, one subscriber; run by `python -m benchmarks.step null`.

`measure_parts`: one thread does an engine's work part by part; CPU time. Beside it the round trip of the flush, for which an engine
has a thread of its own, and the CPU time that Valkey takes for it. `measure_process`: a whole engine at full speed. The processes
that these need beside their own are this module run with arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import redis
from rich.table import Table

from engine.bus import keys, leases
from engine.bus.clock import BusClock
from engine.bus.connection import Bus
from engine.bus.enqueue import AdmissionLimits, enqueue
from engine.config import EngineConfig, SchedulerConfig
from engine.protocol import PROTOCOL_VERSION, EngineCoreOutputs, EngineCoreRequest, decode_client_message, encode_column
from engine.runtime.core import EngineCore
from engine.runtime.heartbeat import Heartbeat
from engine.runtime.owned_requests import OwnedRequests
from engine.runtime.publisher import MOST_WAITING_EVENTS, Publisher, StepEvents
from engine.runtime.reconciliation import Reconciler
from engine.runtime.serving import connect, engine_info
from engine.runtime.slot_owner import SlotOwner
from engine.scheduling.request import Request
from gpu.config import CacheConfig, ModelConfig, ParallelConfig
from gpu.plan import SamplingParams, decode_output, decode_plan, encode
from ops.embedded import DataDirectory, EmbeddedValkey

MODEL = "null"
BLOCK_SIZE = 16
PROMPT = 100  # tokens, and up to a block more: rows cross block borders in different steps
WARM_STEPS = 2 * MOST_WAITING_EVENTS  # then the publisher's queue is as full as it gets
LEAD = 2000  # steps that the first request may be ahead of the last

PARTS = ("schedule", "encode plan", "decode output", "update", "serialise", "flush")  # the engine's own
OTHERS = ("flush round trip", "Valkey", "worker's coding", "null model")  # the coding: plan read, output written


def measure_overhead(sizes: list[int], num_steps: int) -> list[Table]:
    parts = Table(
        "running", *PARTS, "sum", "calm", *OTHERS, title=f"ms a step, medians of {num_steps}; calm: the sum's lowest tenth"
    )
    whole = Table(
        "running", "backend", "steps/s", "engine", "its main thread", "worker", "Valkey", title=f"CPU ms a step, {num_steps} steps"
    )
    with embedded_valkey() as url:
        for size in sizes:
            measured = measure_parts(url, size, num_steps)
            parts.add_row(str(size), *(f"{measured[name]:.3f}" for name in (*PARTS, "sum", "calm", *OTHERS)))
        for size in sizes:
            for backend in ("uni", "mp"):
                whole.add_row(str(size), backend, *measure_process(url, size, num_steps, backend))
    return [parts, whole]


@contextlib.contextmanager
def embedded_valkey() -> Iterator[str]:
    """The URL of a server such as `headrace serve` starts."""
    with tempfile.TemporaryDirectory(prefix="headrace-overhead-") as folder:
        directory = DataDirectory(folder)
        server = EmbeddedValkey(directory)
        command = server.command()
        process = subprocess.Popen(
            command.arguments, env=command.environment, pass_fds=command.inherited, stdout=subprocess.DEVNULL
        )
        try:
            assert command.ready is not None
            asyncio.run(asyncio.wait_for(command.ready(), 20))
            yield server.url
        finally:
            process.terminate()
            process.wait()
            directory.close()


@contextlib.contextmanager
def role(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this module, once it is ready. SIGTERM ends it when the context does."""
    command = [sys.executable, "-m", "benchmarks.overhead", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline(), f"{command} did not start"
            yield process
        finally:
            process.terminate()


def say_ready() -> None:
    print("ready", flush=True)


def engine_config(size: int, num_steps: int, backend: str) -> EngineConfig:
    longest = PROMPT + BLOCK_SIZE + num_steps
    blocks = 1 + size * -(-longest // BLOCK_SIZE)
    return EngineConfig(
        model=ModelConfig(model=MODEL, device="cpu", load_format="null", max_model_len=longest),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=blocks),
        parallel=ParallelConfig(distributed_executor_backend=backend),
        scheduler=SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=size),
    )


def prompt_tokens(index: int) -> np.ndarray:
    return np.full(PROMPT + index % BLOCK_SIZE, index + 3, np.int32)


def valkey_seconds(client: redis.Redis) -> float:
    info: Any = client.info("cpu")
    return float(info["used_cpu_user"] + info["used_cpu_sys"])


# ---------------------------------------------------------------- part by part


def measure_parts(url: str, size: int, num_steps: int) -> dict[str, float]:
    """Milliseconds a step by part, over steps in which `size` requests decode; "calm" is what a tenth of the steps stay below."""
    config = engine_config(size, num_steps + 100, "uni")
    core = EngineCore(config)
    for index in range(size):
        sampling = SamplingParams(max_tokens=num_steps + 90, ignore_eos=True)
        core.add_request(Request(str(index), prompt_tokens(index), sampling, handle=index))
    with Bus(url) as bus, redis.Redis.from_url(url) as client:
        server = bus.run(leases.announce_api())
        with role("listen", url, server):
            info = engine_info(config, core, MODEL, "")
            info.slot, info.incarnation = bus.run(leases.claim_slot(MODEL, info))
            owner, owned = SlotOwner(bus, info), OwnedRequests()
            heartbeat = Heartbeat(owner, lambda: True, BusClock(), _raise)
            heartbeat.start()
            publisher = Publisher(owner, owned, Reconciler(owner, owned, queue.SimpleQueue()), [server], _raise)
            steps: list[dict[str, float]] = []
            before = 0.0
            while len(steps) < num_steps:
                spent, num_rows = one_step(core, bus, publisher)
                if num_rows == size:
                    before = before or valkey_seconds(client)
                    steps.append(spent)
            valkey = (valkey_seconds(client) - before) / (len(steps) - 1)
            heartbeat.stop()
        bus.run(leases.release_api(server))
    core.shutdown()
    for step in steps:
        step["sum"] = sum(step[name] for name in PARTS)
    seconds = {name: float(np.median([step[name] for step in steps])) for name in steps[0]}
    calm = float(np.quantile([step["sum"] for step in steps], 0.1))
    return {name: 1e3 * value for name, value in (seconds | {"calm": calm, "Valkey": valkey}).items()}


def one_step(core: EngineCore, bus: Bus, publisher: Publisher) -> tuple[dict[str, float], int]:
    """One step by loop, executor, worker and publisher in turn. Returns (seconds by part, rows that sampled)."""
    watch = _Stopwatch()
    plan = core.scheduler.schedule(time.time())
    watch.lap("schedule")
    payload = encode(plan)
    watch.lap("encode plan")
    decode_plan(payload)
    watch.lap("worker's coding")
    core.executor.submit(plan)
    output = core.executor.collect()
    watch.lap("null model")
    answer = encode(output)
    watch.lap("worker's coding")
    output = decode_output(answer)
    watch.lap("decode output")
    outputs = core.scheduler.update_from_output(plan, output, time.time())
    watch.lap("update")
    call, _, _ = publisher.call_for(StepEvents(outputs))
    watch.lap("serialise")
    started = time.perf_counter()
    bus.run(call)
    round_trip = time.perf_counter() - started
    watch.lap("flush")
    return {**watch.laps, "flush round trip": round_trip}, len(outputs.handles)


class _Stopwatch:
    """CPU seconds of this thread between laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.thread_time()

    def lap(self, name: str) -> None:
        now = time.thread_time()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._since
        self._since = now


def listen(url: str, server: str) -> None:
    """Subscribes to an API server's channel and reads it."""
    with Bus(url) as bus, bus.subscribe(keys.client_channel(server)) as subscription:
        say_ready()
        while True:
            subscription.get(60.0)


def _raise(error: BaseException) -> None:
    raise error


# ---------------------------------------------------------------- an engine process


def serve(url: str, size: int, num_steps: int, backend: str) -> None:
    """An engine without a tokenizer."""
    config = engine_config(size, num_steps, backend)
    clock = BusClock()
    core = EngineCore(config, clock=clock)
    with Bus(url) as bus:
        info = engine_info(config, core, MODEL, "")
        info.slot, info.incarnation = bus.run(leases.claim_slot(MODEL, info))
        loop = connect(core, SlotOwner(bus, info), clock)
        signal.signal(signal.SIGTERM, lambda number, frame: loop.stop())
        say_ready()
        loop.run()
    core.shutdown()


def measure_process(url: str, size: int, num_steps: int, backend: str) -> list[str]:
    """Steps a second, and CPU milliseconds a step of: the engine process, its main thread, the worker process, Valkey."""
    most_steps = WARM_STEPS + num_steps + LEAD + MOST_WAITING_EVENTS
    with Bus(url) as bus, redis.Redis.from_url(url) as client, role("serve", url, size, most_steps, backend) as engine:
        server = bus.run(leases.announce_api())
        with bus.subscribe(keys.client_channel(server)) as subscription:
            sampling = SamplingParams(max_tokens=most_steps, ignore_eos=True)
            requests = [
                EngineCoreRequest(
                    PROTOCOL_VERSION, f"{server}-{index}", encode_column(prompt_tokens(index)), sampling, server, index
                )
                for index in range(size)
            ]
            bus.run(enqueue(MODEL, requests, AdmissionLimits()))

            def hear(count: int) -> None:
                while count:
                    message = subscription.get(60.0)
                    assert message is not None, "the engine fell silent"
                    outputs = decode_client_message(message[1])
                    assert isinstance(outputs, EngineCoreOutputs) and not outputs.finished, outputs.finished[0]
                    count -= len(outputs.handles) == 8 * size

            hear(WARM_STEPS)
            before, started = usage(engine.pid, client), time.perf_counter()
            hear(num_steps)
            after, seconds = usage(engine.pid, client), time.perf_counter() - started
        bus.run(leases.release_api(server))
    spent = [1e3 * (b - a) / num_steps for a, b in zip(before, after, strict=True)]
    return [f"{num_steps / seconds:.0f}", *(f"{value:.3f}" for value in spent)]


def usage(engine: int, client: redis.Redis) -> list[float]:
    """CPU seconds so far of the engine's process, its main thread, its worker's process (0 without one), Valkey."""
    process = psutil.Process(engine)
    main = next(thread for thread in process.threads() if thread.id == engine)
    workers = [child.cpu_times() for child in process.children()]
    own = process.cpu_times()
    worker = sum(each.user + each.system for each in workers)
    return [own.user + own.system, main.user_time + main.system_time, worker, valkey_seconds(client)]


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        listen(*sys.argv[2:])
    else:
        serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
