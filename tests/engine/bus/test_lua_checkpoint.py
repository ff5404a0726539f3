"""checkpoint.lua: outputs of running requests leave the journal, each for a list of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest

from engine.bus import journals
from engine.bus.journals import StoredPart
from tests.engine.bus.ledger_world import CLIENT, Engine, World


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world


def journal_of(engine: Engine) -> str:
    return f"{engine.slot}:{engine.incarnation}"


def flush(world: World, engine: Engine, times: int = 1) -> None:
    for _ in range(times):
        call = world.flush_call(engine, messages=[(CLIENT, b"journaled")])
        world.bus.run(call)


def stored(world: World, name: str) -> list[StoredPart]:
    (parts,) = world.bus.run(journals.read_checkpoints(world.model, [name]))
    return parts


def test_outputs_are_appended_and_the_journal_is_cut(world: World) -> None:
    engine = world.engine()
    world.enqueue(world.request("a"), world.request("b"))
    world.take(engine, 2)
    flush(world, engine, 5)
    assert world.checkpoint(engine, "a", "b", flushed=3) == 2
    assert len(world.bus.run(journals.read_journal(world.model, journal_of(engine)))) == 2
    assert world.checkpoint(engine, "a") == 1
    assert len(world.bus.run(journals.read_journal(world.model, journal_of(engine)))) == 2, "0: it stays"
    assert stored(world, "a") == [StoredPart(None, b"output of a")] * 2
    assert stored(world, "b") == [StoredPart(None, b"output of b")]
    assert stored(world, "nobody") == []
    world.check_integrity()


def test_a_flush_goes_on_behind_a_cut_journal(world: World) -> None:
    engine = world.engine()
    flush(world, engine, 2)
    world.checkpoint(engine, flushed=2)
    flush(world, engine)
    assert world.bus.run(journals.read_journal(world.model, journal_of(engine))) == [StoredPart(CLIENT, b"journaled")]


def test_a_checkpoint_of_all_earlier_output_replaces_all_other_journals(world: World) -> None:
    engine = world.engine()
    world.enqueue(world.request("a"))
    world.take(engine)
    heir = world.replace(engine)
    (taken,) = world.bus.run(world.take_call(heir))
    assert taken.orphan is not None and taken.orphan.journals == (journal_of(engine), journal_of(heir))
    assert world.checkpoint(heir, "a", remark="adopt") == 1
    last = world.replace(heir)
    (taken,) = world.bus.run(world.take_call(last))
    assert taken.orphan is not None and taken.orphan.journals == (journal_of(heir), journal_of(last))


@pytest.mark.parametrize(("remark", "attempts"), [("", 1), ("adopt", 1), ("well", 0)])
def test_much_output_clears_the_deaths_in_a_row(world: World, remark: Literal["", "adopt", "well"], attempts: int) -> None:
    engine = world.engine()
    world.enqueue(world.request("a"))
    world.take(engine)
    heir = world.replace(engine)
    world.take(heir)
    world.checkpoint(heir, "a", remark=remark)
    assert (world.record("a").attempts, world.record("a").deaths) == (attempts, 1)


def test_only_what_runs_here_is_stored(world: World) -> None:
    world.enqueue(*(world.request(name) for name in ("other's", "ended", "queued")))
    other, engine = world.engine(), world.engine()
    assert world.take(other) == ["other's"]
    assert world.take(engine) == ["ended"]
    world.end(engine, "ended")
    assert world.checkpoint(engine, "other's", "ended", "queued", "nobody") == 0
    assert not world.raw.keys("*:output:*")
    world.check_integrity()
