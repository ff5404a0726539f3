"""Clients that go away: their requests end in the engine, whatever they were doing."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import httpx
import pytest

from tests.api.conftest import KEYS
from tests.api.live_server import LiveServer
from tests.api.request_states import until_idle, until_live, until_metric, until_none_lives, until_state

ALICE = {"Authorization": f"Bearer {KEYS['alice']}"}
ABORT_SECONDS = 5.0  # far more than the two steps that it takes; the machine may be busy


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
async def test_a_client_that_leaves_ends_its_running_request(slow_server: LiveServer, stream: bool, endpoint: str) -> None:
    request_id = f"leaves-{stream}-{endpoint[4]}"
    prompt = {"prompt": "x"} if endpoint == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    body = {**prompt, "max_tokens": 1500, "stream": stream, "n": 2}
    async with httpx.AsyncClient(base_url=slow_server.url, headers=ALICE, timeout=60) as http:
        async with httpx.AsyncClient(base_url=slow_server.url, headers=ALICE, timeout=60) as leaving:
            work = asyncio.create_task(leaving.post(endpoint, json=body, headers={"X-Request-Id": request_id}))
            await until_state(http, request_id, "running")
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        record = await until_state(http, request_id, "ended", seconds=ABORT_SECONDS)
    assert record["finish_reason"] == "abort"
    assert isinstance(record["output_tokens"], int)
    assert record["output_tokens"] < 2 * 1500


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_closes_its_side_has_left(slow_server: LiveServer, stream: bool) -> None:
    """Its kernel says the same as for a client that has closed both sides. nginx, uvicorn and Go's net/http take it so, too."""
    url, request_id = urlsplit(slow_server.url), f"half-{stream}"
    body = json.dumps({"prompt": "x", "max_tokens": 1500, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: {request_id}\r\nAuthorization: {ALICE['Authorization']}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    async with httpx.AsyncClient(base_url=slow_server.url, headers=ALICE, timeout=60) as http:
        writer.write(head.encode() + body)
        await until_state(http, request_id, "running")
        writer.write_eof()
        record = await until_state(http, request_id, "ended", seconds=ABORT_SECONDS)
    assert record["finish_reason"] == "abort"
    await reader.read()
    writer.close()


async def test_clients_that_leave_at_any_moment_leave_no_request(slow_server: LiveServer) -> None:
    """Clients that leave at every moment, from before the answer to the middle of it."""
    async with httpx.AsyncClient(base_url=slow_server.url, headers=ALICE, timeout=60) as http:
        for round in range(12):
            async with httpx.AsyncClient(base_url=slow_server.url, headers=ALICE, timeout=60) as leaving:
                body = {"prompt": "x", "max_tokens": 1500, "stream": round % 2 == 0}
                works = [asyncio.create_task(leaving.post("/v1/completions", json=body)) for _ in range(6)]
                await asyncio.sleep(0.004 * round)
                for work in works:
                    work.cancel()
                await asyncio.gather(*works, return_exceptions=True)
        await until_idle(http)
        metrics = await until_metric(http, 'num_requests_running{engine="0",model_name="tiny"} 0.0')
        assert 'kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0' in metrics
        assert 'request_success_total{engine="0",finished_reason="abort",model_name="tiny"}' in metrics


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_waiting_request(slow_server: LiveServer, stream: bool) -> None:
    """Nothing is sent to a client whose request waits for a slot: its going is noticed all the same."""
    request_id = f"waits-{stream}"
    async with httpx.AsyncClient(base_url=slow_server.url, headers=ALICE, timeout=60) as http:
        filling = asyncio.create_task(http.post("/v1/completions", json={"prompt": ["fill"] * 8, "max_tokens": 1500}))
        await until_live(http, 7, "running")
        async with httpx.AsyncClient(base_url=slow_server.url, headers=ALICE, timeout=60) as leaving:
            body = {"prompt": "x", "max_tokens": 1500, "stream": stream}
            work = asyncio.create_task(leaving.post("/v1/completions", json=body, headers={"X-Request-Id": request_id}))
            await until_state(http, request_id)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        record = await until_state(http, request_id, "ended", seconds=ABORT_SECONDS)
        assert (record["finish_reason"], record["output_tokens"]) == ("abort", 0)
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)
        await until_none_lives(http)
