"""Parts that die or go away: clients hear of it, health says so, and what comes back is used again."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis

from tests.api.conftest import NULL_ENGINE
from tests.api.live_server import LiveServer, sse_events
from tests.api.request_states import until_live, until_status

LONG = {"prompt": "x", "max_tokens": 1500}


@pytest.fixture
def server(smollm2_gguf: Path) -> Iterator[LiveServer]:
    with LiveServer(smollm2_gguf, NULL_ENGINE, null="step_seconds=0.02") as server:
        yield server


async def test_a_killed_engines_requests_wait_for_the_next_and_so_do_new_ones(server: LiveServer) -> None:
    """Health turns, and turns back with a new engine; no client sees an error, streams and whole answers alike."""
    body = {"prompt": "x", "max_tokens": 150, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            whole = asyncio.create_task(http.post("/v1/completions", json=body))
            await until_live(http, 2)
            server.engine.kill()
            server.engine.wait()
            down = await until_status(http, "/health", 503)
            assert down.json()["error"]["message"] == "No live engine for tiny."
            late = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}))
            await until_live(http, 3)
            assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["tiny"]
            assert (await http.get("/live")).status_code == 200
            server.restart_engine()
            events = sse_events([line async for line in lines])
        assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
        for answered in await asyncio.gather(whole, late):
            assert (answered.status_code, answered.json()["choices"][0]["finish_reason"]) == (200, "length")
        await until_status(http, "/health", 200, seconds=60)


async def test_an_api_server_outlives_a_long_hang_of_redis(server: LiveServer) -> None:
    """Redis hangs for longer than heartbeats live. API server and engine stay what they are."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        assert server.redis.process is not None
        server.redis.process.send_signal(signal.SIGSTOP)
        try:
            away = await until_status(http, "/health", 503)
            assert away.json()["error"]["message"] == "Redis is not reachable. Try again later."
            refused = await http.post("/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        finally:
            server.redis.process.send_signal(signal.SIGCONT)
        await until_status(http, "/health", 200)
        assert (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})).status_code == 200


async def test_redis_out_of_memory_refuses_new_requests_and_lets_running_ones_end(server: LiveServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        body = {"prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            await until_live(http, 1)
            with redis.Redis.from_url(server.redis.url) as raw:
                raw.config_set("maxmemory", 1)
                down = await until_status(http, "/ready", 503)
                assert down.json()["error"]["message"] == "Redis is out of memory."
                refused = await http.post("/v1/completions", json={"prompt": "x"})
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert refused.json()["error"]["message"] == "Redis is out of memory. Try again later."
                assert (await http.get("/health")).status_code == 200
                events = sse_events([line async for line in answer.aiter_lines()])  # for longer than a silent server lives
                assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
                raw.config_set("maxmemory", 0)
                await until_status(http, "/ready", 200)
        assert (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})).status_code == 200


async def test_an_api_server_that_starts_before_redis_becomes_ready_with_it(server: LiveServer) -> None:
    """It answers that it is not ready, and is when Redis comes."""
    server.redis.kill()
    _, url = server.start_api()
    async with httpx.AsyncClient(base_url=url) as http:
        await until_status(http, "/live", 200)
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/v1/models")).status_code == 503
    server.redis.start()
    server.restart_engine()
    server.wait_until_healthy(url)
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def test_a_failing_request_ends_alone(smollm2_gguf: Path) -> None:
    with LiveServer(smollm2_gguf, NULL_ENGINE, null="fail_seed=13") as server:
        bad = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "seed": 13})
        assert (bad.status_code, bad.json()["error"]["code"]) == (500, 500)
        body = {"prompt": "x", "seed": 13, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            events = sse_events(list(answer.iter_lines()))
        assert [list(event) for event in events[:-1]] == [["error"]]
        assert events[-1] == "[DONE]"
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "seed": 14}).status_code == 200


def test_an_api_server_that_redis_does_not_let_in_ends(redis_url: str) -> None:
    """A user without the rights that it needs is nothing that waiting would mend."""
    with redis.Redis.from_url(redis_url) as admin:
        admin.execute_command("ACL", "SETUSER", "guest", "on", ">guest", "~*", "+ping", "+time", "+client")
        url = redis_url.replace("redis://", "redis://guest:guest@")
        command = [sys.executable, "-P", "-m", "ops.cli", "api", "--redis-url", url, "--port", "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        admin.execute_command("ACL", "DELUSER", "guest")
    assert done.returncode not in (0, -9) and "permission" in done.stderr.lower()
