"""Waits of the API's tests for what a server tells of its requests."""

from __future__ import annotations

from typing import Any

import httpx

from tests.waiting import SECONDS, wait_for_async


async def until_live(http: httpx.AsyncClient, count: int, state: str = "") -> None:
    """So many of this client's requests are enqueued and not ended; of those in `state`, where one is given."""

    async def enough() -> bool:
        found = (await http.get("/v1/requests")).json()["data"]
        return len([request for request in found if state in ("", request["state"])]) >= count

    await wait_for_async(enough, f"{count} {state or 'live'} requests")


async def until_none_lives(http: httpx.AsyncClient) -> None:
    """All of this client's requests have ended, also for the engine."""

    async def none() -> bool:
        return not (await http.get("/v1/requests")).json()["data"]

    await wait_for_async(none, "the end of all requests")


async def until_idle(http: httpx.AsyncClient) -> None:
    """All of this client's requests have ended, and the server has put every HTTP request down."""

    async def idle() -> bool:
        return not (await http.get("/load")).json()["server_load"]

    await until_none_lives(http)
    await wait_for_async(idle, "the end of all HTTP requests")


async def until_loaded(http: httpx.AsyncClient) -> None:
    """The server has an HTTP request in hand."""

    async def loaded() -> bool:
        return (await http.get("/load")).json()["server_load"] >= 1

    await wait_for_async(loaded, "an HTTP request in hand")


async def until_state(http: httpx.AsyncClient, request_id: str, *states: str, seconds: float = SECONDS) -> dict[str, Any]:
    """The request's record, once it is in one of these states, or there at all where none is given."""

    async def record() -> dict[str, Any] | None:
        answer = await http.get(f"/v1/requests/{request_id}")
        found: dict[str, Any] = answer.json()
        return found if answer.status_code == 200 and (not states or found["state"] in states) else None

    found = await wait_for_async(record, f"request {request_id} {' or '.join(states)}", seconds)
    assert found is not None
    return found


async def until_status(http: httpx.AsyncClient, path: str, status: int, seconds: float = SECONDS) -> httpx.Response:
    """The first answer with this status. One that cannot be had yet is no answer."""

    async def answer() -> httpx.Response | None:
        try:
            got = await http.get(path)
        except httpx.TransportError:
            return None
        return got if got.status_code == status else None

    answered = await wait_for_async(answer, f"{path} answers {status}", seconds)
    assert answered is not None
    return answered


async def until_metric(http: httpx.AsyncClient, line: str) -> str:
    """The text of /metrics, once it has this line. The engine's numbers in it are renewed twice a second."""

    async def metrics() -> str:
        text = (await http.get("/metrics")).text
        return text if line in text else ""

    return await wait_for_async(metrics, f"{line!r} in /metrics")
