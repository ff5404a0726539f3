"""Responses in the background, followed by clients that leave and come back at either API server while engines are killed."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.live_server import LiveServer
from tests.waiting import wait_for_async

pytestmark = pytest.mark.soak

CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Rome and Oslo", "n": 5}}\n</tool_call>'
THOUGHT = " ".join(f"Step {number}, naïve 🌊." for number in range(20))
EPIC = " ".join(f"Verse {number} of the épic 🌊." for number in range(20))
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\n{EPIC}{CALL}\n{CALL}"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
PARSERS = ("--tool-call-parser", "hermes", "--reasoning-parser", "think")
COUNT = 24
ALL = 1 << 30


async def read(http: httpx.AsyncClient, method: str, url: str, most: int, **request: Any) -> list[dict[str, Any]]:
    """The first events of a stream, up to `most`; those of the connection itself are left out."""
    events: list[dict[str, Any]] = []
    async with http.stream(method, url, **request) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == most:
                    break
    return [event for event in events if event["type"] != "error"]


def has_ended(events: list[dict[str, Any]]) -> bool:
    return bool(events) and events[-1]["type"] in ("response.completed", "response.incomplete", "response.failed")


async def follow(urls: list[str], seed: int, counts: dict[int, int]) -> None:
    """One client. It begins with a stream or without, and reads some events at a time. `counts`: how many it has, by its seed."""
    chance = random.Random(seed)
    body: dict[str, Any] = {"input": "the epic", "background": True, "tools": [TOOL], "seed": seed, "stream": seed % 3 == 0}
    if seed % 2:
        body["include"] = ["message.output_text.logprobs"]
    async with httpx.AsyncClient(timeout=60) as http:
        place = f"{chance.choice(urls)}/v1/responses"
        seen: list[dict[str, Any]] = []
        if body["stream"]:
            seen = await read(http, "POST", place, chance.randint(1, 30), json=body)
            id = seen[0]["response"]["id"]
        else:
            id = (await http.post(place, json=body)).json()["id"]
        while not has_ended(seen):
            after = {"starting_after": seen[-1]["sequence_number"]} if seen else {}
            place = f"{chance.choice(urls)}/v1/responses/{id}"
            seen += await read(http, "GET", place, chance.randint(1, 60), params={"stream": True, **after})
            counts[seed] = len(seen)
        whole = await read(http, "GET", place, ALL, params={"stream": True})
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        assert seen == whole
        final = (await http.get(place)).json()
        assert final == whole[-1]["response"] and final["status"] == "completed"
        assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call", "function_call"]


async def test_all_streams_of_a_response_have_the_same_events(smollm2_gguf: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"match": "epic", "answer": ANSWER}]))
    engine = ("--load-format", "scripted", "--script", str(script), "--max-model-len", "4k", "--max-num-seqs", str(COUNT))
    with LiveServer(smollm2_gguf, engine, PARSERS, null="step_seconds=0.02") as server:
        _, url = server.start_api()
        server.wait_until_healthy(url)
        counts: dict[int, int] = {}
        clients = [asyncio.create_task(follow([server.url, url], seed, counts)) for seed in range(COUNT)]
        for count in (60, 180):  # events that each client has, about, of some 370
            await wait_for_async(lambda count=count: sum(counts.values()) >= count * COUNT, "the middle of the answers", 60)
            await asyncio.to_thread(server.restart_engine)
        await asyncio.gather(*clients)
