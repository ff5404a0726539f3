"""How many requests a second one Redis passes on to many engines, and what each costs it.

    python -m benchmarks.many_engines                    # 1, 16, 64 and 256 engines, on the embedded Valkey
    python -m benchmarks.many_engines --engines 32 --redis-url redis://HOST:PORT/0    # it is emptied

The engines are simulated, all in one process beside the one that enqueues: each has its own connections, asks when it is woken and
five times a second, and ends what it took after a few milliseconds. The offered rate doubles until less than 90 % of it is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import selectors
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import redis
from rich.console import Console
from rich.table import Table

from benchmarks.overhead import embedded_valkey
from engine.bus import journals, keys, leases, transitions
from engine.bus.connection import Bus
from engine.bus.enqueue import AdmissionLimits, enqueue
from engine.bus.journals import EndedRequest
from engine.protocol import (
    PROTOCOL_VERSION,
    EngineCoreRequest,
    EngineInfo,
    FinishReason,
    RequestTimes,
    StoredChoice,
    StoredOutput,
    decode_request,
    encode,
    encode_column,
)
from engine.runtime.intake import LOOK_SECONDS
from gpu.plan import SamplingParams

MODEL = "many"
SEATS = 64  # of an engine
RUN_SECONDS = 0.01  # that a request runs, at least
SECONDS = 3.0  # at each rate
LOWEST_RATE = 4.0  # requests a second
OUTPUT = encode(StoredOutput([StoredChoice(encode_column(range(16)), FinishReason.LENGTH)], 1, RequestTimes()))
TAKEN_SHARE = 0.9  # of what is offered; less is saturation


class Counts(NamedTuple):
    taken: int  # requests
    wakeups: int  # messages that told an engine to ask
    takes: int  # calls of the script
    waited: float  # seconds of all of them from enqueue to take, by Redis' clock


class Load(NamedTuple):
    """What happened at one rate, a second and a request."""

    offered: float
    taken: float
    cpu: float  # seconds that Redis computed, of each second
    wakeups: float
    takes: float
    waited: float  # seconds


class SimulatedEngine:
    def __init__(self, url: str) -> None:
        info = EngineInfo(
            slot="", incarnation=0, model=MODEL, served_names=[MODEL], fingerprint="f", protocol_versions=[PROTOCOL_VERSION],
            tokenizer="t", max_model_len=512, max_num_seqs=SEATS, max_num_batched_tokens=256, block_size=16, num_blocks=64,
            vocab_size=100, max_logprobs=20, dtype="float32", device="cpu", tensor_parallel_size=1, pid=1, host="here", started=0.0,
        )  # fmt: skip
        self._bus = Bus(url)
        self.slot, self._incarnation = self._bus.run(leases.claim_slot(MODEL, info, ttl=3600))
        self.listener = redis.Redis.from_url(url).pubsub()  # type: ignore[no-untyped-call]
        self.listener.subscribe(keys.wake_channel(MODEL, self.slot))
        self.listener.get_message(timeout=5.0)
        self.next_look = 0.0
        self._running: list[tuple[float, str]] = []  # (when it ends, id)
        self._num_takes = 0
        self._num_flushes = 0

    def ask(self) -> list[float]:
        """One `take`: how long each request that it gave had waited."""
        self._num_takes += 1
        places = SEATS - len(self._running)
        place = (MODEL, self.slot, self._incarnation, "f")
        taken = self._bus.run(transitions.take(*place, self._num_takes, places, places))
        ends = time.monotonic() + RUN_SECONDS
        self._running += [(ends, decode_request(each.payload).request_id) for each in taken]
        self.next_look = time.monotonic() + (0.0 if taken else LOOK_SECONDS)
        return [each.taken - each.enqueued for each in taken]

    def end_due(self) -> None:
        now = time.monotonic()
        due = [EndedRequest(name, FinishReason.LENGTH, OUTPUT, 16) for ends, name in self._running if ends <= now]
        if due:
            self._running = [each for each in self._running if each[0] > now]
            self._num_flushes += 1
            number = self._num_flushes
            self._bus.run(journals.flush(MODEL, self.slot, self._incarnation, number - 1, number, ended=due))


def simulate(url: str, count: int, pipe: Connection) -> None:
    """A process of `count` engines; answers each message of the pipe with its Counts."""
    engines = [SimulatedEngine(url) for _ in range(count)]
    selector = selectors.DefaultSelector()
    selector.register(pipe, selectors.EVENT_READ)
    for engine in engines:
        selector.register(engine.listener.connection._sock, selectors.EVENT_READ, engine)
    taken = wakeups = takes = 0
    waited = 0.0
    pipe.send("ready")
    while True:
        for key, _ in selector.select(0.001):
            if key.data is None:
                if pipe.recv() == "end":
                    return
                pipe.send(Counts(taken, wakeups, takes, waited))
                continue
            while key.data.listener.get_message() is not None:
                wakeups += 1
                key.data.next_look = 0.0
        for engine in engines:
            engine.end_due()
            if time.monotonic() >= engine.next_look:
                waits = engine.ask()
                takes += 1
                taken += len(waits)
                waited += sum(waits)


@contextlib.contextmanager
def engines_of(url: str, count: int) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=simulate, args=(url, count, theirs), daemon=True)
    process.start()
    try:
        assert mine.recv() == "ready"
        yield mine
        mine.send("end")
        process.join(10)
    finally:
        process.terminate()


class Feeder:
    def __init__(self, bus: Bus, client: redis.Redis, pipe: Connection) -> None:
        self._bus, self._client, self._pipe = bus, client, pipe
        self._count = 0

    def _look(self) -> tuple[float, float, Counts]:
        """Now, CPU seconds of Redis, and the engines' counts."""
        self._pipe.send("counts")
        counts: Counts = self._pipe.recv()
        used: dict[str, Any] = self._client.info("cpu")
        return time.monotonic(), used["used_cpu_user"] + used["used_cpu_sys"], counts

    def offer(self, rate: float) -> Load:
        began, cpu, counts = self._look()
        sent = 0
        while (now := time.monotonic()) < began + SECONDS:
            if now < began + sent / rate:
                time.sleep(min(0.001, began + sent / rate - now))
                continue
            sent += 1
            self._enqueue()
        ended, cpu_after, after = self._look()
        seconds = ended - began
        taken, wakeups, takes, waited = (new - old for new, old in zip(after, counts, strict=True))
        each = max(1, taken)
        return Load(rate, taken / seconds, (cpu_after - cpu) / seconds, wakeups / each, takes / each, waited / each)

    def _enqueue(self) -> None:
        self._count += 1
        prompt, sampling = encode_column(range(3)), SamplingParams(max_tokens=16)
        request = EngineCoreRequest(PROTOCOL_VERSION, f"r{self._count}", prompt, sampling, "api", self._count)
        self._bus.run(enqueue(MODEL, [request], AdmissionLimits(require_engine=False)))


