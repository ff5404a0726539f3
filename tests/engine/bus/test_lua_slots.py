"""claim.lua, beat.lua and reclaim.lua: one owner a slot, known by its incarnation, and signs of life apart from that."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from engine.bus import keys, leases
from engine.bus.call import Fenced, Script, Unowned, script
from engine.bus.connection import Bus
from engine.bus.leases import ClaimedSlot
from tests.engine.bus.ledger_world import Engine, World, engine_info
from tests.engine.bus.lossy_proxy import LossyProxy
from tests.waiting import wait_for


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world


def test_a_claim_gives_the_lowest_free_slot_and_a_new_incarnation(world: World) -> None:
    first, second, third = world.engine(), world.engine(), world.engine()
    assert [engine.slot for engine in (first, second, third)] == ["0", "1", "2"]
    world.crash(second)
    assert world.engine().slot == "3", "one that is silent may come back"
    world.take_over(second)
    heir = world.engine()
    assert heir.slot == "1"
    assert first.incarnation < second.incarnation < third.incarnation < heir.incarnation
    world.crash(Engine(ClaimedSlot("3", 0)))
    assert [(info.slot, info.incarnation) for info in world.bus.run(leases.engines(world.model))] == [
        (engine.slot, engine.incarnation) for engine in (first, heir, third)
    ]
    assert world.model in world.bus.run(leases.models())


def test_an_engine_gets_the_slot_that_it_wants_if_it_is_free(world: World) -> None:
    def claim(wanted: int) -> str:
        return world.bus.run(leases.claim_slot(world.model, engine_info(), 60, wanted)).slot

    assert [claim(wanted) for wanted in (1, 1, 0, 5, 5)] == ["1", "0", "2", "5", "3"]


def test_a_claim_that_is_sent_again_gets_the_same_slot_though_a_better_one_is_free_by_now(world: World) -> None:
    holder = world.engine()
    claim = leases.claim_slot(world.model, engine_info(), ttl=60)
    first = world.bus.run(claim)
    world.take_over(holder, sure=True)
    assert world.bus.run(claim) == first == ("1", first.incarnation)


def test_incarnations_rise_even_when_the_clock_goes_back(world: World) -> None:
    first = world.engine()
    future = first.incarnation + 10**12
    world.raw.set(keys.incarnation(world.model), future)
    assert world.engine().incarnation == future + 1
    world.take_over(first, sure=True)
    assert world.engine().incarnation == future + 3, "the vacancy has one of its own"


def test_racing_engines_get_a_slot_each(world: World) -> None:
    engines: list[Engine] = []
    threads = [threading.Thread(target=lambda: engines.append(world.engine())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(engine.slot) for engine in engines) == list(range(8))
    assert len({engine.incarnation for engine in engines}) == 8


@pytest.mark.parametrize("lost", [script("claim", "incarnation"), script("beat")], ids=["claim", "beat"])
def test_a_lost_answer_costs_no_slot(world: World, lost: Script) -> None:
    world.engine()  # so that both scripts are loaded
    with LossyProxy(world.url) as proxy, Bus(proxy.url) as bus:
        proxy.losses, proxy.about = 2, lost.sha.encode()
        claimed = bus.run(leases.claim_slot(world.model, engine_info(), ttl=60))
        assert proxy.lost == 2
    assert claimed.slot == "1"
    assert [info.slot for info in world.bus.run(leases.engines(world.model))] == ["0", "1"]
    assert world.engine().slot == "2"


def test_a_heartbeat_renews_slot_and_snapshot(world: World) -> None:
    engine = world.engine(ttl=1.0)
    info = engine_info()
    info.slot, info.incarnation, info.state = engine.slot, engine.incarnation, "draining"
    world.bus.run(leases.beat(world.model, engine.slot, engine.incarnation, info, ttl=60.0))
    assert world.raw.pttl(keys.slot(world.model, engine.slot)) > 50_000
    assert world.raw.pttl(keys.slot_info(world.model, engine.slot)) > 50_000
    assert world.bus.run(leases.engines(world.model)) == [info]


def beat(world: World, engine: Engine) -> None:
    world.bus.run(leases.beat(world.model, engine.slot, engine.incarnation, engine_info(world.model), failover_timeout=50.0))


def test_a_late_heartbeat_revives_its_slot(world: World) -> None:
    """Silence tells only that nothing was heard: after a pause of Redis or of the process all goes on."""
    engine = world.engine(ttl=0.02)
    world.enqueue(world.request("a"))
    world.take(engine)
    wait_for(lambda: not world.raw.exists(keys.slot(world.model, engine.slot)), "the end of its time to live")
    assert world.bus.run(leases.engines(world.model)) == []
    world.end(engine, "a")
    beat(world, engine)
    assert len(world.bus.run(leases.engines(world.model))) == 1
    world.check_integrity()


def test_heartbeats_say_that_the_model_is_served_for_the_failover_time(world: World) -> None:
    engine = world.engine()
    beat(world, engine)
    for key in (keys.served(world.model), keys.served_by(world.model, "f"), keys.last_engine(world.model)):
        assert 45_000 < world.raw.pttl(key) <= 50_000
    world.crash(engine)
    last = world.bus.run(leases.last_engine(world.model))
    assert last is not None and last.max_model_len == 512
    assert world.bus.run(leases.last_engine("nobody")) is None


def test_a_heartbeat_after_a_takeover_is_refused(world: World) -> None:
    engine = world.engine()
    world.crash(engine)
    world.take_over(engine)
    with pytest.raises(Fenced):
        beat(world, engine)
    heir = world.engine()
    with pytest.raises(Fenced):
        beat(world, engine)
    beat(world, heir)
    assert heir.slot == engine.slot


def reclaim(world: World, engine: Engine) -> None:
    world.bus.run(leases.reclaim_slot(world.model, engine.slot, engine.incarnation, ttl=60.0))


def test_after_a_wipe_an_engine_owns_its_slot_again_under_its_incarnation(world: World) -> None:
    first, second = world.engine(), world.engine()
    world.raw.flushall()
    with pytest.raises(Unowned):
        beat(world, second)
    for _ in range(2):
        reclaim(world, second)
    beat(world, second)
    assert len(world.bus.run(leases.engines(world.model))) == 1
    assert world.bus.run(leases.models()) == [world.model]
    newcomer = world.engine()
    assert (newcomer.slot, newcomer.incarnation > second.incarnation) == (first.slot, True)
    with pytest.raises(Fenced):
        reclaim(world, first)
    with pytest.raises(Fenced):
        beat(world, first)
    assert world.engine().slot == "2"


def test_after_a_wipe_a_zombie_does_not_keep_the_slot_from_its_successor(world: World) -> None:
    zombie = world.engine()
    successor = world.replace(zombie)
    world.raw.flushall()
    request = world.request("a")
    reclaim(world, zombie)
    world.rebuild(zombie, request)
    reclaim(world, successor)
    for call in (reclaim, beat):
        with pytest.raises(Fenced):
            call(world, zombie)
    assert world.take_over(zombie, sure=True).orphaned == 1, "as it does when it is fenced"
    assert world.take(successor) == ["a"]
    world.check_integrity()


def test_incarnations_rise_across_a_wipe(world: World) -> None:
    """Though Redis' clock may have been set back since."""
    engine = world.engine()
    engine.incarnation += 10**12
    world.raw.flushall()
    reclaim(world, engine)
    assert world.engine().incarnation == engine.incarnation + 1


def test_models_do_not_share_slots(world: World) -> None:
    with World(world.url, "another") as other:
        assert (world.engine().slot, other.engine().slot) == ("0", "0")
        assert world.bus.run(leases.models()) == ["another", world.model]


def test_a_heartbeat_brings_the_lists_back_by_which_others_find_an_engine(world: World) -> None:
    engine = world.engine()
    lists = (keys.models(), keys.slots(world.model), keys.journals(world.model))
    before = [world.raw.smembers(name) for name in lists]
    world.raw.delete(*lists)
    world.bus.run(leases.beat(world.model, engine.slot, engine.incarnation, engine_info(world.model)))
    assert [world.raw.smembers(name) for name in lists] == before
