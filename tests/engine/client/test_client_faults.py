"""No engine, message or record may end the client, because all requests of the API server depend on it."""

from __future__ import annotations

import redis

from engine.bus import keys
from engine.bus.enqueue import AdmissionLimits
from engine.client.client import AsyncClient
from engine.client.request_stream import RequestStream
from engine.protocol import PROTOCOL_VERSION, EngineCoreOutputs, EngineCoreRequest, FinishReason, encode, encode_column
from gpu.plan import SamplingParams
from tests.engine.conftest import MODEL, RunningEngine
from tests.engine.following import Follower


async def generated(client: AsyncClient, request_id: str) -> tuple[EngineCoreRequest, int]:
    """A request that ran to its end, and how many tokens came."""
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    prompt = encode_column([1, 2, 3])
    request = EngineCoreRequest(PROTOCOL_VERSION, request_id, prompt, sampling, client.incarnation, client.next_handle())
    follower = Follower()
    await client.add(MODEL, [request], [follower], AdmissionLimits())
    await follower.whole()
    return request, follower.num_tokens


async def test_nonsensical_messages_do_not_end_the_client(redis_url: str, engine: RunningEngine, client: AsyncClient) -> None:
    one, two = encode_column([1]), encode_column([1, 2])
    lopsided = EngineCoreOutputs("e", 1, 1, handles=two + two, choices=one, offsets=two, token_ids=one)
    with redis.Redis.from_url(redis_url) as wire:
        for payload in (b"", b"\xff\xff", encode(lopsided), encode(EngineCoreOutputs("e", 1, 2, handles=b"odd"))):
            assert wire.publish(keys.client_channel(client.incarnation), payload) == 1
    assert (await generated(client, "r-1"))[1] == 5


async def test_an_unreadable_announcement_hides_its_engine_only(redis_url: str, engine: RunningEngine, client: AsyncClient) -> None:
    with redis.Redis.from_url(redis_url) as wire:
        for model in ("odd", MODEL):
            wire.sadd(keys.models(), model)
            wire.sadd(keys.slots(model), "7")
            wire.set(keys.slot_info(model, "7"), b"\xc1")
    await client.directory.refresh()
    assert [info.slot for info in client.directory.models[MODEL].engines] == [engine.info.slot]
    assert "odd" not in client.directory.models


async def test_an_unreadable_record_ends_its_stream_with_an_error(
    redis_url: str, engine: RunningEngine, client: AsyncClient
) -> None:
    request, _ = await generated(client, "r-1")
    with redis.Redis.from_url(redis_url) as wire:
        wire.hset(keys.record(MODEL, "r-1"), "output", b"\xc1")
    follower = Follower()
    await client._repairs.repair([RequestStream(request, MODEL, follower, client._finish, client._forget)])
    _, (end,) = await follower.whole()
    assert (end.reason, end.error) == (FinishReason.ERROR, "The request's record cannot be read.")
