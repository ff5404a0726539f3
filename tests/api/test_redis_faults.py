"""Redis pauses, cuts connections, restarts, loses its last second, everything, or its master: every answer is that of a calm run.

The engine and the API server stay the same processes. Requests run, wait for room, stream or not.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import redis

from benchmarks.chaos.redis import cut_from
from tests.api.conftest import NULL_ENGINE
from tests.api.live_server import LiveServer, sse_events
from tests.redis_sentinel import SentinelSetup
from tests.redis_server import RedisServer
from tests.waiting import wait_for_async

ENGINE = (*NULL_ENGINE, "--max-num-seqs", "8")
API = ("--sse-keep-alive-interval", "0.2")
NULL = "step_seconds=0.008"
AOF = ("--appendonly", "yes", "--appendfsync", "everysec", "--aof-timestamp-enabled", "yes", "--auto-aof-rewrite-percentage", "0")
BODIES: list[dict[str, Any]] = [
    {"prompt": f"{index}", "seed": index, "max_tokens": 100 + 5 * index, "stream": index % 4 != 3, **more}
    for index, more in enumerate([{}, {"n": 2}, {"logprobs": 3}, {"temperature": 0}] * 3)
]
MANY = 5  # tokens of the first stream, when the fault comes

Fault = Callable[[LiveServer], Awaitable[None]]


class Answer:
    """One request as its client sees it. `events` may not be whole yet."""

    def __init__(self, http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        self.events: list[Any] = []
        self.num_comments = 0
        self._http, self._body = http, {"ignore_eos": True, **body}

    async def run(self) -> Answer:
        if not self._body["stream"]:
            answer = await self._http.post("/v1/completions", json=self._body)
            self.events.append(answer.json())
            return self
        options = {"stream_options": {"include_usage": True}}
        async with self._http.stream("POST", "/v1/completions", json={**self._body, **options}) as answer:
            async for line in answer.aiter_lines():
                self.num_comments += line.startswith(":")
                self.events += sse_events([line])
        return self

    @property
    def facts(self) -> tuple[dict[int, list[Any]], list[Any]]:
        """What a calm run has too: text, logprobs' tokens and ends of each choice; and tokens counted, errors, the stream's end."""
        choices: dict[int, list[Any]] = {}
        others: list[Any] = []
        for event in self.events:
            if event == "[DONE]" or "choices" not in event:
                others.append(event)
                continue
            if event.get("usage"):
                others.append(event["usage"]["completion_tokens"])
            for part in event["choices"]:
                choice = choices.setdefault(part["index"], ["", [], []])
                choice[0] += part["text"]
                choice[1] += (part["logprobs"] or {}).get("tokens", [])
                choice[2] += [part["finish_reason"]] if part["finish_reason"] else []
        return choices, others


async def under_load(server: LiveServer, fault: Fault | None = None, times: int = 1) -> list[Answer]:
    """All answers, each whole. `fault` comes while the first half of them runs and the others wait. `times` as many tokens."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http, asyncio.timeout(180):
        answers = [Answer(http, {**body, "max_tokens": times * body["max_tokens"]}) for body in BODIES]
        running = [asyncio.create_task(answer.run()) for answer in answers]
        await wait_for_async(lambda: len(answers[0].events) >= MANY, "a request in mid-stream")
        if fault is not None:
            assert not any(each.done() for each in running[-4:]), "the fault comes too late"
            await fault(server)
        return await asyncio.gather(*running)


async def same_answers(server: LiveServer, fault: Fault, calm: list[Any], times: int = 1) -> list[Answer]:
    """Fails unless all answers are as in a calm run, and the engine and the API server are the same processes."""
    answers = await under_load(server, fault, times)
    for body, answer, expected in zip(BODIES, answers, calm, strict=True):
        assert answer.facts == expected, body
    assert (server.engine.poll(), server.api.poll()) == (None, None)
    return answers


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[LiveServer]:
    with LiveServer(smollm2_gguf, ENGINE, API, null=NULL, redis=RedisServer(None, *AOF)) as server:
        yield server


@pytest.fixture(scope="module")
def calm(server: LiveServer) -> list[Any]:
    answers = [answer.facts for answer in asyncio.run(under_load(server))]
    for body, (choices, others) in zip(BODIES, answers, strict=True):
        assert [len(ends) for _, _, ends in choices.values()] == [1] * body.get("n", 1)
        assert others[0] == body["max_tokens"] * body.get("n", 1)
    return answers


