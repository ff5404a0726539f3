"""Repairs of many streams at once: few commands, bounded messages, and a heartbeat that nothing delays."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest
import redis

from engine.bus import keys, leases
from engine.bus.call import Call
from engine.client import repairs
from engine.client.client import AsyncClient
from engine.client.repairs import Repairs
from engine.client.request_stream import RequestStream
from engine.protocol import ClientMessage, EngineCoreOutputs, Replay, decode_control, encode
from engine.runtime import replay
from tests.engine.conftest import MODEL, RunningEngine
from tests.engine.following import Follower
from tests.engine.runtime.null_requests import add, expected, make_request, settled
from tests.waiting import wait_for_async

StartEngine = Callable[..., RunningEngine]


def asked(redis_url: str, engine: RunningEngine) -> Counter[int]:
    """How often the engine was asked for each stream's output, by handle."""
    counts: Counter[int] = Counter()
    with redis.Redis.from_url(redis_url) as wire:
        for _, fields in wire.xrange(keys.control(MODEL, engine.info.slot)):
            command = decode_control(fields[b"command"])
            if isinstance(command, Replay):
                counts.update(lack.handle for lack in command.lacks)
    return counts


def heard_by(client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> list[EngineCoreOutputs]:
    """The answers to repairs that come from now on."""
    taken, heard = client._listener.take, list[EngineCoreOutputs]()

    def take(message: ClientMessage) -> None:
        if isinstance(message, EngineCoreOutputs) and (message.replayed or message.cut_short or message.not_held):
            heard.append(message)
        taken(message)

    monkeypatch.setattr(client._listener, "take", take)
    return heard


async def test_one_lost_message_costs_each_of_its_streams_one_repair(
    redis_url: str, start_engine: StartEngine, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_NULL_RUNNER", "step_seconds=0.01")
    monkeypatch.setattr(Repairs, "_find_silent", lambda repairs, now: None)  # nor are there on a busy machine
    engine = start_engine(num_blocks=5121, max_num_seqs=512, max_num_batched_tokens=2048)
    requests = [make_request(client, prompt=3, max_tokens=120) for _ in range(512)]
    taken, lost_at = client._listener.take, list[float]()

    def lossy(message: ClientMessage) -> None:
        if not lost_at and isinstance(message, EngineCoreOutputs) and len(message.handles) == 512 * 8:
            lost_at.append(time.monotonic())
        else:
            taken(message)

    monkeypatch.setattr(client._listener, "take", lossy)
    followers = await add(client, *requests)
    async with asyncio.timeout(30):
        await wait_for_async(lambda: lost_at, "a step of all requests")
        counts = [follower.num_tokens + 2 for follower in followers]
        await asyncio.gather(*map(Follower.has_tokens, followers, counts))
        healed = time.monotonic() - lost_at[0]
        results = await asyncio.gather(*map(Follower.whole, followers))
    assert healed < 1.0
    assert [tokens for tokens, _ in results] == [[expected(request, prompt=3)] for request in requests]
    assert set(asked(redis_url, engine).values()) == {1}
    await settled(engine)


async def test_looks_for_many_queued_streams_do_not_delay_the_heartbeat(
    redis_url: str, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them fall silent at once."""
    beats: list[float] = []
    beat_api = leases.beat_api

    def beat(name: str) -> Call[None]:
        beats.append(time.monotonic())
        return beat_api(name)

    monkeypatch.setattr(leases, "beat_api", beat)
    requests = [make_request(client) for _ in range(20_000)]
    with redis.Redis.from_url(redis_url) as wire, wire.pipeline(transaction=False) as pipeline:
        for request in requests:
            pipeline.hset(keys.record(MODEL, request.request_id), mapping={"id": request.request_id, "state": "queued"})
        await asyncio.to_thread(pipeline.execute)
    streams = [RequestStream(request, MODEL, Follower(), client._finish, client._forget) for request in requests]
    beats[:] = [time.monotonic()]
    for stream in streams:
        stream.enqueued = True
        client._streams[stream.handle] = stream
    await wait_for_async(lambda: all(stream.next_look for stream in streams), "a look for each stream", pause=0.05)
    beats.append(time.monotonic())
    assert max(later - earlier for earlier, later in pairwise(beats)) < leases.API_TTL / 3
    assert client.num_streams == len(streams)
    client._streams.clear()


async def test_a_look_for_thousands_of_choices_does_not_end_the_engine(
    redis_url: str, start_engine: StartEngine, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 5000
    engine = start_engine(num_blocks=2049, max_num_seqs=512, max_num_batched_tokens=2048)
    answers = heard_by(client, monkeypatch)
    request = make_request(client, n=n, max_tokens=3)
    (follower,) = await add(client, request)
    async with asyncio.timeout(60):
        await follower.has_tokens(n)
        client._repairs.note_gaps([request.handle])
        tokens, _ = await follower.whole(n)
    assert tokens == [expected(request, choice) for choice in range(n)]
    assert engine.error is None and len(answers) == 1
    await settled(engine)


async def test_a_replay_to_another_handle_comes_with_all_logprobs_in_bounded_messages(
    slow_engine: RunningEngine, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "MESSAGE_BYTES", 2000)
    request = make_request(client, prompt=100, n=2, max_tokens=400, logprobs=3, prompt_logprobs=2)
    (first,) = await add(client, request)
    await first.has_tokens(100)
    second = Follower()
    elsewhere = msgspec.structs.replace(request, handle=7000)
    client._streams[7000] = RequestStream(elsewhere, MODEL, second, client._finish, client._forget)
    answers = heard_by(client, monkeypatch)
    client._repairs.note_gaps([7000])
    async with asyncio.timeout(30):
        await second.has_tokens(100)
    first.abort()
    for choice in range(2):
        assert second.tokens[choice] == expected(request, choice, prompt=100)[: len(second.tokens[choice])]
    assert len(second.logprobs) == second.num_tokens
    assert sum(len(part.ranks) // 4 for part in second.prompt_logprobs) == 99
    assert len(answers) > 3 and max(len(encode(message)) for message in answers) < 6000
    del client._streams[7000]
    await settled(slow_engine)


async def test_a_request_that_its_engine_does_not_hold_is_looked_for_again_at_rest(
    redis_url: str, engine: RunningEngine, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record names the engine until somebody puts it right."""
    request = make_request(client)
    record = keys.record(MODEL, request.request_id)
    follower = Follower()
    stream = RequestStream(request, MODEL, follower, client._finish, client._forget)
    stream.enqueued = True
    answers = heard_by(client, monkeypatch)
    with redis.Redis.from_url(redis_url) as wire:
        fields = {"id": request.request_id, "engine": engine.info.slot, "incarnation": engine.info.incarnation}
        wire.hset(record, mapping=fields | {"state": "running"})
        client._streams[request.handle] = stream
        async with asyncio.timeout(20):
            await wait_for_async(lambda: len(answers) == 2, "two answers")
            wire.hset(record, mapping={"state": "ended", "reason": "error", "error": "put right"})
            _, (end,) = await follower.whole()
    assert all(answer.not_held == [request.handle] for answer in answers)
    assert end.error == "put right" and asked(redis_url, engine)[request.handle] <= 3


async def test_repairs_wait_for_answers_before_they_ask_for_more(
    redis_url: str, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else answers for this subscriber would pile up in Redis. This engine never answers."""
    monkeypatch.setattr(repairs, "PAGE", 4)
    monkeypatch.setattr(repairs, "MOST_ASKED", 8)
    with redis.Redis.from_url(redis_url) as wire:
        for _ in range(20):
            request = make_request(client)
            fields = {"id": request.request_id, "state": "running", "engine": "0", "incarnation": 5}
            wire.hset(keys.record(MODEL, request.request_id), mapping=fields)
            client._streams[request.handle] = RequestStream(request, MODEL, Follower(), client._finish, client._forget)

        def commands() -> int:
            return int(wire.xlen(keys.control(MODEL, "0")))

        await wait_for_async(lambda: commands() == 2, "two pages", seconds=repairs.ANSWER_SECONDS)
        client._repairs.note_gaps(client._streams)
        await asyncio.sleep(0)
        assert commands() == 2
        started = time.monotonic()
        await wait_for_async(lambda: commands() > 2, "what is asked for once the answers count as lost")
        assert time.monotonic() - started > repairs.ANSWER_SECONDS / 2
    client._streams.clear()
