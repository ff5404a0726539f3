"""A model's requests in a real Redis, moved by the calls of the bus, and the invariants that must hold after each of them."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal

import redis
from msgspec.structs import replace

from engine.bus import failover, journals, keys, leases, records, transitions
from engine.bus.call import Call
from engine.bus.connection import Bus
from engine.bus.enqueue import AdmissionLimits, Enqueued, Refused, enqueue, first_fields
from engine.bus.failover import Difference, TakenOver
from engine.bus.journals import EndedRequest, Flushed, OutputPart
from engine.bus.leases import ClaimedSlot
from engine.bus.records import RecordView
from engine.bus.transitions import FinishOutcome, Taken
from engine.protocol import (
    PROTOCOL_VERSION,
    Abort,
    ClientMessage,
    EngineCoreRequest,
    EngineInfo,
    FinishReason,
    RequestTimes,
    StoredChoice,
    StoredOutput,
    decode_client_message,
    decode_request,
    encode,
    encode_column,
)
from gpu.plan import SamplingParams

MODEL = "{odd}: model%"  # braces must not break the hash tag
CLIENT = "api-1"


def engine_info(model: str = MODEL) -> EngineInfo:
    return EngineInfo(
        slot="", incarnation=0, model=model, served_names=[model], fingerprint="f",
        protocol_versions=[PROTOCOL_VERSION], tokenizer="t", max_model_len=512,
        max_num_seqs=16, max_num_batched_tokens=256, block_size=16, num_blocks=64, vocab_size=100,
        max_logprobs=20, dtype="float32", device="cpu", tensor_parallel_size=1, pid=1, host="here", started=0.0,
    )  # fmt: skip


class Engine:
    """A slot and what its holder would keep in mind."""

    def __init__(self, claimed: ClaimedSlot) -> None:
        self.slot, self.incarnation = claimed
        self.flushes = itertools.count(1)
        self.takes = itertools.count(1)
        self.running: list[str] = []
        self.fingerprint = "f"


class World:
    def __init__(self, url: str, model: str = MODEL) -> None:
        self.url, self.model = url, model
        self.bus = Bus(url)
        self.raw = redis.Redis.from_url(url, protocol=2)
        self._numbers = itertools.count(1)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exception: object) -> None:
        self.bus.close()
        self.raw.close()

    # What API servers and engines do

    def engine(self, ttl: float = 60.0) -> Engine:
        """A new engine, in the lowest slot that a takeover left or that no engine had."""
        return Engine(self.bus.run(leases.claim_slot(self.model, engine_info(self.model), ttl)))

    def request(
        self, request_id: str = "", *, tokens: int = 3, n: int = 1, max_tokens: int = 16, **fields: Any
    ) -> EngineCoreRequest:
        number = next(self._numbers)
        return EngineCoreRequest(
            request_id=request_id or f"r{number}",
            prompt_token_ids=encode_column(range(tokens)),
            sampling=SamplingParams(n=n, max_tokens=max_tokens),
            **{"version": PROTOCOL_VERSION, "client": CLIENT, "handle": number, **fields},
        )

    def enqueue(
        self, *requests: EngineCoreRequest, external_id: str = "ext", limits: AdmissionLimits | None = None, retention: float = 600
    ) -> Enqueued | Refused:
        limits = limits or AdmissionLimits(require_engine=False)
        known = {"external_id": external_id, "retention": retention, "endpoint": "/v1/completions", "stream": True}
        return self.bus.run(
            enqueue(self.model, [replace(request, facts=replace(request.facts, **known)) for request in requests], limits)
        )

    def take_call(
        self, engine: Engine, count: int = 1, places: int | None = None, room: int = transitions.UNBOUNDED, **how: int
    ) -> Call[list[Taken]]:
        """`places`: how many more choices the engine could run; None: as many as it asks for. `room`: tokens of its KV cache."""
        number = next(engine.takes)
        places = count if places is None else places
        place = (self.model, engine.slot, engine.incarnation, engine.fingerprint)
        return transitions.take(*place, number, count, places, room, **how)

    def take(
        self, engine: Engine, count: int = 1, places: int | None = None, room: int = transitions.UNBOUNDED, **how: int
    ) -> list[str]:
        taken = self.bus.run(self.take_call(engine, count, places, room, **how))
        ids = [decode_request(each.payload).request_id for each in taken]
        engine.running += ids
        return ids

    def running(self, *requests: EngineCoreRequest | str) -> Engine:
        """An engine that has taken these requests, or new ones of these names."""
        given = [self.request(each) if isinstance(each, str) else each for each in requests]
        engine = self.engine()
        self.enqueue(*given)
        taken = self.take(engine, sum(each.sampling.n for each in given))
        assert sorted(taken) == sorted(each.request_id for each in given)
        return engine

    def flush_call(
        self, engine: Engine, ended: Iterable[str] = (), reason: FinishReason = FinishReason.STOP, **parts: Any
    ) -> Call[Flushed]:
        number = next(engine.flushes)
        ends = [ended_request(name, reason) for name in ended]
        return journals.flush(self.model, engine.slot, engine.incarnation, number - 1, number, ended=ends, **parts)

    def end(self, engine: Engine, *ids: str, reason: FinishReason = FinishReason.STOP) -> Flushed:
        engine.running = [name for name in engine.running if name not in ids]
        return self.bus.run(self.flush_call(engine, ids, reason, started=[(name, {"scheduled": "5.5"}) for name in ids]))

    def checkpoint(self, engine: Engine, *ids: str, flushed: int = 0, remark: Literal["", "adopt", "well"] = "") -> int:
        """Outputs of these requests, whatever they are, leave the journal."""
        parts = [OutputPart(name, f"output of {name}".encode(), remark) for name in ids]
        return self.bus.run(journals.checkpoint(self.model, engine.slot, engine.incarnation, parts, flushed))

    def reconcile(self, engine: Engine, *held: str) -> Difference:
        place = (self.model, engine.slot, engine.incarnation, engine.fingerprint)
        return self.bus.run(failover.reconcile(*place, held))

    def rebuild(self, engine: Engine, *requests: EngineCoreRequest) -> set[str]:
        place = (self.model, engine.slot, engine.incarnation, engine.fingerprint)
        rebuilt = [(request.request_id, encode(request), first_fields(request, self.model)) for request in requests]
        return self.bus.run(failover.rebuild(*place, rebuilt))

    def finish(self, request_id: str, **command: Any) -> FinishOutcome:
        return self.bus.run(transitions.finish(self.model, request_id, Abort(request_id, **command)))

    def crash(self, engine: Engine) -> None:
        """The heartbeat of an engine ran out."""
        self.raw.delete(keys.slot(self.model, engine.slot), keys.slot_info(self.model, engine.slot))

    def take_over(self, engine: Engine, **how: bool) -> TakenOver:
        return self.bus.run(failover.takeover(self.model, engine.slot, engine.incarnation, **how))

    def replace(self, engine: Engine) -> Engine:
        """The engine died, its requests wait, and another one has its slot."""
        self.crash(engine)
        self.take_over(engine)
        return self.engine()

    def record(self, request_id: str) -> RecordView:
        view = self.bus.run(records.record(self.model, request_id))
        assert view is not None
        return view

    def save(self) -> list[tuple[bytes, int, bytes]]:
        """All keys at one moment, each with its time to live, as Redis' file has them."""
        script = """
        local saved = {}
        for _, key in ipairs(redis.call('KEYS', '*')) do
          saved[#saved + 1] = {key, math.max(0, redis.call('PTTL', key)), redis.call('DUMP', key)}
        end
        return saved"""
        return [(key, ttl, dump) for key, ttl, dump in self.raw.eval(script, 0)]

    def restore(self, saved: list[tuple[bytes, int, bytes]]) -> None:
        """Redis comes back with what it had then."""
        with self.raw.pipeline(transaction=True) as pipeline:
            pipeline.flushall()
            for key, ttl, dump in saved:
                pipeline.restore(key, ttl, dump)
            pipeline.execute()

    def roll_back_over(self, act: Callable[[], object]) -> None:
        """`act` happened, and Redis does not know any more."""
        saved = self.save()
        act()
        self.restore(saved)

    # What Redis holds

    def queued(self) -> list[str]:
        """Ids in the order in which they would be taken."""
        entries = self.entries()
        return [entries[_entry(member)] for member in self.raw.zrange(keys.order(self.model), 0, -1)]

    def entries(self) -> dict[str, str]:
        """Entry -> id, of the whole stream."""
        return {entry.decode(): fields[b"id"].decode() for entry, fields in self.raw.xrange(keys.requests(self.model))}

    def pending(self) -> dict[str, str]:
        """Entry -> slot."""
        if not self.raw.exists(keys.requests(self.model)):
            return {}
        found = self.raw.xpending_range(keys.requests(self.model), keys.GROUP, "-", "+", 100_000)
        return {item["message_id"].decode(): keys.slot_of_consumer(item["consumer"].decode()) for item in found}

    def usage_lines(self) -> list[dict[str, str]]:
        lines = self.raw.xrange(keys.usage(self.model))
        return [{name.decode(): value.decode() for name, value in fields.items()} for _, fields in lines]

    def records(self) -> dict[str, dict[str, str]]:
        """All records, as text; outputs and orders are bytes, and left out."""
        found = {}
        for key in self.raw.scan_iter(_escaped(keys.record(self.model)) + "*", count=1000):
            fields = {name.decode(): value for name, value in self.raw.hgetall(key).items()}
            record = {
                name: value.decode() for name, value in fields.items() if name not in ("output", "outline") and ":" not in name
            }
            if record:  # else it expired between the two reads
                record["ttl"] = str(self.raw.pttl(key))
                found[record["id"]] = record
        return found

    def check_integrity(self) -> None:
        """The pending list is the ledger: records, order, live set, sums and usage all agree with it."""
        records, entries = self.records(), self.entries()
        by_state: dict[str, dict[str, dict[str, str]]] = {"queued": {}, "running": {}, "ended": {}}
        for name, record in records.items():
            by_state[record["state"]][name] = record
        running = {record["entry"]: record["engine"] for record in by_state["running"].values()}
        assert self.pending() == running
        order = self._waiting(keys.order(self.model))
        orphans: dict[str, int] = {}
        for key in self.raw.scan_iter(_escaped(keys.resume(self.model)) + "*", count=1000):
            orphans |= self._waiting(key.decode())
        assert not order.keys() & orphans.keys()
        waits_again = {record["entry"] for record in by_state["queued"].values() if "journals" in record}
        assert orphans.keys() == waits_again
        assert {name.decode() for name in self.raw.zrange(keys.orphans(self.model), 0, -1)} == {entries[each] for each in orphans}
        assert order | orphans == {record["entry"]: _score(record) for record in by_state["queued"].values()}
        heights: Counter[str] = Counter()
        for record in by_state["running"].values():
            heights[record["engine"]] += int(record["n"])
        assert {slot.decode(): n for slot, n in self.raw.zrange(keys.heights(self.model), 0, -1, withscores=True)} == heights
        alive = by_state["queued"] | by_state["running"]
        assert entries == {record["entry"]: name for name, record in alive.items()}
        assert {name.decode() for name in self.raw.zrange(keys.live(self.model), 0, -1)} == alive.keys()
        assert {name.decode() for name in self.raw.zrange(keys.ended(self.model), 0, -1)} == by_state["ended"].keys()
        assert self._load() == _expected_load(by_state["queued"], by_state["running"])
        assert len(self.usage_lines()) == len(by_state["ended"])
        self._check_outputs(alive, by_state["ended"])
        for record in by_state["running"].values():
            assert f"{record['engine']}:{record['incarnation']}" in record["journals"].split()
        for record in by_state["ended"].values():
            assert record["reason"] in {str(reason) for reason in FinishReason}
            assert float(record["finished"]) >= float(record["enqueued"])
            assert int(record["ttl"]) > 0
        assert all(record["ttl"] == "-1" for record in alive.values())
        for external_id in {record["external_id"] for record in alive.values()}:
            assert self.raw.pttl(keys.external(self.model, external_id)) == -1

    def _check_outputs(self, alive: dict[str, dict[str, str]], ended: dict[str, dict[str, str]]) -> None:
        """Parts are kept of live requests alone, whole outputs of ended ones, as far as their budget goes."""
        prefix = keys.output(self.model).encode()
        assert {key.removeprefix(prefix).decode() for key in self.raw.scan_iter(_escaped(prefix.decode()) + "*")} <= alive.keys()
        kept = dict(reversed(line.decode().split(" ", 1)) for line in self.raw.lrange(keys.kept(self.model), 0, -1))
        assert {name: int(size) for name, size in kept.items()} == {
            name: sum(self.raw.hstrlen(keys.record(self.model, name), part) for part in ("output", "outline"))
            for name in ended
            if self.raw.hexists(keys.record(self.model, name), "output")
        }
        assert int(self.raw.hget(keys.load(self.model), "kept") or 0) == sum(map(int, kept.values()))
        counts = Counter(record["external_id"] for record in alive.values())
        told = {name.decode(): int(value) for name, value in self.raw.hgetall(keys.externals(self.model)).items()}
        assert {name.removeprefix("live:"): count for name, count in told.items() if name.startswith("live:")} == counts

    def _waiting(self, key: str) -> dict[str, int]:
        """Entry -> score."""
        return {_entry(member): int(score) for member, score in self.raw.zrange(key, 0, -1, withscores=True)}

    def _load(self) -> dict[str, int]:
        sums = {name.decode(): int(value) for name, value in self.raw.hgetall(keys.load(self.model)).items()}
        sums.pop("kept", None)
        return sums


