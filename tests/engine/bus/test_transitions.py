"""Any interleaving of the calls leaves the ledger whole, and no request is lost.

Seeded walks over everything that API servers, engines, observers and zombies do, and what happens to Redis under them: it is wiped,
or comes back with what it had some time ago. The invariants are checked after each step.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from engine.bus import keys, leases
from engine.bus.attachments import attach, detach
from engine.bus.call import Call, Fenced, Unowned
from engine.bus.enqueue import AdmissionLimits, Enqueued, Refused, enqueue
from engine.bus.failover import TakenOver
from engine.bus.journals import FLUSHED, GAP, REPEATED, flush_behind
from engine.bus.queue_depth import QueueDepth, queue_depth
from engine.protocol import EngineCoreRequest, RequestFacts
from tests.engine.bus.ledger_world import Engine, World, engine_info


class Walk:
    """One random history of a model's requests."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.alive: list[Engine] = []
        self.silent: list[Engine] = []  # without a heartbeat, and not taken over yet
        self.zombies: list[Engine] = []  # taken over, and running all the same
        self.sent: dict[str, Call[Enqueued | Refused]] = {}  # by id, the call that enqueued it
        self.requests: dict[str, EngineCoreRequest] = {}
        self.done: set[str] = set()  # was seen to have ended: its client knows
        self.saved = world.save()

    def step(self) -> None:
        moves: list[Callable[[], None]] = [
            self.enqueue, self.enqueue, self.enqueue, self.resend, self.start_engine, self.take, self.take, self.take,
            self.flush, self.flush, self.finish, self.abort_early, self.fall_silent, self.beat_late, self.take_over, self.stop,
            self.zombie, self.repeat_take, self.checkpoint, self.reconcile, self.save, self.mishap,
            self.attach, self.detach,
        ]  # fmt: skip
        self.random.choice(moves)()

    def check(self) -> None:
        self.world.check_integrity()
        records = self.world.records()
        self.done |= {name for name, record in records.items() if record["state"] == "ended"}
        lost = self.requests.keys() - records.keys() - self.done
        assert not lost

    def enqueue(self) -> None:
        count = self.random.choice([1, 1, 3])
        facts = RequestFacts(f"ext{self.random.randint(0, 5)}", retention=600)
        requests = [
            self.world.request(
                tokens=self.random.randint(1, 50),
                n=self.random.choice([1, 1, 2]),
                priority=self.random.choice([0, 0, -5, 7]),
                tenant=self.random.choice(["", "a", "b"]),
                client=self.random.choice(["api-1", "api-2"]),
                facts=facts,
            )
            for _ in range(count)
        ]
        limits = AdmissionLimits(max_num_queued_reqs=40, max_num_queued_tokens=400, require_engine=False)
        call = enqueue(self.world.model, requests, limits)
        if isinstance(self.world.bus.run(call), Enqueued):
            self.sent |= {request.request_id: call for request in requests}
            self.requests |= {request.request_id: request for request in requests}

    def resend(self) -> None:
        """Their answer was lost."""
        if known := sorted(self.sent.keys() & self.world.records().keys()):
            call = self.sent[self.random.choice(known)]
            assert isinstance(self.world.bus.run(call), Enqueued | Refused)  # refused where a wipe took some of the list

    def start_engine(self) -> None:
        if len(self.alive) < 3:
            engine = self.world.engine()
            assert all(engine.incarnation > other.incarnation for other in self.alive + self.silent + self.zombies)
            self.alive.append(engine)

    def take(self) -> None:
        if self.alive:
            self.world.take(self.random.choice(self.alive), self.random.randint(1, 4))

    def repeat_take(self) -> None:
        if self.alive:
            engine = self.random.choice(self.alive)
            call = self.world.take_call(engine, 2)
            first = self.world.bus.run(call)
            assert self.world.bus.run(call) == first
            engine.running += [self.world.entries()[taken.entry] for taken in first]

    def flush(self) -> None:
        if self.alive:
            engine = self.random.choice(self.alive)
            ending = self.random.sample(engine.running, min(len(engine.running), self.random.randint(0, 3)))
            self.flush_all(engine, ending)

    def flush_all(self, engine: Engine, ending: list[str]) -> None:
        call = self.world.flush_call(engine, ending, messages=[("api-1", b"output")])
        done = self.world.bus.run(call)
        if done.outcome == GAP:  # after a mishap
            call = flush_behind(call, done.last)
            done = self.world.bus.run(call)
        assert done.outcome == FLUSHED
        assert self.world.bus.run(call).outcome == REPEATED
        engine.running = [name for name in engine.running if name not in ending]

    def checkpoint(self) -> None:
        if self.alive:
            engine = self.random.choice(self.alive)
            self.world.checkpoint(engine, *engine.running, remark=self.random.choice(["", "adopt", "well"]))

    def finish(self) -> None:
        if known := sorted(self.requests.keys() & self.world.records().keys()):
            name = self.random.choice(known)
            before = self.world.record(name).state
            assert self.world.finish(name).state == before
            assert self.world.record(name).state == ("running" if before == "running" else "ended")

    def attach(self) -> None:
        """Another stream listens to some requests; one of them may be unknown."""
        known = sorted(self.world.records())
        chosen = self.random.sample([*known, "nobody"], min(3, len(known) + 1))
        wanted = [(name, self.random.randint(10_000, 20_000)) for name in chosen]
        states = self.world.bus.run(attach(self.world.model, "api-3", wanted))
        for (name, handle), state in zip(wanted, states, strict=True):
            if state in ("queued", "running"):
                assert (self.world.record(name).client, self.world.record(name).handle) == ("api-3", handle)

    def detach(self) -> None:
        if known := sorted(self.world.records()):
            name = self.random.choice(known)
            record = self.world.record(name)
            left = self.world.bus.run(detach(self.world.model, name, record.client, record.handle))
            assert left == (None if record.state == "ended" else 0.0)

    def abort_early(self) -> None:
        request = self.world.request()
        assert self.world.finish(request.request_id).state == "unknown"
        refused = self.world.enqueue(request)
        assert isinstance(refused, Refused) and refused.reason == "aborted"

    def fall_silent(self) -> None:
        if self.alive and self.random.random() < 0.5:
            engine = self.alive.pop(self.random.randrange(len(self.alive)))
            self.world.crash(engine)
            self.silent.append(engine)

    def beat_late(self) -> None:
        if self.silent:
            engine = self.silent.pop(self.random.randrange(len(self.silent)))
            self.beat(engine)
            self.alive.append(engine)

    def beat(self, engine: Engine) -> None:
        info = replace(engine_info(self.world.model), slot=engine.slot, incarnation=engine.incarnation)
        self.world.bus.run(leases.beat(self.world.model, engine.slot, engine.incarnation, info, ttl=60.0))

    def take_over(self) -> None:
        for engine in self.alive:
            assert self.world.take_over(engine) == TakenOver(0, 0)
        if self.silent:
            engine = self.silent.pop(self.random.randrange(len(self.silent)))
            self.world.take_over(engine)
            assert not self.in_flight(engine)
            self.zombies.append(engine)

    def stop(self) -> None:
        if self.alive and self.random.random() < 0.3:
            engine = self.alive.pop(self.random.randrange(len(self.alive)))
            assert self.world.take_over(engine, sure=True, blame=False).ended == 0
            assert not self.in_flight(engine)
            self.zombies.append(engine)

    def in_flight(self, engine: Engine) -> list[str]:
        records = self.world.records()
        mine = {name for name, record in records.items() if record.get("incarnation") == str(engine.incarnation)}
        return [name for name in mine if records[name]["state"] == "running"]

    def zombie(self) -> None:
        if self.zombies:
            engine = self.random.choice(self.zombies)
            for call in (self.world.take_call(engine, 5), self.world.flush_call(engine, engine.running)):
                with pytest.raises(Fenced):
                    self.world.bus.run(call)

    def reconcile(self) -> None:
        if self.alive:
            engine = self.random.choice(self.alive)
            self.mend(engine)
            assert sorted(self.in_flight(engine)) == sorted(engine.running)

    def mend(self, engine: Engine) -> None:
        """An engine sees what Redis has of its requests, and puts back what it has forgotten."""
        held = list(dict.fromkeys(engine.running))
        while (found := self.world.reconcile(engine, *held)).unknown:
            aborted = self.world.rebuild(engine, *(self.requests[name] for name in found.unknown))
            held = [name for name in held if name not in aborted]
        engine.running = [name for name in held if name not in found.foreign]

    def save(self) -> None:
        self.saved = self.world.save()

    def mishap(self) -> None:
        """Redis is wiped, or comes back with what it had at the last `save`. Engines look first, then API servers put back what no
        engine has."""
        if self.random.random() < 0.5:
            self.world.raw.flushall()
            self.saved = []
            self.zombies.clear()  # they end: Redis would take them for what they were
        else:
            self.world.restore(self.saved)
        engines, self.alive, self.silent, old = self.alive + self.silent, [], [], self.zombies
        self.zombies = []
        for engine in engines:
            try:
                self.own(engine)
                self.alive.append(engine)
            except Fenced:
                self.zombies.append(engine)
        for engine in old:  # some are owners again, whom nobody hears
            is_owner = self.world.raw.get(keys.owner(self.world.model, engine.slot)) == str(engine.incarnation).encode()
            if is_owner:
                self.world.crash(engine)
            (self.silent if is_owner else self.zombies).append(engine)
        self.zombies = [engine for engine in self.zombies if self.world.raw.exists(keys.owner(self.world.model, engine.slot))]
        self.own_nothing_else()
        for name in sorted(self.requests.keys() - self.world.records().keys() - self.done):
            self.world.bus.run(enqueue(self.world.model, [self.requests[name]], AdmissionLimits(require_engine=False)))

    def own(self, engine: Engine) -> None:
        try:
            self.beat(engine)
        except Unowned:
            self.world.bus.run(leases.reclaim_slot(self.world.model, engine.slot, engine.incarnation, ttl=60.0))
            self.beat(engine)
        self.mend(engine)

    def own_nothing_else(self) -> None:
        """Engines that ended long ago own slots again: observers miss their heartbeats."""
        owners = {engine.slot: engine.incarnation for engine in self.alive + self.silent}
        for slot in self.world.raw.smembers(keys.slots(self.world.model)):
            owner = self.world.raw.get(keys.owner(self.world.model, slot.decode()))
            if slot.decode() not in owners and owner is not None and owner.isdigit():
                ghost = Engine(leases.ClaimedSlot(slot.decode(), int(owner)))
                self.world.crash(ghost)
                self.silent.append(ghost)


@pytest.mark.parametrize("seed", range(3))
def test_any_interleaving_leaves_the_ledger_whole(each_redis_url: str, seed: int) -> None:
    with World(each_redis_url) as world:
        walk = Walk(world, seed)
        for _ in range(200):
            walk.step()
            walk.check()
        # Everything comes to an end, and then nothing is left of it but records.
        for engine in walk.alive + walk.silent:
            world.take_over(engine, sure=True)
        for name, record in world.records().items():
            if record["state"] != "ended":
                world.finish(name)
        walk.check()
        assert world.bus.run(queue_depth(world.model)) == QueueDepth(0, 0, 0, 0, 0)
        assert walk.requests.keys() == walk.done & walk.requests.keys()
