"""/v1/requests: the requests that a key may see, and aborts that answer when the request has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import redis

from engine.bus import keys
from tests.api.conftest import KEYS
from tests.api.live_server import LiveServer, sse_events
from tests.api.request_states import until_live, until_none_lives, until_state

Running = tuple[str, asyncio.Task[list[str]]]
LONG = {"prompt": "on and on", "max_tokens": 1500}


def client(server: LiveServer, who: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, headers={"Authorization": f"Bearer {KEYS[who]}"}, timeout=60)


@asynccontextmanager
async def running(
    server: LiveServer, who: str, request_id: str, **fields: Any
) -> AsyncIterator[tuple[str, asyncio.Task[list[str]]]]:
    """A stream of the tenant `who` that has begun: its internal id, and a task that reads it to its end."""
    async with client(server, who) as http:
        body = {**LONG, "stream": True, **fields}
        async with http.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": request_id}) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            first = await anext(lines)

            async def read() -> list[str]:
                return [first, *[line async for line in lines]]

            reading = asyncio.create_task(read())
            yield answer.headers["x-headrace-request-id"], reading
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def listed(server: LiveServer, who: str, **query: str) -> list[dict[str, Any]]:
    async with client(server, who) as http:
        answer = await http.get("/v1/requests", params=query)
        assert answer.status_code == 200
        data: list[dict[str, Any]] = answer.json()["data"]
        return data


async def test_a_tenant_sees_its_own_requests_and_an_admin_all(slow_server: LiveServer) -> None:
    async with running(slow_server, "alice", "a-1") as (alices, _), running(slow_server, "bob", "b-1") as (bobs, _):
        assert [request["id"] for request in await listed(slow_server, "alice")] == [alices]
        assert [request["id"] for request in await listed(slow_server, "bob")] == [bobs]
        assert {alices, bobs} <= {request["id"] for request in await listed(slow_server, "ops")}
        for who, status in (("alice", 200), ("ops", 200), ("bob", 404)):
            async with client(slow_server, who) as http:
                assert (await http.get(f"/v1/requests/{alices}")).status_code == status
        async with client(slow_server, "bob") as http:
            assert (await http.delete(f"/v1/requests/{alices}")).status_code == 404


async def test_a_request_is_shown_with_its_counts_and_times(slow_server: LiveServer) -> None:
    async with running(slow_server, "alice", "told", n=2) as (internal, _), client(slow_server, "alice") as http:
        request = (await http.get("/v1/requests/told")).json()
        assert (request["id"], request["external_id"], request["tenant"], request["model"]) == (internal, "told", "alice", "tiny")
        assert (request["state"], request["endpoint"], request["stream"], request["n"]) == ("running", "/v1/completions", True, 2)
        assert request["times"]["enqueued"] <= request["times"]["scheduled"]
        assert request["times"]["finished"] is None
        assert "on and on" not in str(request)


async def test_the_record_counts_what_the_answer_counts(slow_server: LiveServer) -> None:
    """Three choices that stop strings end, each at a place of its own: the engine is told where, and cuts there."""
    async with client(slow_server, "alice") as http:
        body = {"prompt": "count", "n": 3, "seed": 5, "max_tokens": 1500, "stop": ["er", "an"], "logprobs": 1}
        answer = (await http.post("/v1/completions", json=body, headers={"X-Request-Id": "counted"})).json()
        record = (await http.get("/v1/requests/counted")).json()
    counts = [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"} and len(set(counts)) > 1
    assert record["output_tokens"] == answer["usage"]["completion_tokens"] == sum(counts)
    assert record["finish_reason"] == "stop"


@pytest.mark.parametrize(("method", "suffix"), [("POST", "/cancel"), ("DELETE", "")])
async def test_an_abort_answers_with_the_tokens_made(slow_server: LiveServer, method: str, suffix: str) -> None:
    async with running(slow_server, "alice", f"abort-{method}") as (internal, reading):
        async with client(slow_server, "alice") as http:
            answer = await http.request(method, f"/v1/requests/cmpl-abort-{method}{suffix}")
            told = answer.json()
            assert (answer.status_code, told["id"], told["cancelled"]) == (200, internal, True)
            assert (told["state"], told["finish_reason"]) == ("ended", "abort")
            assert 1 <= told["output_tokens"] < 1500
            again = (await http.request(method, f"/v1/requests/{internal}{suffix}")).json()
            assert (again["cancelled"], again["output_tokens"]) == (False, told["output_tokens"])
        events = sse_events(await reading)
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "abort"


async def test_a_whole_answer_that_is_aborted_has_the_text_so_far(slow_server: LiveServer) -> None:
    async with client(slow_server, "alice") as http, client(slow_server, "ops") as ops:
        headers = {"X-Request-Id": "whole"}
        work = asyncio.create_task(http.post("/v1/completions", json={**LONG, "n": 2}, headers=headers))
        await until_state(ops, "whole", "running")
        told = (await ops.delete("/v1/requests/whole")).json()
        answer = (await work).json()
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"abort"}
    assert answer["usage"]["completion_tokens"] == told["output_tokens"]


async def test_an_abort_ends_a_waiting_request_without_a_token(slow_server: LiveServer) -> None:
    """Eight are asked for, and fill all seats but the one that may be kept for other tenants. The ninth waits, and ends without a
    token."""
    async with client(slow_server, "alice") as http:
        body = {"prompt": ["fill"] * 8, "max_tokens": 1500}
        filling = asyncio.create_task(http.post("/v1/completions", json=body))
        await until_live(http, 7, "running")
        waiting = asyncio.create_task(http.post("/v1/completions", json=LONG, headers={"X-Request-Id": "late"}))
        await until_state(http, "late")
        told = (await http.delete("/v1/requests/late")).json()
        answer = (await waiting).json()
        assert (told["state"], told["output_tokens"]) == ("ended", 0)
        assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["text"]) == ("abort", "")
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)
        await until_none_lives(http)


async def test_ended_requests_are_listed_when_asked_for(slow_server: LiveServer) -> None:
    async with client(slow_server, "bob") as http:
        await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "over"})
    assert "over" in {request["external_id"] for request in await listed(slow_server, "bob", state="ended")}
    assert "over" in {request["external_id"] for request in await listed(slow_server, "bob", state="all", model="tiny")}
    assert "over" not in {request["external_id"] for request in await listed(slow_server, "bob")}


async def test_an_id_used_again_names_the_newest_request(slow_server: LiveServer) -> None:
    async with client(slow_server, "alice") as http:
        for _ in range(2):
            last = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "twice"})
        found = (await http.get("/v1/requests/twice")).json()
    assert found["id"] == last.headers["x-headrace-request-id"]


async def test_a_record_is_kept_for_the_time_that_its_api_server_was_given(slow_server: LiveServer) -> None:
    async with client(slow_server, "alice") as http:
        answer = await http.post("/v1/completions", json={"prompt": "short", "max_tokens": 1})
    with redis.Redis.from_url(slow_server.redis.url) as raw:
        assert 970 < raw.ttl(keys.record(slow_server.name, answer.headers["x-headrace-request-id"])) <= 1000
