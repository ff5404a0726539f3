"""Two thousand clients that connect and leave: nothing stays behind, memory included."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import psutil
import pytest

from tests.api.conftest import NULL_ENGINE
from tests.api.live_server import LiveServer
from tests.api.request_states import until_idle, until_metric

CYCLES, WARM_UP = 2000, 500
AT_ONCE = 10
MOST_GROWTH = 10 * 1024 * 1024  # bytes over the cycles behind the warm-up


async def cycle(url: str, number: int) -> None:
    """One client: streaming or not, gone before, during or after its answer."""
    body = {"prompt": "x" * (number % 50 + 1), "max_tokens": 200, "stream": number % 2 == 0, "n": 1 + number % 3}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        work = asyncio.create_task(http.post("/v1/completions", json=body))
        await asyncio.wait({work}, timeout=random.Random(number).uniform(0, 0.1))
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


@pytest.mark.soak
async def test_two_thousand_clients_that_leave_leave_nothing_behind(smollm2_gguf: Path) -> None:
    with LiveServer(smollm2_gguf, (*NULL_ENGINE, "--max-num-seqs", "32"), null="step_seconds=0.005") as server:
        api, engine = psutil.Process(server.api.pid), psutil.Process(server.engine.pid)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            before = (0, 0)
            for start in range(0, CYCLES, AT_ONCE):
                await asyncio.gather(*(cycle(server.url, number) for number in range(start, start + AT_ONCE)))
                if start + AT_ONCE == WARM_UP:
                    await until_idle(http)
                    before = (api.memory_info().rss, engine.memory_info().rss)
            await until_idle(http)
            after = (api.memory_info().rss, engine.memory_info().rss)
            await until_metric(http, 'kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0')
        grown = [late - early for early, late in zip(before, after, strict=True)]
        assert max(grown) < MOST_GROWTH, f"API server and engine grew by {grown} bytes"
        assert len(api.net_connections()) < 50
