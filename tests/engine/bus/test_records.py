"""Records, listings, control streams and tokenizers, as their readers see them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from engine.bus import control, keys, leases, records
from engine.bus.control import ControlBatch
from engine.bus.enqueue import Refused
from engine.bus.queue_depth import QueueDepth, queue_depth
from engine.bus.records import FIELDS, RecordView, parse_record
from engine.bus.tokenizers import get_tokenizer, put_tokenizer
from engine.protocol import Abort, Lack, Replay, TokenizerBundle, Utility
from tests.engine.bus.ledger_world import World


@pytest.fixture
def world(redis_url: str) -> Iterator[World]:
    with World(redis_url) as world:
        yield world


def test_listings_are_bounded_and_newest_first(world: World) -> None:
    for number in range(6):
        world.enqueue(world.request(f"q{number}"))
    engine = world.engine()
    world.take(engine, 4)
    world.end(engine, "q2")
    world.end(engine, "q0")
    assert [view.id for view in world.bus.run(records.live_requests(world.model))] == ["q5", "q4", "q3", "q1"]
    assert [view.id for view in world.bus.run(records.live_requests(world.model, limit=2))] == ["q5", "q4"]
    assert [view.id for view in world.bus.run(records.ended_requests(world.model))] == ["q0", "q2"]
    assert [view.state for view in world.bus.run(records.live_requests(world.model))] == ["queued", "queued", "waiting", "waiting"]
    assert world.bus.run(records.live_requests("nobody")) == []


def test_a_tenant_finds_its_own_behind_any_number_of_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PAGE", 4)
    for number in range(3):
        world.enqueue(world.request(f"mine{number}", tenant="me"))
    for number in range(9):
        world.enqueue(world.request(f"other{number}", tenant="other"))
    assert [view.id for view in world.bus.run(records.live_requests(world.model, 2, "me"))] == ["mine2", "mine1"]
    assert [view.id for view in world.bus.run(records.live_requests(world.model, 100, "me"))] == ["mine2", "mine1", "mine0"]
    assert [view.id for view in world.bus.run(records.live_requests(world.model, 5))] == [f"other{n}" for n in (8, 7, 6, 5, 4)]
    assert world.bus.run(records.live_requests(world.model, 100, "nobody")) == []
    assert len(world.bus.run(records.live_requests(world.model))) == 12


def test_a_record_is_found_by_the_clients_id_and_by_the_internal_one(world: World) -> None:
    world.enqueue(world.request("chat-1-aaaa"), external_id="chat-1")
    world.enqueue(world.request("chat-1-bbbb"), external_id="chat-1")
    assert [view.id for view in world.bus.run(records.find(world.model, "chat-1"))] == ["chat-1-bbbb", "chat-1-aaaa"]
    assert [view.id for view in world.bus.run(records.find(world.model, "chat-1-aaaa"))] == ["chat-1-aaaa"]
    assert world.bus.run(records.find(world.model, "chat-2")) == []


def test_look_up_finds_a_request_once_by_any_of_its_ids(world: World) -> None:
    world.enqueue(world.request("a-1111"), external_id="a")
    world.enqueue(world.request("cmpl-a-2222"), external_id="cmpl-a")
    models = ["no such model", world.model]
    for request_id, expected in (
        ("cmpl-a", {"a-1111", "cmpl-a-2222"}),
        ("a", {"a-1111"}),
        ("chatcmpl-a-1111", {"a-1111"}),
        ("b", set()),
    ):
        found = world.bus.run(records.look_up(models, request_id))
        assert [each.model for each in found] == [world.model] * len(expected)
        assert {each.record.id for each in found} == expected
        assert [each.record.enqueued for each in found] == sorted((each.record.enqueued for each in found), reverse=True)


def test_a_new_record_has_neither_prompt_nor_later_times(world: World) -> None:
    world.enqueue(world.request("a", tokens=1000))
    view = world.record("a")
    assert (view.received, view.first_token, view.finished, view.output_tokens) == (0.0, 0.0, 0.0, 0)
    assert view.times.enqueued == view.enqueued
    assert world.raw.memory_usage(keys.record(world.model, "a")) < 2000, "4000 bytes of prompt"
    assert world.bus.run(records.stored_output(world.model, "a")) is None


def test_a_newer_versions_fields_are_left_aside() -> None:
    assert parse_record({"id": b"a", "state": b"queued", "colour": b"blue", "priority": None}) == RecordView("a", state="queued")
    assert parse_record({}) is None
    assert {"id", "state", "engine", "preemptions"} <= set(FIELDS)


def test_commands_are_read_once_and_in_order(world: World) -> None:
    engine = world.engine()
    place = (world.model, engine.slot, engine.incarnation)
    sent = [Abort("a", reply_to="x", token="1"), Replay("api-1", [Lack("b", 3, [(0, 7)])]), Utility("drain", [1, "x"])]
    for command in sent:
        world.bus.run(control.control(*place, command))
    first = world.bus.run(control.read_control(*place, count=2))
    second = world.bus.run(control.read_control(*place, first.last_id))
    assert first.commands + second.commands == sent
    assert world.bus.run(control.read_control(*place, second.last_id)) == ControlBatch(second.last_id, [])


def test_commands_to_another_incarnation_or_of_another_version_are_left_aside(world: World) -> None:
    engine = world.engine()
    world.bus.run(control.control(world.model, engine.slot, engine.incarnation - 1, Abort("old")))
    stream = keys.control(world.model, engine.slot)
    world.raw.xadd(stream, {"incarnation": engine.incarnation, "command": msgspec.msgpack.encode([99, "news"])})
    world.bus.run(control.control(world.model, engine.slot, engine.incarnation, Abort("mine")))
    batch = world.bus.run(control.read_control(world.model, engine.slot, engine.incarnation))
    assert batch.commands == [Abort("mine")]
    assert batch.last_id == world.raw.xinfo_stream(stream)["last-generated-id"].decode()
    assert world.raw.pttl(stream) > 0


def test_records_tell_requests_that_wait_in_an_engine_from_running_ones(world: World) -> None:
    """By the engine's last word, which may be older than what the record says, or than the request."""
    engine = world.engine()
    for name in ("in redis", "just taken", "preempted", "begun since", "waits", "runs"):
        world.enqueue(world.request(name, priority=1 if name == "in redis" else 0))
    world.take(engine, 5)
    (info,) = world.bus.run(leases.engines(world.model))
    info.progress, info.waiting = {"runs": 5}, {"preempted": 3, "begun since": 0, "waits": 0}
    world.bus.run(leases.beat(world.model, engine.slot, engine.incarnation, info))
    begun = {"scheduled": "1.0", "first_token": "2.0"}
    world.bus.run(world.flush_call(engine, started=[(name, begun) for name in ("preempted", "begun since", "runs")]))
    listed = {view.id: (view.state, view.output_tokens) for view in world.bus.run(records.live_requests(world.model))}
    assert listed == {
        "in redis": ("queued", 0),
        "just taken": ("waiting", 0),
        "waits": ("waiting", 0),
        "preempted": ("waiting", 3),
        "begun since": ("running", 0),
        "runs": ("running", 5),
    }
    assert [view.state for view in world.bus.run(records.find(world.model, "waits"))] == ["waiting"]


