"""A thousand retries through two API servers while the engine is killed: each request runs once, and all its answers are equal."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.api.conftest import NULL_ENGINE
from tests.api.live_server import LiveServer, sse_events
from tests.api.request_states import until_live
from tests.api.resuming import continued, merged, streamed

KEYS = 40
RETRIES = 25  # of each key
TOKENS = 100  # of each choice


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[LiveServer]:
    with LiveServer(smollm2_gguf, (*NULL_ENGINE, "--max-num-seqs", "64"), null="step_seconds=0.01") as server:
        yield server


async def test_a_thousand_retries_while_the_engine_is_killed_have_one_answer_each(server: LiveServer) -> None:
    _, other = server.start_api()
    server.wait_until_healthy(other)
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as here,
        httpx.AsyncClient(base_url=other, timeout=120, limits=limits) as there,
    ):

        async def ask(number: int, attempt: int) -> tuple[int, str]:
            http = there if (number + attempt) % 2 else here
            stream = number % 8 == 0
            body = {"prompt": f"number {number}", "max_tokens": TOKENS, "temperature": 1.0, "n": 1 + number % 2, "stream": stream}
            answer = await http.post("/v1/completions", json=body, headers={"Idempotency-Key": f"key-{number}"})
            assert answer.status_code == 200, answer.text
            return number, told(answer) if stream else answer.text

        asking = [asyncio.create_task(ask(number, attempt)) for attempt in range(RETRIES) for number in range(KEYS)]
        await until_live(here, KEYS, "running")
        server.restart_engine()
        answers = defaultdict(set)
        for number, text in await asyncio.gather(*asking):
            answers[number].add(text)
        assert [len(answers[number]) for number in range(KEYS)] == [1] * KEYS
        listed = (await here.get("/v1/requests", params={"state": "all"})).json()["data"]
        assert len(listed) == KEYS, "no other test came before"
        assert {(request["state"], request["finish_reason"]) for request in listed} == {("ended", "length")}
        assert sum(request["output_tokens"] for request in listed) == sum(TOKENS * (1 + number % 2) for number in range(KEYS))


def told(answer: httpx.Response) -> str:
    """The text of a stream's choices, and how each ended."""
    texts: defaultdict[int, str] = defaultdict(str)
    for event in sse_events(answer.text.splitlines()):
        if event != "[DONE]":
            assert "error" not in event, event
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"] + (f"<{choice['finish_reason']}>" if choice["finish_reason"] else "")
    return str(sorted(texts.items()))


async def test_a_stream_taken_up_elsewhere_survives_the_death_of_its_engine(server: LiveServer) -> None:
    """One is attached while it runs, one while it waits for the next engine."""
    _, other = server.start_api()
    server.wait_until_healthy(other)
    body = {"prompt": "on and on", "max_tokens": 120, "n": 2, "seed": 9, "logprobs": 1}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as here, httpx.AsyncClient(base_url=other, timeout=60) as there:
        want = merged((await streamed(here, "/v1/completions", body))[1])
        first, before = await streamed(here, "/v1/completions", body, most=20)
        second, early = await streamed(here, "/v1/completions", body, most=20)
        before += await continued(there, first, before[-1][0], most=20)
        taking = asyncio.create_task(continued(here, first, before[-1][0]))
        server.restart_engine()
        late = asyncio.create_task(continued(there, second, early[-1][0]))
        assert merged(before + await taking) == want
        assert merged(early + await late) == want