def measure(url: str, count: int, client: redis.Redis) -> list[Load]:
    """The loads at rising rates, the last one beyond saturation."""
    client.flushall()
    loads: list[Load] = []
    with engines_of(url, count) as pipe, Bus(url) as bus:
        feeder = Feeder(bus, client, pipe)
        feeder.offer(LOWEST_RATE)  # the engines have asked
        while not loads or loads[-1].taken >= TAKEN_SHARE * loads[-1].offered:
            loads.append(feeder.offer(2 * loads[-1].offered if loads else LOWEST_RATE))
    return loads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--redis-url", help="a Redis that may be emptied; default: an embedded Valkey")
    arguments = parser.parse_args()
    console = Console(highlight=False, width=120)
    headings = ("engines", "offered", "taken", "ms of Redis' CPU", "wake-ups", "takes", "ms waited")
    table = Table(*headings, title="requests a second until saturated; the other columns are of each request")
    with contextlib.ExitStack() as stack:
        url = arguments.redis_url or stack.enter_context(embedded_valkey())
        client = stack.enter_context(redis.Redis.from_url(url))
        for count in arguments.engines:
            for load in measure(url, count, client):
                of_each = (1e3 * load.cpu / max(1.0, load.taken), load.wakeups, load.takes, 1e3 * load.waited)
                table.add_row(str(count), f"{load.offered:.0f}", f"{load.taken:.0f}", *(f"{number:.2f}" for number in of_each))
            table.add_section()
    console.print(table)


if __name__ == "__main__":
    main()
