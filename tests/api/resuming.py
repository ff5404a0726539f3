"""A client of streams that can be continued: it keeps the ids of events, and adds up what it was told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

Event = tuple[str, Any]  # id, data


async def next_event(lines: AsyncIterator[str]) -> Event | None:
    """None: the stream has ended."""
    last_id = ""
    async for line in lines:
        if line.startswith("id: "):
            last_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            payload = line.removeprefix("data: ")
            return last_id, payload if payload == "[DONE]" else json.loads(payload)
    return None


async def events_of(answer: httpx.Response, most: int = 1 << 30) -> list[Event]:
    """The events of a stream, or the first ones."""
    found: list[Event] = []
    lines = answer.aiter_lines()
    while len(found) < most and (event := await next_event(lines)):
        found.append(event)
    return found


async def streamed(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], most: int = 1 << 30, **headers: str
) -> tuple[str, list[Event]]:
    async with http.stream("POST", path, json={"stream": True, "resumable": True, **body}, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        return answer.headers["x-headrace-request-id"].partition(", ")[0], await events_of(answer, most)


async def continued(http: httpx.AsyncClient, request_id: str, last_id: str = "", most: int = 1 << 30) -> list[Event]:
    headers = {"Last-Event-ID": last_id} if last_id else {}
    async with http.stream("GET", f"/v1/requests/{request_id}/stream", headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        return await events_of(answer, most)


def merged(events: list[Event]) -> dict[str, Any]:
    """What a client has of a stream: of each choice its text, logprobs, token ids and end; how often each came; the usage."""
    told: dict[str, Any] = {"openings": 0, "usage": [], "done": 0}
    for _, event in events:
        if event == "[DONE]":
            told["done"] += 1
            continue
        assert "error" not in event, event
        if not event["choices"]:
            told["usage"].append(event["usage"])
        for item in event["choices"]:
            choice = told.setdefault(item["index"], {"text": "", "logprobs": [], "token_ids": [], "ends": []})
            delta = item.get("delta", {})
            told["openings"] += "role" in delta
            choice["text"] += item.get("text") or delta.get("content") or ""
            logprobs = item["logprobs"] or {}
            choice["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
            choice["token_ids"] += item.get("token_ids") or []
            if item["finish_reason"]:
                choice["ends"].append((item["finish_reason"], item.get("stop_reason")))
    return told


async def broken_streams(
    http: httpx.AsyncClient, path: str, bodies: list[dict[str, Any]], least: int, break_off: Callable[[], None]
) -> list[tuple[str, list[Event]]]:
    """Ids, and the events that came, of resumable streams that `break_off` breaks when each has had `least` events."""
    begun = asyncio.Semaphore(0)

    async def read(body: dict[str, Any]) -> tuple[str, list[Event]]:
        found: list[Event] = []
        async with http.stream("POST", path, json={"stream": True, "resumable": True, **body}) as answer:
            lines = answer.aiter_lines()
            try:
                while events := await next_event(lines):
                    found.append(events)
                    if len(found) == least:
                        begun.release()
            except httpx.TransportError:
                return answer.headers["x-headrace-request-id"], found
        raise AssertionError("the stream came to its end")

    reading = [asyncio.create_task(read(body)) for body in bodies]
    async with asyncio.timeout(60):
        for _ in bodies:
            await begun.acquire()
        break_off()
        return await asyncio.gather(*reading)
