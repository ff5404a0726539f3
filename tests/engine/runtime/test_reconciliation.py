"""The engine's own side after a mishap of Redis: what it puts back, what it forgets, and a request that comes again meanwhile."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from engine.bus import failover
from engine.protocol import Abort, EngineCoreRequest, FinishReason
from engine.runtime.core import EngineCore
from engine.runtime.owned_requests import OwnedRequest, OwnedRequests
from engine.runtime.reconciliation import Forget, Reconciler, StoreOutputs
from engine.runtime.slot_owner import SlotOwner
from tests.engine.bus.ledger_world import Engine, World, engine_info
from tests.engine.conftest import null_config
from tests.engine.runtime.engine_life import Life, arrive, assert_same_output, make_source


@pytest.fixture
def world(redis_url: str) -> Iterator[World]:
    with World(redis_url) as world:
        yield world


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    core = EngineCore(null_config(max_num_batched_tokens=32))
    yield core
    core.shutdown()


FORGET = Forget(frozenset({"r"}))


def begin(core: EngineCore, source: EngineCoreRequest) -> Life:
    """An engine in the middle of a request's output."""
    life = Life(core)
    life.turn(arrive(core, source))
    while not life.num_sampled:
        assert life.turn()
    return life


class Holder:
    """The reconciler of an engine that has taken requests."""

    def __init__(self, world: World, engine: Engine, *requests: EngineCoreRequest) -> None:
        self.owned = OwnedRequests()
        for request in requests:
            self.owned.add(OwnedRequest(request))
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        info = msgspec.structs.replace(engine_info(world.model), slot=engine.slot, incarnation=engine.incarnation)
        self.reconciler = Reconciler(SlotOwner(world.bus, info), self.owned, self.inbox)

    def told(self) -> list[Any]:
        return [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]

    def ids(self) -> set[str]:
        return {owned.source.request_id for owned in self.owned.all()}


def between_look_and_putting_back(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    rebuild, acts = failover.rebuild, [act]

    def and_act(*arguments: Any) -> Any:
        while acts:
            acts.pop()()
        return rebuild(*arguments)

    monkeypatch.setattr(failover, "rebuild", and_act)


def test_a_wiped_request_that_its_api_server_enqueues_again_stays_with_its_engine(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [world.request("again"), world.request("aborted"), world.request("wiped")]
    engine = world.engine()
    world.enqueue(*requests)
    world.take(engine, 3)
    holder = Holder(world, engine, *requests)
    world.raw.flushall()
    between_look_and_putting_back(monkeypatch, lambda: (world.enqueue(requests[0]), world.finish("aborted")))
    holder.reconciler.run()
    assert [told for told in holder.told() if not isinstance(told, StoreOutputs)] == [Forget(frozenset({"aborted"}))]
    assert holder.ids() == {"again", "wiped"}
    assert [world.record(name).incarnation for name in ("again", "wiped")] == 2 * [engine.incarnation]
    assert world.queued() == []
    world.check_integrity()


def test_a_wiped_request_that_another_engine_took_meanwhile_is_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    request = world.request("a")
    engine = world.engine()
    world.enqueue(request)
    world.take(engine)
    holder = Holder(world, engine, request)
    world.raw.flushall()

    def take_elsewhere() -> None:
        world.enqueue(request)
        assert world.take(world.engine()) == ["a"]

    between_look_and_putting_back(monkeypatch, take_elsewhere)
    holder.reconciler.run()
    assert Forget(frozenset({"a"})) in holder.told()
    assert not holder.ids()
    world.check_integrity()


def test_a_request_that_comes_again_before_it_has_closed_is_admitted_then(core: EngineCore) -> None:
    """Another engine had it, and died at once."""
    source = make_source("r", range(300, 340), max_tokens=6)
    calm = Life(core).run(arrive(core, source))
    life = begin(core, source)
    life.turn(FORGET, arrive(core, source))
    assert life.loop.intake.num_admitted == 1, "it is still on its way"
    life.run()
    assert_same_output(life.stored["r"], calm.stored["r"])
    assert life.loop.intake.num_admitted == 2


def test_an_order_that_comes_before_the_old_one_has_closed_is_the_new_ones(core: EngineCore) -> None:
    source = make_source("r", range(300, 340), max_tokens=6)
    life = begin(core, source).run(FORGET, arrive(core, source), Abort("r"))
    assert [choice.reason for choice in life.stored["r"].choices] == [FinishReason.ABORT]


def test_a_request_that_is_forgotten_again_does_not_come(core: EngineCore) -> None:
    source = make_source("r", range(300, 340), max_tokens=6)
    life = begin(core, source).run(FORGET, arrive(core, source), FORGET)
    assert not life.stored
    assert life.loop.intake.num_admitted == 2, "it is not on its way any more"
