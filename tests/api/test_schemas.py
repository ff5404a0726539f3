"""The real model's answers to random schemas: each that came to its end validates, greedy or sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import jsonschema_rs
import pytest

from tests.api.live_server import LiveServer
from tests.api.random_schemas import random_schema

AT_ONCE = 16


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[LiveServer]:
    engine = ("--max-model-len", "1024", "--num-gpu-blocks-override", "1000", "--max-num-seqs", str(AT_ONCE))
    with LiveServer(smollm2_gguf, engine, (), name="smollm2") as server:
        yield server


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.soak)])
async def test_answers_are_of_their_schemas(server: LiveServer, count: int) -> None:
    random = Random(count)
    schemas = [random_schema(random) for _ in range(count)]
    turns = asyncio.Semaphore(AT_ONCE)

    async def ask(number: int, client: httpx.AsyncClient) -> dict[str, Any]:
        body = {
            "prompt": "An example as JSON:",
            "response_format": {"type": "json_schema", "json_schema": {"name": "example", "schema": schemas[number]}},
            "max_tokens": 300,
            "temperature": number % 2,
            "seed": number,
        }
        async with turns:
            answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, (schemas[number], answer.text)
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        choices = await asyncio.gather(*(ask(number, client) for number in range(count)))
    finished = [number for number, choice in enumerate(choices) if choice["finish_reason"] == "stop"]
    for number in finished:
        jsonschema_rs.validate(schemas[number], json.loads(choices[number]["text"]), validate_formats=True)
    assert len(finished) > 0.7 * count
