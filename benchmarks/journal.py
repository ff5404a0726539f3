"""What the journal costs: a flush with and without it, and Redis' memory while logprobs are journaled for long.

    python -m benchmarks.journal                  # a flush of 256 and of 1,024 rows, of a null model
    python -m benchmarks.journal --minutes 30     # and Redis' memory beside a null model that streams logprobs

The two kinds of flush take turns, step by step. Without the journal the same bytes are published as a notice, which no journal
holds.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import time

import numpy as np
import redis
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from benchmarks.overhead import MODEL, embedded_valkey, engine_config, prompt_tokens, role
from engine.bus import failover, keys, leases
from engine.bus.call import Call
from engine.bus.connection import Bus
from engine.bus.enqueue import AdmissionLimits, enqueue
from engine.bus.journals import Flushed
from engine.protocol import PROTOCOL_VERSION, EngineCoreOutputs, EngineCoreRequest, decode_client_message, encode_column
from engine.runtime.core import EngineCore
from engine.runtime.owned_requests import OwnedRequests
from engine.runtime.publisher import Publisher, StepEvents
from engine.runtime.reconciliation import Reconciler
from engine.runtime.serving import engine_info
from engine.runtime.slot_owner import SlotOwner
from engine.scheduling.request import Request
from gpu.plan import SamplingParams

STEPS = 600  # of each kind
STREAMS = 64
TOKENS = 400
LOGPROBS = 20
STEP_SECONDS = 0.02  # of the null model
LOOK_SECONDS = 5.0


def measure_flush(url: str, size: int) -> dict[bool, list[float]]:
    """Seconds of a flush's round trip in steps of a null model with `size` decodes, by whether the flush is journaled."""
    config = engine_config(size, 2 * STEPS + 100, "uni")
    core = EngineCore(config)
    for index in range(size):
        sampling = SamplingParams(max_tokens=2 * STEPS + 90, ignore_eos=True)
        core.add_request(Request(str(index), prompt_tokens(index), sampling, handle=index))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with Bus(url) as bus:
        server = bus.run(leases.announce_api())
        with role("listen", url, server):
            info = engine_info(config, core, MODEL, "")
            info.slot, info.incarnation = bus.run(leases.claim_slot(MODEL, info))
            owner, owned = SlotOwner(bus, info), OwnedRequests()
            publisher = Publisher(owner, owned, Reconciler(owner, owned, queue.SimpleQueue()), [server], _raise)
            while len(seconds[True]) < STEPS:
                outputs = core.step()
                assert outputs is not None
                call, _, _ = publisher.call_for(StepEvents(outputs))
                journaled = len(seconds[True]) <= len(seconds[False])
                started = time.perf_counter()
                bus.run(call if journaled else _unjournaled(call))
                if len(outputs.handles) == size:
                    seconds[journaled].append(time.perf_counter() - started)
            bus.run(failover.takeover(MODEL, info.slot, info.incarnation, sure=True))
        bus.run(leases.release_api(server))
    core.shutdown()
    return seconds


def _unjournaled(call: Call[Flushed]) -> Call[Flushed]:
    """The same flush of one message, which goes out as a notice."""
    *head, server, payload = call.arguments
    assert head[6:] == [1, 0, 0, 0], "one message and nothing else"
    return replace(call, arguments=(*head[:6], 0, 0, 0, 1, keys.client_channel(str(server)), payload))


def _raise(error: BaseException) -> None:
    raise error


class LogprobLoad:
    """Streams with logprobs that follow one another without end, on one engine."""

    def __init__(self, bus: Bus, server: str) -> None:
        self._bus = bus
        self._server = server
        self._count = 0
        self.num_ended = 0

    def add(self, count: int) -> None:
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=LOGPROBS)
        requests = []
        for _ in range(count):
            self._count += 1
            prompt = encode_column(np.full(100, self._count % 40_000 + 300))
            name = f"{self._server}-{self._count}"
            requests.append(EngineCoreRequest(PROTOCOL_VERSION, name, prompt, sampling, self._server, self._count))
        self._bus.run(enqueue(MODEL, requests, AdmissionLimits()))

    def hear(self, payload: bytes) -> None:
        message = decode_client_message(payload)
        if isinstance(message, EngineCoreOutputs) and message.finished:
            self.num_ended += len(message.finished)
            self.add(len(message.finished))


def measure_memory(url: str, minutes: float) -> list[tuple[float, float, int]]:
    """(minutes, MiB that Valkey uses, requests ended), every few seconds, while STREAMS streams with logprobs run."""
    looks: list[tuple[float, float, int]] = []
    with Bus(url) as bus, redis.Redis.from_url(url) as client, role("serve", url, STREAMS, TOKENS, "mp"):
        server = bus.run(leases.announce_api())
        with bus.subscribe(keys.client_channel(server)) as subscription:
            load = LogprobLoad(bus, server)
            load.add(STREAMS)
            began = next_look = time.monotonic()
            while (now := time.monotonic()) < began + 60 * minutes:
                if (message := subscription.get(1.0)) is not None:
                    load.hear(message[1])
                if now >= next_look:
                    bus.run(leases.beat_api(server))
                    next_look = now + LOOK_SECONDS
                    looks.append(((now - began) / 60, client.info("memory")["used_memory"] / (1 << 20), load.num_ended))
        bus.run(leases.release_api(server))
    return looks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--minutes", type=float, default=0.0)
    arguments = parser.parse_args()
    console = Console(highlight=False)
    headings = ("running", "without journal", "with journal", "ratio")
    table = Table(*headings, title=f"ms of a flush's round trip, medians of {STEPS} steps each")
    with embedded_valkey() as url:
        for size in arguments.rows:
            seconds = measure_flush(url, size)
            plain, journaled = (1e3 * statistics.median(seconds[kind]) for kind in (False, True))
            table.add_row(str(size), f"{plain:.3f}", f"{journaled:.3f}", f"{journaled / plain:.2f}")
    console.print(table)
    if arguments.minutes:
        os.environ["HEADRACE_NULL_RUNNER"] = f"step_seconds={STEP_SECONDS}"
        with embedded_valkey() as url:
            looks = measure_memory(url, arguments.minutes)
        console.print(f"{STREAMS} streams of {TOKENS} tokens with {LOGPROBS} logprobs, one after the other:")
        for minute, used, ended in looks[:: max(1, len(looks) // 12)]:
            console.print(f"  after {minute:5.1f} min: {used:7.1f} MiB, {ended} requests ended")
        console.print(f"most: {max(used for _, used, _ in looks):.1f} MiB")


if __name__ == "__main__":
    main()
