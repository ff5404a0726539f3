"""Overload, deadlines and places in the queue, through real processes: an engine of two seats, whose steps take 20 ms."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import NULL_ENGINE
from tests.api.live_server import LiveServer, sse_events

ALICE, BOB = {"Authorization": "Bearer key-a"}, {"Authorization": "Bearer key-b"}
SEATS = 2
LONG = {"prompt": "x", "max_tokens": 1500}  # runs for 30 s


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[LiveServer]:
    keys = ("--api-key", "alice=key-a", "--api-key", "bob=key-b", "--tenant-weight", "bob=2")
    limits = ("--priority-tenant", "bob", "--max-num-queued-reqs", "12", "--sse-keep-alive-interval", "0.2")
    with LiveServer(
        smollm2_gguf, (*NULL_ENGINE, "--max-num-seqs", str(SEATS)), (*keys, *limits), null="step_seconds=0.02"
    ) as server:
        yield server


class Fill:
    """A request of alice's with so many prompts, for as long as it is entered."""

    def __init__(self, http: httpx.AsyncClient, prompts: int) -> None:
        self._http, self._prompts = http, prompts

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._http.post("/v1/completions", json={**LONG, "prompt": ["x"] * self._prompts}))
        await self._until(self._prompts)

    async def __aexit__(self, *exception: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._until(0)
        async with asyncio.timeout(5):  # the API server refuses by numbers that are half a second old
            while (await post(self._http, ALICE)).status_code != 200:
                await asyncio.sleep(0.02)

    async def _until(self, count: int) -> None:
        """So many requests live, and as many of them run as the engine has seats for: further ones wait."""
        async with asyncio.timeout(20):
            while True:
                states = [each["state"] for each in (await self._http.get("/v1/requests")).json()["data"]]
                if len(states) == count and states.count("running") >= min(SEATS, count):
                    return
                await asyncio.sleep(0.02)


async def post(
    http: httpx.AsyncClient, who: dict[str, str], headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    return await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, **fields}, headers={**who, **(headers or {})})


@pytest.fixture
async def http(server: LiveServer) -> Any:
    async with httpx.AsyncClient(base_url=server.url, headers=ALICE, timeout=60) as client:
        yield client


async def test_a_tenant_over_its_share_gets_a_429_and_another_one_its_share(http: httpx.AsyncClient) -> None:
    async with Fill(http, 12):
        full = await post(http, ALICE)
        assert (full.status_code, full.json()["error"]["type"]) == (503, "ServiceUnavailableError"), "alone it fills the house"
        waiting = asyncio.create_task(post(http, BOB, timeout=20))
        async with asyncio.timeout(10):
            while (refused := await post(http, ALICE)).status_code != 429:
                assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "RateLimitError" and int(refused.headers["retry-after"]) >= 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_refusals_cost_little_once_the_queue_is_known_to_be_full(http: httpx.AsyncClient) -> None:
    """A refusal comes before the prompt is looked at: this one would be a 400."""
    async with Fill(http, 12):
        async with asyncio.timeout(10):
            while (await post(http, ALICE, prompt=[10**9])).status_code != 503:
                pass


async def test_service_tiers_order_the_queue(http: httpx.AsyncClient) -> None:
    """Of two keys that ask for priority, one may have it."""
    asked = {"alices": (ALICE, "priority"), "bobs": (BOB, "priority"), "flex": (BOB, "flex"), "plain": (BOB, None)}
    async with Fill(http, 8):
        posts = [
            asyncio.create_task(post(http, who, request_id=name, service_tier=tier))
            for name, (who, tier) in reversed(asked.items())
        ]
        told: dict[str, Any] = {}
        async with asyncio.timeout(10):
            while len(told) < len(asked):
                answers = {name: await http.get(f"/v1/requests/{name}", headers=who) for name, (who, _) in asked.items()}
                told = {name: answer.json() for name, answer in answers.items() if answer.status_code == 200}
        assert [told[name]["service_tier"] for name in asked] == [None, "priority", "flex", None]
        places = {name: told[name]["queue_position"] for name in asked}
        assert places["bobs"] == 0 and places["flex"] == max(places.values())
        for each in posts:
            each.cancel()
        await asyncio.gather(*posts, return_exceptions=True)


async def test_a_late_request_ends_with_a_504_while_it_waits(http: httpx.AsyncClient) -> None:
    async with Fill(http, 8):
        begun = time.monotonic()
        by_header, by_field = await asyncio.gather(
            post(http, ALICE, {"X-Headrace-Queue-Timeout": "0.3"}, timeout=9), post(http, BOB, queue_timeout=0.3)
        )
        assert time.monotonic() - begun < 3
        for late in (by_header, by_field):
            assert late.status_code == 504
            assert late.json()["error"]["message"] == "The request's deadline passed while it waited for an engine."


async def test_a_late_request_ends_in_mid_stream(http: httpx.AsyncClient) -> None:
    body = {**LONG, "stream": True, "timeout": 0.5}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        events = sse_events([line async for line in answer.aiter_lines()])
    assert len(events) > 5 and events[-1] == "[DONE]"
    error = events[-2]["error"]
    assert (error["code"], error["type"]) == (504, "DeadlineExceededError")
    record = (await http.get(f"/v1/requests/{answer.headers['x-headrace-request-id']}")).json()
    async with asyncio.timeout(5):
        while record["state"] != "ended":
            record = (await http.get(f"/v1/requests/{record['id']}")).json()
    assert (record["finish_reason"], record["error"]) == ("error", error["message"])


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "1e9"])
async def test_a_time_limit_is_a_number_of_seconds(http: httpx.AsyncClient, value: str) -> None:
    refused = await post(http, ALICE, {"X-Headrace-Timeout": value})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "X-Headrace-Timeout"


async def test_an_answer_says_where_its_request_stood(http: httpx.AsyncClient) -> None:
    assert (await post(http, ALICE)).headers["x-headrace-queue-position"] == "0"
    async with Fill(http, 8):
        async with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            assert int(answer.headers["x-headrace-queue-position"]) >= 1
            record = (await http.get(f"/v1/requests/{answer.headers['x-headrace-request-id']}")).json()
            assert record["queue_position"] >= 1
            async with asyncio.timeout(10):
                assert (await anext(answer.aiter_lines())).startswith(": queue position ")


async def test_a_flood_is_answered_or_refused_and_another_tenant_gets_through(http: httpx.AsyncClient) -> None:
    """`python -m benchmarks.overload` measures it for longer."""
    stop = asyncio.Event()

    async def flood() -> list[int]:
        statuses = []
        while not stop.is_set():
            statuses.append((await post(http, ALICE, max_tokens=8)).status_code)
        return statuses

    floods = [asyncio.create_task(flood()) for _ in range(30)]
    async with asyncio.timeout(30):
        calm = [(await post(http, BOB, max_tokens=8)).status_code for _ in range(6)]
        stop.set()
        statuses = {status for each in await asyncio.gather(*floods) for status in each}
    assert calm == [200] * 6
    assert 200 in statuses and statuses & {429, 503} and statuses <= {200, 429, 503}