def test_a_tokenizer_is_found_by_its_hash(world: World) -> None:
    bundle = TokenizerBundle("{...}", "{{ messages }}", "<s>", "</s>", [2], {"temperature": 0.6})
    world.bus.run(put_tokenizer(world.model, "hash", bundle))
    assert world.bus.run(get_tokenizer(world.model, "hash")) == bundle
    assert world.bus.run(get_tokenizer(world.model, "other")) is None


def test_queue_depth_counts_requests_choices_and_prompt_tokens(world: World) -> None:
    world.enqueue(world.request(tokens=5, n=2), world.request(tokens=7), world.request(tokens=11))
    assert world.bus.run(queue_depth(world.model)) == QueueDepth(3, 4, 23, live=3, live_choices=4)
    world.take(world.engine())
    assert world.bus.run(queue_depth(world.model)) == QueueDepth(2, 2, 18, live=3, live_choices=4)


def test_a_refusal_names_the_measured_value_and_the_limit() -> None:
    said = [str(Refused(reason, 9, 8, "r")) for reason in ("max_num_queued_reqs", "max_num_queued_tokens", "memory")]
    assert all("9" in text and "8" in text for text in said)
    assert all("r" in str(Refused(reason, request_id="r")) for reason in ("aborted", "duplicate", "no_engine"))
