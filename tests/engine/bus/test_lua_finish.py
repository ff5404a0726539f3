"""finish.lua: an end before, during and after the run, and what it leaves to whom."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from engine.bus import control, keys, records, transitions
from engine.bus.connection import Bus
from engine.bus.enqueue import Refused
from engine.bus.queue_depth import queue_depth
from engine.bus.transitions import FinishOutcome
from engine.protocol import Abort, ControlCommand, FinishReason, RequestEnded
from tests.engine.bus.ledger_world import Engine, Listener, World
from tests.engine.bus.lossy_proxy import LossyProxy


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world


def commands(world: World, engine: Engine) -> list[ControlCommand]:
    return world.bus.run(control.read_control(world.model, engine.slot, engine.incarnation)).commands


def test_a_queued_request_ends_here_and_its_api_server_is_told(world: World) -> None:
    request = world.request("a", handle=2**53 - 1)
    world.enqueue(request, world.request("b"))
    with Listener(world) as listener:
        outcome = world.finish("a")
        assert listener.wait_for(1) == [RequestEnded("a", 2**53 - 1, FinishReason.ABORT, None)]
    assert outcome.state == "queued"
    assert outcome.record is not None and (outcome.record.state, outcome.record.reason) == ("ended", "abort")
    assert world.queued() == ["b"]
    assert world.take(world.engine(), 5) == ["b"]
    world.check_integrity()


def test_a_queued_request_that_ends_has_no_output_in_any_choice(world: World) -> None:
    world.enqueue(world.request("a", n=3))
    world.bus.run(transitions.finish(world.model, "a", Abort("a", reason=FinishReason.ERROR), "too late"))
    stored = world.bus.run(records.stored_output(world.model, "a"))
    assert stored is not None
    assert [(choice.token_ids, choice.reason, choice.error) for choice in stored.choices] == 3 * [
        (b"", FinishReason.ERROR, "too late")
    ]


def test_tokens_that_were_never_computed_are_not_counted(world: World) -> None:
    world.enqueue(world.request("a", tokens=100))
    world.finish("a")
    (line,) = world.usage_lines()
    assert (line["reason"], line["prompt_tokens"], line["output_tokens"]) == ("abort", "0", "0")


def test_finish_commands_the_engine_of_a_running_request(world: World) -> None:
    engine = world.running("a")
    with world.bus.subscribe(keys.control_channel(world.model, engine.slot)) as bell:
        outcome = world.finish("a", keep=3, reason=FinishReason.STOP, stop_reason="\n\n", reply_to="api-9", token="t")
        assert bell.get(5) is not None
    assert (outcome.state, world.record("a").state) == ("running", "running")
    assert 0 < world.raw.pttl(keys.control(world.model, engine.slot)) <= 600_000
    assert commands(world, engine) == [Abort("a", -1, FinishReason.STOP, 3, "\n\n", "api-9", "t")]
    world.check_integrity()


def test_a_command_is_for_the_incarnation_that_runs_the_request(world: World) -> None:
    world.enqueue(world.request("a"))
    first = world.engine()
    world.take(first)
    world.finish("a")
    second = world.replace(first)
    assert second.slot == first.slot
    assert commands(world, second) == []


def test_an_ended_request_stays_as_it_is(world: World) -> None:
    engine = world.running("a")
    world.end(engine, "a")
    before = world.record("a")
    outcome = world.finish("a")
    assert (outcome.state, outcome.record) == ("ended", before)
    assert commands(world, engine) == []
    world.check_integrity()


def test_an_unknown_id_leaves_a_tombstone(world: World) -> None:
    assert world.finish("a") == FinishOutcome("unknown", None)
    assert isinstance(world.enqueue(world.request("a")), Refused)
    world.check_integrity()


def test_finish_of_one_choice_of_a_queued_request_changes_nothing(world: World) -> None:
    world.enqueue(world.request("several", n=2), world.request("one", n=1))
    assert world.finish("several", choice=1).state == "queued"
    assert world.finish("one", choice=0).state == "queued"
    assert world.queued() == ["several"]
    world.check_integrity()


@pytest.mark.parametrize("taken", [False, True])
def test_a_lost_answer_is_made_up_for(world: World, taken: bool) -> None:
    world.enqueue(world.request("a"))
    engine = world.engine()
    if taken:
        world.take(engine)
    with LossyProxy(world.url) as proxy, Bus(proxy.url) as bus:
        bus.run(queue_depth(world.model))
        proxy.losses = 1
        outcome = bus.run(transitions.finish(world.model, "a", Abort("a")))
        assert proxy.lost == 1
    assert outcome.state == ("running" if taken else "ended")
    assert len(commands(world, engine)) == (2 if taken else 0)
    world.check_integrity()


def test_a_racing_take_and_finish_have_one_winner(world: World) -> None:
    """A request that both want is either ended and never taken, or taken and its taker is told."""
    names = [f"q{number}" for number in range(150)]
    world.enqueue(*(world.request(name) for name in names))
    engine = world.engine()
    states: dict[str, str] = {}

    def finish_all() -> None:
        for name in names:
            states[name] = world.finish(name).state

    thread = threading.Thread(target=finish_all)
    thread.start()
    while thread.is_alive():
        world.take(engine)
    thread.join()
    taken = {name for name, state in states.items() if state == "running"}
    assert taken <= set(engine.running)
    assert {name for name, state in states.items() if state == "queued"} == set(names) - set(engine.running)
    told = [command.request_id for command in commands(world, engine) if isinstance(command, Abort)]
    assert sorted(told) == sorted(taken)
    world.check_integrity()


def orphan(world: World, name: str, n: int = 1) -> Engine:
    """A request whose engine died; the next engine."""
    engine = world.engine()
    world.enqueue(world.request(name, n=n))
    world.take(engine)
    return world.replace(engine)


@pytest.mark.parametrize("choice", [-1, 0])
def test_an_orphan_that_is_aborted_ends_at_once(world: World, choice: int) -> None:
    heir = orphan(world, "a")
    with Listener(world) as listener:
        assert world.finish("a", choice=choice).state == "queued"
        assert isinstance(listener.wait_for(1)[0], RequestEnded)
    assert (world.record("a").state, world.record("a").reason) == ("ended", "abort")
    assert world.take(heir) == []
    world.check_integrity()


@pytest.mark.parametrize(("n", "reason"), [(1, FinishReason.STOP), (2, FinishReason.STOP), (2, FinishReason.ABORT)])
def test_what_ends_a_choice_of_an_orphan_stands_in_its_record(world: World, n: int, reason: FinishReason) -> None:
    """A stop string was found, and the next engine writes the output up to it; or its siblings go on."""
    heir = orphan(world, "a", n)
    for keep in (7, 9):
        assert world.finish("a", choice=0, reason=reason, keep=keep).state == "queued"
    assert world.record("a").state == "queued"
    (taken,) = world.bus.run(world.take_call(heir))
    assert taken.orphan is not None
    assert taken.orphan.orders == (Abort("a", choice=0, reason=reason, keep=7),), "the first one counts"
    world.check_integrity()


def test_a_command_that_an_engine_did_not_obey_stands_in_the_record_for_the_next(world: World) -> None:
    engine = world.running("a")
    world.finish("a")
    heir = world.replace(engine)
    (taken,) = world.bus.run(world.take_call(heir))
    assert taken.orphan is not None and taken.orphan.orders == (Abort("a"),)