def pause(seconds: float) -> Fault:
    async def fault(server: LiveServer) -> None:
        assert server.redis.process is not None
        server.redis.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        server.redis.process.send_signal(signal.SIGCONT)

    return fault


async def restart(server: LiveServer) -> None:
    await asyncio.to_thread(server.redis.restart)


async def lose_last_second(server: LiveServer) -> int:
    """Kill it and start it without its last second, or more. Returns the bytes that it lost: none, where nothing was written."""
    redis_server, killed = server.redis, int(time.time())
    redis_server.kill()
    (file,) = Path(redis_server.folder).glob("appendonlydir/*.incr.aof")
    num_lost = cut_from(file, killed - 1)
    await asyncio.to_thread(redis_server.start)
    return num_lost


async def roll_back(server: LiveServer) -> None:
    assert await lose_last_second(server)


async def roll_back_if_busy(server: LiveServer) -> None:
    await lose_last_second(server)


async def wipe(server: LiveServer) -> None:
    server.redis.kill()
    shutil.rmtree(Path(server.redis.folder) / "appendonlydir")
    await asyncio.to_thread(server.redis.start)


async def flush_all(server: LiveServer) -> None:
    await asyncio.to_thread(command, server, "FLUSHALL")


def kill_clients(kind: str) -> Fault:
    async def fault(server: LiveServer) -> None:
        for _ in range(5):
            await asyncio.to_thread(command, server, "CLIENT", "KILL", "TYPE", kind)
            await asyncio.sleep(0.1)

    return fault


async def cut_slow_subscribers(server: LiveServer) -> None:
    """For a second nearly every message is too much for the server to keep for a subscriber."""
    await asyncio.to_thread(command, server, "CONFIG", "SET", "client-output-buffer-limit", "pubsub 1 0 0")
    await asyncio.sleep(1.0)
    await asyncio.to_thread(command, server, "CONFIG", "SET", "client-output-buffer-limit", "pubsub 33554432 8388608 60")


def command(server: LiveServer, *words: str) -> Any:
    with redis.Redis.from_url(server.redis.url) as client:
        return client.execute_command(*words)


@pytest.mark.parametrize("seconds", [3.5, pytest.param(10.0, marks=pytest.mark.soak)])
async def test_a_redis_that_stands_still(server: LiveServer, calm: list[Any], seconds: float) -> None:
    """Comments keep the clients' connections meanwhile."""
    answers = await same_answers(server, pause(seconds), calm)
    assert max(answer.num_comments for answer in answers) >= 2 * seconds


FAULTS: dict[str, Fault] = {
    "restart": restart,
    "roll_back": roll_back,
    "wipe": wipe,
    "flush_all": flush_all,
    "kill_normal": kill_clients("normal"),
    "kill_pubsub": kill_clients("pubsub"),
    "cut_slow_subscribers": cut_slow_subscribers,
}


SUITE = {"roll_back", "wipe", "cut_slow_subscribers"}  # the others cost two seconds each


@pytest.mark.parametrize(
    "fault", [pytest.param(FAULTS[name], id=name, marks=[] if name in SUITE else pytest.mark.soak) for name in FAULTS]
)
async def test_every_answer_is_that_of_a_calm_run(server: LiveServer, calm: list[Any], fault: Fault) -> None:
    await same_answers(server, fault, calm)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
async def test_faults_one_after_another(server: LiveServer, seed: int) -> None:
    """Some come while the engine and the API server still mend what the one before has done."""
    random = Random(seed)
    faults = FAULTS | {"roll_back": roll_back_if_busy}
    told: list[str] = []

    async def fault(server: LiveServer) -> None:
        for _ in range(8):
            name = random.choice([*faults, "pause"])
            told.append(name)
            await faults.get(name, pause(random.uniform(0.5, 3.0)))(server)
            await asyncio.sleep(random.choice([0.0, 0.3, 1.5]))

    calm = [answer.facts for answer in await under_load(server, times=8)]
    try:
        await same_answers(server, fault, calm, times=8)
    finally:
        print(told)


async def test_a_failover_to_a_replica_that_lags(smollm2_gguf: Path, calm: list[Any]) -> None:
    """The replica lacks the last half second of the master that dies."""

    async def fail_over(server: LiveServer) -> None:
        server.redis.cut_replication()
        await asyncio.sleep(0.5)
        await asyncio.to_thread(server.redis.kill_master)

    with LiveServer(smollm2_gguf, ENGINE, API, null=NULL, redis=SentinelSetup()) as server:
        await same_answers(server, fail_over, calm)
        assert server.redis.master.process and not server.redis.replica.process
