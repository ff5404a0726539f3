"""Requests to an engine with the null model: made, sent, and what must come of them."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from engine.bus import records
from engine.bus.enqueue import AdmissionLimits
from engine.client.client import AsyncClient
from engine.protocol import (
    PROTOCOL_VERSION,
    EngineCoreRequest,
    RequestFacts,
    encode_column,
)
from gpu.plan import SamplingParams, child_seed
from gpu.stand_in.null import null_tokens
from tests.engine.conftest import MODEL, RunningEngine
from tests.engine.following import Follower
from tests.waiting import wait_for_async

NO_LIMITS = AdmissionLimits()


def make_request(client: AsyncClient, name: str = "r", prompt: int = 20, **sampling: object) -> EngineCoreRequest:
    handle = client.next_handle()
    params = {"max_tokens": 10, "seed": handle, "ignore_eos": True, **sampling}
    return EngineCoreRequest(
        version=PROTOCOL_VERSION,
        request_id=f"{name}-{handle:08x}",
        prompt_token_ids=encode_column(np.arange(300, 300 + prompt)),
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
        client=client.incarnation,
        handle=handle,
    )


async def add(
    client: AsyncClient,
    *requests: EngineCoreRequest,
    external_id: str = "mine",
    stop: dict[int, int] | None = None,
    model: str = MODEL,
    limits: AdmissionLimits = NO_LIMITS,
) -> list[Follower]:
    followers = [Follower(stop or {}) for _ in requests]
    facts = RequestFacts(external_id, retention=600)
    streams = await client.add(model, [replace(request, facts=facts) for request in requests], followers, limits)
    for follower, stream in zip(followers, streams, strict=True):
        follower.stream = stream
    return followers


async def add_long(client: AsyncClient, prompt: int = 20) -> Follower:
    """A request for 450 tokens, of which the first has come."""
    (stream,) = await add(client, make_request(client, prompt=prompt, max_tokens=450))
    await stream.has_tokens()
    return stream


def expected(request: EngineCoreRequest, choice: int = 0, prompt: int = 20) -> list[int]:
    count = request.sampling.max_tokens
    seeds = np.full(count, child_seed(request.sampling.seed, choice), np.uint64)
    return null_tokens(seeds, np.arange(prompt, prompt + count, dtype=np.uint64), 256, 49152).tolist()


async def settled(engine: RunningEngine) -> None:
    """Wait until the engine holds nothing, then prove it."""

    def empty() -> bool:
        return not (len(engine.loop.held) or engine.core.has_work or engine.bus.run(records.live_requests(MODEL)))

    await wait_for_async(empty, "the end of all requests")
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == engine.core.limits.num_blocks - 1
