"""Directory: what an API server knows of models, engines and the room that Redis has."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from engine.bus import journals, keys, leases, records
from engine.bus.connection import AsyncBus
from engine.bus.journals import EndedRequest
from engine.bus.records import OUTPUT_DROPPED
from engine.client.discovery import Directory
from engine.protocol import PROTOCOL_VERSION, FinishReason, RequestTimes, StoredChoice, StoredOutput, encode
from tests.engine.bus.ledger_world import World, engine_info

BIG = 1 << 20  # bytes of an output


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world
        world.raw.config_set("maxmemory", 0)


def big_end(request_id: str) -> EndedRequest:
    output = StoredOutput([StoredChoice(bytes(BIG), FinishReason.LENGTH)], 0, RequestTimes())
    return EndedRequest(request_id, FinishReason.LENGTH, encode(output), BIG // 4)


@pytest.mark.parametrize("share", [0.9, 1.1], ids=["beyond the share for new requests", "out of memory"])
async def test_old_results_give_way_to_new_requests(world: World, share: float) -> None:
    names = [f"r{number}" for number in range(8)]
    engine = world.engine()
    for name in names:
        world.enqueue(world.request(name))
        world.take(engine)
        number = next(engine.flushes)
        world.bus.run(journals.flush(world.model, engine.slot, engine.incarnation, number - 1, number, ended=[big_end(name)]))
    world.raw.config_set("maxmemory", int(world.raw.info("memory")["used_memory"] / share))
    async with AsyncBus(world.url) as bus:
        directory = Directory(bus)
        await directory.refresh()
        await directory.check_admission()
        assert directory.refusal == ""
    dropped = [name for name in names if world.record(name).output_dropped]
    assert dropped and dropped == names[: len(dropped)], "the oldest go"
    assert len(dropped) < len(names), "no more than must"
    stored = world.bus.run(records.stored_output(world.model, names[0]))
    assert stored is not None and stored.choices[0].error == OUTPUT_DROPPED
    kept = int(world.raw.hget(keys.load(world.model), "kept") or 0)
    assert BIG * (len(names) - len(dropped)) <= kept < BIG * (len(names) - len(dropped)) + 10_000
    world.check_integrity()


async def test_requests_are_written_in_the_newest_version_that_all_engines_read(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def add_engine(*versions: int) -> None:
        world.bus.run(leases.claim_slot(world.model, replace(engine_info(world.model), protocol_versions=list(versions)), 60.0))

    async with AsyncBus(world.url) as bus:
        directory = Directory(bus)
        add_engine(PROTOCOL_VERSION - 1, PROTOCOL_VERSION)
        add_engine(PROTOCOL_VERSION, PROTOCOL_VERSION + 1)
        await directory.refresh()
        assert directory.models[world.model].protocol_version == PROTOCOL_VERSION
        assert not caplog.messages
        add_engine(PROTOCOL_VERSION + 1)
        with caplog.at_level(logging.ERROR):
            for _ in range(2):
                await directory.refresh()
        assert directory.models[world.model].protocol_version is None
    (message,) = caplog.messages
    assert f"engine 2 reads [{PROTOCOL_VERSION + 1}]" in message


async def test_a_models_engines_are_its_own_though_another_serves_its_name(world: World) -> None:
    """Model `a` has the alias `b`, and there is a model `b`."""
    for name, names in (("a", ["a", "b"]), ("b", ["b"])):
        world.bus.run(leases.claim_slot(name, replace(engine_info(name), served_names=names, max_model_len=100 + len(names)), 60.0))
    async with AsyncBus(world.url) as bus:
        directory = Directory(bus)
        await directory.refresh()
    assert directory.models["b"].name == "a", "requests for `b` go to the first"
    assert {name: handle.max_model_len for name, handle in directory.handles.items()} == {"a": 102, "b": 101}
