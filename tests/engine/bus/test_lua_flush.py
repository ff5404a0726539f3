"""flush.lua: a step's outputs, records and ends, all of them once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.bus import journals, keys, leases, records, transitions
from engine.bus.call import BusUnavailable, Fenced, Trouble
from engine.bus.connection import Bus
from engine.bus.enqueue import AdmissionLimits
from engine.bus.failover import TakenOver
from engine.bus.journals import FLUSHED, GAP, REPEATED
from engine.bus.queue_depth import QueueDepth, queue_depth
from engine.protocol import Abort, ControlReply, EngineCoreOutputs, FinishReason, encode
from tests.engine.bus.ledger_world import CLIENT, Engine, Listener, World
from tests.engine.bus.lossy_proxy import LossyProxy
from tests.waiting import wait_for


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world


def outputs(engine: Engine, step: int) -> bytes:
    return encode(EngineCoreOutputs("m:0", engine.incarnation, step))


def journal(world: World, engine: Engine) -> list[tuple[str, dict[bytes, bytes]]]:
    entries = world.raw.xrange(keys.journal(world.model, f"{engine.slot}:{engine.incarnation}"))
    return [(entry.decode(), fields) for entry, fields in entries]


def test_every_api_server_gets_its_bytes_and_the_journal_has_them_all(world: World) -> None:
    engine = world.engine()
    mine, other = outputs(engine, 1), outputs(engine, 2)
    with Listener(world) as listener, Listener(world, "api-2") as second:
        assert world.bus.run(world.flush_call(engine, messages=[(CLIENT, mine), ("api-2", other)])) == (FLUSHED, 1)
        listener.wait_for(1)
        second.wait_for(1)
    assert (listener.raw, second.raw) == ([mine], [other])
    assert journal(world, engine) == [("1-0", {CLIENT.encode(): mine, b"api-2": other})]
    assert world.raw.pttl(keys.journal(world.model, f"{engine.slot}:{engine.incarnation}")) > 0


def test_a_flush_sent_twice_is_done_once(world: World) -> None:
    engine = world.running("a", "b")
    call = world.flush_call(engine, ["a"], messages=[(CLIENT, outputs(engine, 1))])
    later = world.flush_call(engine, messages=[(CLIENT, outputs(engine, 2))])
    with Listener(world) as listener:
        outcomes = [world.bus.run(each) for each in (call, call, later, call)]
        assert outcomes == [(FLUSHED, 1), (REPEATED, 1), (FLUSHED, 2), (REPEATED, 2)]
        listener.wait_for(2)
    assert listener.raw == [outputs(engine, 1), outputs(engine, 2)]
    assert [entry for entry, _ in journal(world, engine)] == ["1-0", "2-0"]
    assert len(world.usage_lines()) == 1
    world.check_integrity()


def test_a_lost_answer_publishes_nothing_twice(world: World) -> None:
    engine = world.running("a")
    with LossyProxy(world.url) as proxy, Bus(proxy.url) as bus, Listener(world) as listener:
        bus.run(queue_depth(world.model))
        proxy.losses = 1
        assert bus.run(world.flush_call(engine, ["a"], messages=[(CLIENT, outputs(engine, 1))])) == (REPEATED, 1)
        assert proxy.lost == 1
        world.bus.run(world.flush_call(engine, messages=[(CLIENT, outputs(engine, 2))]))
        listener.wait_for(2)
    assert listener.raw == [outputs(engine, 1), outputs(engine, 2)]
    world.check_integrity()


def test_a_flush_writes_the_end_into_the_record(world: World) -> None:
    engine = world.running(world.request("a", tokens=7, tenant="t"))
    world.bus.run(world.flush_call(engine, started=[("a", {"scheduled": "5.5", "first_token": "6.5"})]))
    assert (world.record("a").state, world.record("a").first_token) == ("running", 6.5)
    world.end(engine, "a")
    record = world.record("a")
    assert (record.state, record.reason, record.output_tokens, record.cached_tokens) == ("ended", "stop", 4, 1)
    assert (record.scheduled, record.first_token, record.last_token, record.error) == (5.5, 6.5, 7.5, "")
    assert record.finished >= record.received
    stored = world.bus.run(records.stored_output(world.model, "a"))
    assert stored is not None and stored.choices[0].reason == FinishReason.STOP and len(stored.choices[0].token_ids) == 16
    assert world.entries() == {} and world.pending() == {}
    (line,) = world.usage_lines()
    day = str(int(record.finished // 86400))
    counted = {"prompt_tokens": "7", "cached_tokens": "1", "output_tokens": "4"}
    assert line == {"day": day, "tenant": "t", "reason": "stop", **counted}
    world.check_integrity()


def test_the_record_is_kept_for_its_retention(world: World) -> None:
    world.enqueue(world.request("a"), retention=0.05)
    engine = world.engine()
    world.take(engine)
    world.bus.run(world.flush_call(engine, ["a"]))
    key = keys.record(world.model, "a")
    assert world.raw.pttl(key) <= 50
    wait_for(lambda: not world.raw.exists(key), "the end of its retention")
    assert world.bus.run(records.record(world.model, "a")) is None
    assert world.bus.run(records.find(world.model, "ext")) == []
    assert world.bus.run(records.ended_requests(world.model)) == []


def test_one_ended_request_does_not_hide_a_living_one_under_the_same_id(world: World) -> None:
    world.enqueue(world.request("a"), retention=0.001)
    world.enqueue(world.request("b"))
    engine = world.engine()
    world.take(engine, 2)
    world.bus.run(world.flush_call(engine, ["a"]))
    wait_for(lambda: not world.raw.exists(keys.record(world.model, "a")), "the end of its retention")
    assert [view.id for view in world.bus.run(records.find(world.model, "ext"))] == ["b"]
    world.end(engine, "b")
    assert world.raw.pttl(keys.external(world.model, "ext")) > 0


def test_a_zombie_changes_and_publishes_nothing(world: World) -> None:
    world.enqueue(world.request("a"))
    zombie = world.engine()
    world.take(zombie)
    replacement = world.replace(zombie)
    assert replacement.slot == zombie.slot
    with Listener(world) as listener:
        with pytest.raises(Fenced):
            world.bus.run(world.flush_call(zombie, ["a"], messages=[(CLIENT, b"ghost")]))
        world.bus.run(world.flush_call(replacement, messages=[(CLIENT, outputs(replacement, 1))]))
        listener.wait_for(1)
    assert listener.raw == [outputs(replacement, 1)]
    assert world.record("a").state == "queued"
    assert journal(world, zombie) == []
    world.check_integrity()


def test_an_engine_ends_only_what_is_its_own(world: World) -> None:
    world.enqueue(world.request("a"), world.request("b"), world.request("c"))
    first, second = world.engine(), world.engine()
    world.take(first)
    world.take(second)
    assert (
        world.bus.run(world.flush_call(second, ["a", "b", "c", "nobody"], started=[("a", {"scheduled": "1"})])).outcome == FLUSHED
    )
    assert [world.record(name).state for name in "abc"] == ["running", "ended", "queued"]
    assert world.record("a").scheduled == 0.0
    world.check_integrity()


def test_replies_go_to_their_channels(world: World) -> None:
    engine = world.engine()
    reply = ControlReply("token", num_tokens=3)
    with Listener(world) as listener:
        world.bus.run(world.flush_call(engine, notices=[(keys.client_channel(CLIENT), encode(reply))]))
        assert listener.wait_for(1) == [reply]


def test_a_flush_behind_a_hole_does_nothing_but_say_what_redis_has(world: World) -> None:
    engine = world.running("a")
    world.bus.run(world.flush_call(engine))
    lost = world.flush_call(engine, messages=[(CLIENT, b"lost")])
    behind = world.flush_call(engine, ["a"], messages=[(CLIENT, b"behind")])
    for _ in range(2):
        assert world.bus.run(behind) == (GAP, 1)
    assert (world.record("a").state, journal(world, engine)) == ("running", [])
    assert [world.bus.run(each) for each in (lost, behind, lost)] == [(FLUSHED, 2), (FLUSHED, 3), (REPEATED, 3)]
    assert [entry for entry, _ in journal(world, engine)] == ["2-0", "3-0"]
    world.check_integrity()


def test_a_kept_flush_becomes_the_next_one_behind_all_that_redis_has(world: World) -> None:
    """The flushes between were before those that the engine keeps, and are lost for good."""
    engine = world.running("a")
    for _ in range(3):
        world.bus.run(world.flush_call(engine))
    kept = world.flush_call(engine, ["a"], messages=[(CLIENT, b"kept")])
    world.raw.delete(keys.progress(world.model, engine.slot))  # the whole progress is lost
    assert world.bus.run(kept) == (GAP, 0)
    assert world.bus.run(journals.flush_behind(kept, 0)) == (FLUSHED, 4)
    assert world.bus.run(world.flush_call(engine)) == (FLUSHED, 5)
    assert world.record("a").state == "ended"
    world.check_integrity()


def test_notices_are_not_journaled(world: World) -> None:
    engine = world.engine()
    with Listener(world) as listener:
        world.bus.run(world.flush_call(engine, notices=[(keys.client_channel(CLIENT), outputs(engine, 1))]))
        listener.wait_for(1)
    assert journal(world, engine) == []


def test_an_end_takes_the_request_out_of_all_lists(world: World) -> None:
    engine = world.running("a")
    world.checkpoint(engine, "a")
    world.finish("a", choice=0)
    world.end(engine, "a")
    assert not world.raw.exists(keys.output(world.model, "a"))
    world.check_integrity()


def test_without_memory_engines_stay_alive_and_requests_can_end(world: World) -> None:
    for name in ("a", "b"):
        world.enqueue(world.request(name))
    engine = world.engine()
    world.take(engine, 1)
    world.raw.config_set("maxmemory", 1)
    try:
        info = world.bus.run(leases.engines(world.model))[0]
        world.bus.run(leases.beat(world.model, engine.slot, engine.incarnation, info))
        assert world.bus.run(transitions.finish(world.model, "b", Abort("b"))).state == "queued"
        assert world.checkpoint(engine, "a") == 1
        assert world.take_over(engine, sure=True) == TakenOver(1, 0)
    finally:
        world.raw.config_set("maxmemory", 0)
    assert (world.record("a").state, world.record("b").reason) == ("queued", "abort")
    world.check_integrity()


def test_without_memory_admitted_requests_continue_and_end(world: World) -> None:
    for name in ("a", "b"):
        world.enqueue(world.request(name))
    engine = world.engine()
    world.raw.config_set("maxmemory", 1)
    try:
        with pytest.raises(BusUnavailable) as refusal:
            world.enqueue(world.request("c"), limits=AdmissionLimits(require_engine=False, memory_share=0))
        assert refusal.value.trouble == Trouble.MEMORY
        assert world.take(engine) == ["a"]
        assert world.bus.run(world.flush_call(engine, ["a"], messages=[(CLIENT, outputs(engine, 1))])).outcome == FLUSHED
    finally:
        world.raw.config_set("maxmemory", 0)
    assert (world.record("a").state, world.record("b").state) == ("ended", "queued")
    assert len(journal(world, engine)) == 1
    world.check_integrity()


def test_one_flush_ends_a_thousand_requests(world: World) -> None:
    engine = world.engine()
    for _ in range(4):
        world.enqueue(*(world.request() for _ in range(256)))
    world.take(engine, 1024)
    assert len(engine.running) == 1024
    world.end(engine, *engine.running)
    assert world.bus.run(queue_depth(world.model)) == QueueDepth(0, 0, 0, 0, 0)
    world.check_integrity()


def test_where_the_progress_is_gone_the_journal_knows_the_last_flush(world: World) -> None:
    engine = world.running("a")
    for payload in (b"1", b"2"):
        assert world.bus.run(world.flush_call(engine, messages=[("api-1", payload)])).outcome == FLUSHED
    world.raw.delete(keys.progress(world.model, engine.slot))
    assert world.bus.run(world.flush_call(engine, messages=[("api-1", b"3")])) == (FLUSHED, 3)
    world.end(engine, "a")
    world.check_integrity()
