"""Any interleaving of the calls leaves the ledger whole.

Seeded walks over everything that API servers, engines, watchers and zombies do, the invariants checked after each step.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.bus.call import Call, Fenced
from engine.bus.enqueue import AdmissionLimits, Enqueued, Refused, enqueue
from engine.bus.queue_depth import QueueDepth, queue_depth
from engine.protocol import RequestFacts
from tests.engine.bus.ledger_world import Engine, World


class Walk:
    """One random history of a model's requests."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.alive: list[Engine] = []
        self.dead: list[Engine] = []
        self.sent: list[Call[Enqueued | Refused]] = []
        self.known: list[str] = []
        self.ended: set[str] = set()

    def step(self) -> None:
        moves: list[Callable[[], None]] = [
            self.enqueue, self.enqueue, self.enqueue, self.resend, self.start_engine, self.take, self.take, self.take,
            self.flush, self.flush, self.finish, self.abort_early, self.crash, self.fail_engine, self.zombie, self.repeat_take,
        ]  # fmt: skip
        self.random.choice(moves)()

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
            self.sent.append(call)
            self.known += [request.request_id for request in requests]

    def resend(self) -> None:
        if self.sent:
            assert isinstance(self.world.bus.run(self.random.choice(self.sent)), Enqueued)

    def start_engine(self) -> None:
        if len(self.alive) < 3:
            engine = self.world.engine()
            assert all(engine.incarnation > other.incarnation for other in self.alive + self.dead)
            self.alive.append(engine)

    def take(self) -> None:
        if self.alive:
            self.world.take(self.random.choice(self.alive), self.random.randint(1, 4))

    def repeat_take(self) -> None:
        if self.alive:
            engine = self.random.choice(self.alive)
            call = self.world.take_call(engine, 2)
            first = self.world.bus.run(call)
            if first:
                assert self.world.bus.run(call) == first
            engine.running += [self.world.entries()[taken.entry] for taken in first]

    def flush(self) -> None:
        if self.alive:
            engine = self.random.choice(self.alive)
            ending = self.random.sample(engine.running, min(len(engine.running), self.random.randint(0, 3)))
            call = self.world.flush_call(engine, ending)
            assert self.world.bus.run(call) == 1
            assert self.world.bus.run(call) == 0
            engine.running = [name for name in engine.running if name not in ending]
            self.ended.update(ending)

    def finish(self) -> None:
        if self.known:
            name = self.random.choice(self.known)
            before = self.world.record(name).state
            assert self.world.finish(name).state == before
            assert self.world.record(name).state == ("running" if before == "running" else "ended")

    def abort_early(self) -> None:
        request = self.world.request()
        assert self.world.finish(request.request_id).state == "unknown"
        refused = self.world.enqueue(request)
        assert isinstance(refused, Refused) and refused.reason == "aborted"

    def crash(self) -> None:
        if self.alive and self.random.random() < 0.5:
            engine = self.alive.pop(self.random.randrange(len(self.alive)))
            self.world.crash(engine)
            self.dead.append(engine)

    def fail_engine(self) -> None:
        for engine in self.alive:
            assert self.world.fail_engine(engine) == 0
        if self.dead:
            engine = self.random.choice(self.dead)
            self.world.fail_engine(engine)
            assert all(self.world.record(name).state == "ended" for name in engine.running)

    def zombie(self) -> None:
        if self.dead:
            engine = self.random.choice(self.dead)
            with pytest.raises(Fenced):
                self.world.bus.run(self.world.take_call(engine, 5))
            with pytest.raises(Fenced):
                self.world.bus.run(self.world.flush_call(engine, engine.running))


@pytest.mark.parametrize("seed", range(4))
def test_any_interleaving_leaves_the_ledger_whole(each_redis_url: str, seed: int) -> None:
    with World(each_redis_url) as world:
        walk = Walk(world, seed)
        for _ in range(150):
            walk.step()
            world.check_integrity()
        # Everything comes to an end, and then nothing is left of it but records.
        for engine in walk.alive:
            world.crash(engine)
        for engine in walk.alive + walk.dead:
            world.fail_engine(engine)
        for name in world.queued():
            world.finish(name)
        world.check_integrity()
        assert world.bus.run(queue_depth(world.model)) == QueueDepth(0, 0, 0, 0, 0)
        assert all(world.record(name).state == "ended" for name in walk.known)
