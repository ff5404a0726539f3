"""A client that does not read: it holds its own output and nothing else, and gets all of it when it reads on."""

from __future__ import annotations

import asyncio
import socket
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.api.conftest import KEYS
from tests.api.live_server import LiveServer, sse_events
from tests.api.request_states import until_metric, until_state

PATH = "/v1/completions"
CHOICES, TOKENS = 8, 1500
# About 12 MB of events, far more than the sockets' buffers take.
LONG = {"prompt": "on and on", "seed": 3, "n": CHOICES, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 20}
SHORT = {"prompt": "go", "max_tokens": 50, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
FAST_READERS = 8
# About 9 MB of events at once, and then tokens for ten seconds.
ECHOES = {"prompt": 4 * [1500 * [17]], "echo": True, "logprobs": 20, "max_tokens": 500, "ignore_eos": True}


def stalled(url: str, request_id: str, body: dict[str, Any] = LONG, headers: dict[str, str] | None = None) -> HTTPConnection:
    """A stream that was asked for and of which nothing is read."""
    address = urlsplit(url)
    assert address.hostname and address.port
    connection = HTTPConnection(address.hostname, address.port, timeout=60)
    connection.sock = socket.socket()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sock.settimeout(60)
    connection.sock.connect((address.hostname, address.port))
    content = httpx.Request("POST", url, json={**body, "stream": True}).content
    named = {"Content-Type": "application/json", "X-Request-Id": request_id, **(headers or {})}
    connection.request("POST", PATH, content, named)
    return connection


async def read_fast(http: httpx.AsyncClient, **more: int) -> int:
    async with http.stream("POST", PATH, json=SHORT | more) as answer:
        events = sse_events([line async for line in answer.aiter_lines()])
    assert events[-1] == "[DONE]"
    tokens: int = events[-2]["usage"]["completion_tokens"]
    return tokens


def add_up(events: list[Any]) -> list[tuple[str, list[float]]]:
    """Text and logprobs of each choice."""
    texts, logprobs = [""] * CHOICES, [list[float]() for _ in range(CHOICES)]
    for event in events:
        for part in event["choices"]:
            texts[part["index"]] += part["text"]
            logprobs[part["index"]] += (part["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    return list(zip(texts, logprobs, strict=True))


async def test_a_client_that_stalls_slows_nobody_and_misses_nothing(null_server: LiveServer) -> None:
    async with httpx.AsyncClient(base_url=null_server.url, timeout=60) as http:
        connection = stalled(null_server.url, "stalls")
        try:
            await until_state(http, "stalls", "ended", seconds=60)  # the engine does not wait for the reader
            tokens = await asyncio.gather(*(read_fast(http) for _ in range(FAST_READERS)))
            assert tokens == [SHORT["max_tokens"]] * FAST_READERS
            assert (await http.get("/load")).json() == {"server_load": 1}, "the stalled stream could be sent without being read"
            payload = await asyncio.to_thread(lambda: connection.getresponse().read().decode())
        finally:
            connection.close()
        whole = (await http.post(PATH, json=LONG)).json()["choices"]
    events = sse_events(payload.split("\n"))
    assert events.pop() == "[DONE]"
    assert add_up(events) == [(choice["text"], choice["logprobs"]["token_logprobs"]) for choice in whole]
    assert len(events) < CHOICES * TOKENS / 2, "what came while nothing was read comes in few events"


@pytest.mark.parametrize(("option", "reason"), [("--slow-client-timeout=1", "stalled"), ("--max-pending-bytes=100000", "memory")])
async def test_a_client_that_never_reads_is_dropped_without_touching_others(
    slow_server: LiveServer, option: str, reason: str
) -> None:
    alice = {"Authorization": f"Bearer {KEYS['alice']}"}
    api, url = slow_server.start_api(option)
    async with httpx.AsyncClient(base_url=url, headers=alice, timeout=60) as http:
        await asyncio.to_thread(slow_server.wait_until_healthy, url)
        connection = stalled(url, reason, ECHOES, alice)
        try:
            readers = [asyncio.create_task(read_fast(http, max_tokens=5)) for _ in range(20)]
            record = await until_state(http, reason, "ended")
            assert await asyncio.gather(*readers) == [5] * 20
            await until_metric(http, f'slow_clients_dropped_total{{reason="{reason}"}} 1.0')
        finally:
            connection.close()
    assert record["finish_reason"] == "abort"
    api.terminate()
    assert slow_server.ended(api) == 0
