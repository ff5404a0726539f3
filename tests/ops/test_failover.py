"""Engines of `headrace serve` die in mid-stream, on the real model, and no client sees more than a pause."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ops.serving import Serving, serving
from tests.waiting import wait_for

STREAMS = 32
TOKENS = 128
LONGEST_PAUSE = {1: 20.0, 2: 10.0}  # seconds, by engines, on a busy machine; one engine has to start again first


@dataclass
class Streamed:
    """What a client saw of one answer."""

    texts: dict[int, str] = field(default_factory=dict)  # by choice
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    usage: Any = None
    errors: list[Any] = field(default_factory=list)
    num_events: int = 0
    longest_pause: float = 0.0  # seconds between two events

    @property
    def answer(self) -> Any:
        return self.texts, self.reasons, self.usage, self.errors


def body(number: int) -> dict[str, Any]:
    """Half of them sampled; some with several choices, stop strings, penalties, logprobs or a schema."""
    body: dict[str, Any] = {
        "prompt": f"Tale number {number}: once upon a time",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if number % 2:
        body |= {"temperature": 0.9, "seed": number}
    if number % 8 == 1:
        body |= {"n": 2, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    if number % 8 == 2:
        body |= {"stop": ["\n\n", "zebra"], "min_tokens": 100}
    if number % 8 == 3:
        body |= {"logprobs": 2, "logit_bias": {"260": -2.0}}
    if number % 8 in (4, 5):
        body |= {"structured_outputs": {"json": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 200}}}
    return body


async def follow(client: httpx.AsyncClient, number: int, told: Callable[[], None]) -> Streamed:
    seen = Streamed()
    last = time.monotonic()
    async with client.stream("POST", "/v1/completions", json=body(number)) as response:
        assert response.status_code == 200, await response.aread()
        async for event in events(response):
            now = time.monotonic()
            seen.longest_pause, last = max(seen.longest_pause, now - last), now
            take(seen, event)
            told()
    return seen


async def events(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def take(seen: Streamed, event: Any) -> None:
    if "error" in event:
        seen.errors.append(event["error"])
        return
    seen.usage = event.get("usage") or seen.usage
    for choice in event["choices"]:
        index = choice["index"]
        seen.num_events += 1
        seen.texts[index] = seen.texts.get(index, "") + choice["text"]
        if choice["finish_reason"]:
            seen.reasons[index] = choice["finish_reason"]
        if choice.get("logprobs"):
            seen.logprobs += choice["logprobs"]["token_logprobs"]


async def run_all(server: Serving, strike: Callable[[], Awaitable[None]] | None = None, after: int = 0) -> list[Streamed]:
    """All streams at once; `strike` comes when `after` events were seen in all."""
    seen = 0
    reached = asyncio.Event()

    def told() -> None:
        nonlocal seen
        seen += 1
        if seen >= after:
            reached.set()

    limits = httpx.Limits(max_connections=STREAMS + 4)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        streams = [asyncio.create_task(follow(client, number, told)) for number in range(STREAMS)]
        if strike is not None:
            async with asyncio.timeout(60):
                await reached.wait()
            await strike()
        return list(await asyncio.gather(*streams))


def killing(pid: int) -> Callable[[], Awaitable[None]]:
    async def strike() -> None:
        os.kill(pid, signal.SIGKILL)

    return strike


def check_unchanged(calm: list[Streamed], struck: list[Streamed]) -> None:
    for number, (before, after) in enumerate(zip(calm, struck, strict=True)):
        assert not after.errors, (number, after.errors)
        assert after.answer == before.answer, number
        assert after.logprobs == pytest.approx(before.logprobs, abs=1e-3), number


@pytest.fixture(scope="module", params=[1, 2], ids=["one engine", "two engines"])
def server(request: pytest.FixtureRequest, smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    engines = ("--data-parallel-size", str(request.param))
    with serving(str(smollm2_gguf), *engines, "--max-model-len", "1024", data_dir=tmp_path_factory.mktemp("failover")) as server:
        yield server


async def test_streams_go_on_token_for_token_when_their_engine_is_killed(server: Serving) -> None:
    calm = await run_all(server)
    assert sum(streamed.num_events for streamed in calm) > STREAMS * TOKENS
    processes = {engine["slot"]: engine["pid"] for engine in server.headrace("engines")}
    struck = await run_all(server, killing(processes["0"]), after=STREAMS * TOKENS // 2)
    check_unchanged(calm, struck)
    pause = max(streamed.longest_pause for streamed in struck)
    print(f"longest pause of a stream: {pause:.2f} s")
    assert pause < LONGEST_PAUSE[len(processes)]
    server.wait_for("is ready again")
    assert server.headrace("ps") == []


@pytest.mark.soak
async def test_a_stopped_engine_that_wakes_up_changes_nothing_and_comes_back_as_another(smollm2_gguf: Path, tmp_path: Path) -> None:
    arguments = (str(smollm2_gguf), "--data-parallel-size", "2", "--max-model-len", "1024", "--watchdog-timeout", "0")
    with serving(*arguments, data_dir=tmp_path / "data") as server:
        calm = await run_all(server)
        before = {engine["slot"]: engine for engine in server.headrace("engines")}
        stopped = before["0"]["pid"]

        async def strike() -> None:
            os.kill(stopped, signal.SIGSTOP)

        began = time.monotonic()
        struck = await run_all(server, strike, after=STREAMS * TOKENS // 2)
        check_unchanged(calm, struck)
        assert [engine["slot"] for engine in server.headrace("engines")] == ["1"], "the other one has taken over"
        await asyncio.sleep(max(0.0, began + 15 - time.monotonic()))  # not a wait: the time that the engine is to be stopped
        in_between = await run_all(server, continuing(stopped), after=STREAMS * TOKENS // 4)
        check_unchanged(calm, in_between)

        def is_back() -> bool:
            now = {engine["slot"]: engine for engine in server.headrace("engines")}
            return "0" in now and now["0"]["incarnation"] > before["0"]["incarnation"]

        wait_for(is_back, "the engine under a new incarnation", 60)
        assert server.headrace("ps") == []


def continuing(pid: int) -> Callable[[], Awaitable[None]]:
    async def strike() -> None:
        os.kill(pid, signal.SIGCONT)

    return strike
