"""A KV cache that is too small for its requests is told, with what to turn, and not too often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from engine.client.client import AsyncClient
from engine.protocol import EngineStats
from engine.runtime.capacity import Limits
from engine.runtime.kv_pressure import KVPressure
from tests.engine.conftest import RunningEngine
from tests.engine.following import Follower
from tests.engine.runtime.null_requests import add, make_request
from tests.waiting import wait_for_async


def test_a_warning_a_minute_while_requests_are_preempted(caplog: pytest.LogCaptureFixture) -> None:
    pressure = KVPressure(Limits(max_model_len=512, num_blocks=129, max_num_batched_tokens=64, max_num_seqs=16))
    for now, preemptions in ((0.0, 0), (1.0, 3), (1.5, 9), (60.9, 24), (61.0, 24), (500.0, 24)):
        pressure.look(EngineStats(num_running=7, num_waiting=5, num_free_blocks=2, preemptions=preemptions), now)
    first, second = (record.getMessage() for record in caplog.records)
    assert "3 preemptions since the last warning (3 in all), 126 of 128 blocks in use, 7 requests run and 5 wait" in first
    assert "21 preemptions since the last warning (24 in all)" in second
    for option in (
        "--kv-cache-memory-bytes",
        "--gpu-memory-utilization",
        "--max-num-seqs (now 16)",
        "--watermark",
        "docs/kv-pressure.md",
    ):
        assert option in first


async def test_an_engine_that_preempts_says_so(
    start_engine: Callable[..., RunningEngine], client: AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start_engine(num_blocks=33)
    followers = [(await add(client, make_request(client, max_tokens=200)))[0] for _ in range(8)]
    await asyncio.gather(*map(Follower.whole, followers))
    assert engine.core.stats().preemptions
    await wait_for_async(lambda: "the KV cache is too small" in caplog.text, "a warning")
    assert caplog.text.count("the KV cache is too small") == 1