class Listener:
    """What an API server hears, collected on a thread."""

    def __init__(self, world: World, client: str = CLIENT) -> None:
        self.raw: list[bytes] = []
        self._subscribed, self._stopped = threading.Event(), threading.Event()
        self._arrived = threading.Condition()
        self._thread = threading.Thread(target=self._listen, args=(world.bus, keys.client_channel(client)))

    def __enter__(self) -> Listener:
        self._thread.start()
        assert self._subscribed.wait(10)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join(10)

    def _listen(self, bus: Bus, channel: str) -> None:
        with bus.subscribe(channel) as subscription:
            self._subscribed.set()
            while not self._stopped.is_set():
                message = subscription.get(0.02)
                if message is not None:
                    with self._arrived:
                        self.raw.append(message[1])
                        self._arrived.notify_all()

    def wait_for(self, count: int) -> list[ClientMessage]:
        """The messages, once there are `count` of them."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.raw) >= count, 10), self.raw
            return [decode_client_message(payload) for payload in self.raw]


def ended_request(request_id: str, reason: FinishReason = FinishReason.STOP) -> EndedRequest:
    output = StoredOutput([StoredChoice(encode_column([1, 2, 3, 4]), reason)], 1, RequestTimes())
    fields = {"scheduled": "5.5", "first_token": "6.5", "last_token": "7.5", "preemptions": "0"}
    return EndedRequest(request_id, reason, encode(output), output_tokens=4, cached_tokens=1, fields=fields)


def _score(record: dict[str, str]) -> int:
    """The place in the order: service tier, priority, then virtual start."""
    tier = {"priority": -1, "flex": 1}.get(record.get("tier", ""), 0)
    return (1025 * tier + max(-512, min(512, int(record["priority"])))) * 2**40 + int(record.get("start", 0))


def _entry(member: bytes) -> str:
    milliseconds, sequence = member.decode().split("-")
    return f"{milliseconds}-{int(sequence)}"


def _escaped(pattern: str) -> str:
    """Taken literally by SCAN's MATCH."""
    return "".join("\\" + letter if letter in "*?[]^\\" else letter for letter in pattern)


def _expected_load(queued: dict[str, dict[str, str]], running: dict[str, dict[str, str]]) -> dict[str, int]:
    load: Counter[str] = Counter()
    for record in (*queued.values(), *running.values()):
        load["requests"] += int(record["n"])
        load["requests:" + record["tenant"]] += int(record["n"])
        load["client:" + record["client"]] += 1
    for record in queued.values():
        load["waiting"] += int(record["n"])
        load["waiting:" + record["tenant"]] += int(record["n"])
        load["orphans"] += int(record["n"]) if "journals" in record else 0
        load["tokens"] += int(record["prompt_tokens"])
        load["tokens:" + record["tenant"]] += int(record["prompt_tokens"])
    return {name: value for name, value in load.items() if value}
