"""Streams continued at another API server, answers kept, and retries: two API servers and an engine, each a process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from tests.api.conftest import KEYS, NULL_ENGINE
from tests.api.live_server import LiveServer
from tests.api.request_states import until_loaded, until_state
from tests.api.resuming import broken_streams, continued, events_of, merged, streamed
from tests.waiting import wait_for_async

ALICE = {"Authorization": f"Bearer {KEYS['alice']}"}
BOB = {"Authorization": f"Bearer {KEYS['bob']}"}
CHAT = {"messages": [{"role": "user", "content": "Count the fish."}], "max_tokens": 40, "seed": 5}
TEXT = {"prompt": "on and on", "max_tokens": 40, "seed": 5}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@dataclass
class Pair:
    """One headrace with two API servers."""

    server: LiveServer
    urls: list[str]
    processes: list[Any] = field(default_factory=list)

    def client(self, place: int = 0, headers: dict[str, str] = ALICE) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.urls[place], headers=headers, timeout=60)


@pytest.fixture(scope="module")
def pair(smollm2_gguf: Path) -> Iterator[Pair]:
    keys = ("--api-key", f"alice={KEYS['alice']}", "--api-key", f"bob={KEYS['bob']}")
    with LiveServer(smollm2_gguf, (*NULL_ENGINE, "--max-num-seqs", "64"), keys, null="step_seconds=0.005") as server:
        process, url = server.start_api()
        server.wait_until_healthy(url)
        yield Pair(server, [server.url, url], [server.api, process])


@dataclass(frozen=True)
class Case:
    path: str
    body: dict[str, Any]


CASES = {
    "chat": Case(CHATS, {**CHAT, "max_tokens": 12, "stream_options": {"include_usage": True}}),
    "two choices": Case(COMPLETIONS, {**TEXT, "max_tokens": 6, "n": 2, "stream_options": {"include_usage": True}}),
    "logprobs": Case(CHATS, {**CHAT, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}),
    "echo and token ids": Case(COMPLETIONS, {**TEXT, "max_tokens": 8, "echo": True, "return_token_ids": True, "logprobs": 1}),
    "two prompts": Case(COMPLETIONS, {**TEXT, "prompt": ["one", "two"], "max_tokens": 5}),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_continues_behind_each_of_its_events(pair: Pair, name: str) -> None:
    """At either server, whole and once, whether the request runs or has ended."""
    case = CASES[name]
    async with pair.client(0) as here, pair.client(1) as there:
        request_id, whole = await streamed(here, case.path, case.body)
        want = merged(whole)
        for count in range(1, len(whole)):
            rest = await continued(there if count % 2 else here, request_id, whole[count - 1][0])
            assert merged(whole[:count] + rest) == want, whole[count - 1]
        assert merged(await continued(there, request_id)) == want


@pytest.mark.parametrize("name", ["chat", "two choices", "two prompts"])
async def test_a_running_stream_continues_at_the_other_server(pair: Pair, name: str) -> None:
    case = CASES[name]
    body = {**case.body, "max_tokens": 60}
    async with pair.client(0) as here, pair.client(1) as there:
        want = merged((await streamed(here, case.path, body))[1])
        request_id, seen = await streamed(here, case.path, body, most=5)
        seen += await continued(there, request_id, seen[-1][0], most=6)
        seen += await continued(here, request_id, seen[-1][0])
        assert merged(seen) == want


async def test_text_that_may_become_a_stop_string_is_not_lost(pair: Pair) -> None:
    async with pair.client(0) as here, pair.client(1) as there:
        free = merged((await streamed(here, COMPLETIONS, TEXT))[1])[0]["text"]
        stop = free[len(free) // 2 :][:6]
        body = {**TEXT, "stop": [stop, free[4:10] + "\x00"], "n": 1}
        request_id, whole = await streamed(here, COMPLETIONS, body)
        want = merged(whole)
        assert want[0]["text"] == free[: free.index(stop)] and want[0]["ends"] == [("stop", stop)]
        for count in range(1, len(whole)):
            assert merged(whole[:count] + await continued(there, request_id, whole[count - 1][0])) == want
        again, seen = await streamed(here, COMPLETIONS, body, most=2)
        assert merged(seen + await continued(there, again, seen[-1][0])) == want


async def test_the_earlier_stream_of_a_request_is_told_that_another_goes_on(pair: Pair) -> None:
    body = {**TEXT, "max_tokens": 400}
    async with pair.client(0) as here, pair.client(1) as there:
        async with here.stream("POST", COMPLETIONS, json={"stream": True, "resumable": True, **body}) as answer:
            request_id = answer.headers["x-headrace-request-id"]
            taking = asyncio.create_task(continued(there, request_id))
            events = await events_of(answer)
        error = events[-2][1]["error"]
        assert (error["code"], error["message"]) == (409, "The stream of this request goes on at another connection.")
        assert merged(await taking)[0]["ends"] == [("length", None)]


async def test_a_head_request_takes_no_stream_from_its_listener(pair: Pair) -> None:
    async with pair.client(0) as here, pair.client(1) as there:
        async with here.stream("POST", COMPLETIONS, json={"stream": True, **TEXT, "max_tokens": 100}) as answer:
            path = f"/v1/requests/{answer.headers['x-headrace-request-id']}/stream"
            looked = await there.head(path)
            assert (looked.status_code, looked.content) == (200, b"")
            assert looked.headers["content-type"] == answer.headers["content-type"]
            assert merged(await events_of(answer))[0]["ends"] == [("length", None)]


async def test_another_tenants_stream_is_not_found_and_ids_are_checked(pair: Pair) -> None:
    async with pair.client(0) as here, pair.client(1, BOB) as bob:
        request_id, _ = await streamed(here, COMPLETIONS, {**TEXT, "max_tokens": 3})
        for path in (f"/v1/requests/{request_id}", f"/v1/requests/{request_id}/stream"):
            assert (await bob.get(path)).status_code == 404
        for wrong in ("5", "0-1.1_1.1-0", "0--2", "x"):
            assert (await here.get(f"/v1/requests/{request_id}/stream", params={"starting_after": wrong})).status_code == 400


@pytest.mark.parametrize("case", [Case(CHATS, CHAT), Case(COMPLETIONS, {**TEXT, "n": 2, "logprobs": 2, "prompt": ["a", "b"]})])
async def test_the_whole_answer_of_an_ended_request_is_kept(pair: Pair, case: Case) -> None:
    async with pair.client(0) as here, pair.client(1) as there:
        answer = await here.post(case.path, json=case.body)
        request_id = answer.headers["x-headrace-request-id"].partition(", ")[0]
        record = await until_state(there, request_id, "ended")
        assert record["answer"] == answer.json()
        assert record["finish_reason"] == "length" and record["external_id"] in answer.json()["id"]


async def test_a_request_ends_with_its_client_unless_it_is_resumable(pair: Pair) -> None:
    async with pair.client(0) as here, pair.client(1) as there:
        lost, _ = await streamed(here, COMPLETIONS, {**TEXT, "max_tokens": 1500, "resumable": False}, most=2)
        short, _ = await streamed(here, COMPLETIONS, {**TEXT, "max_tokens": 1500, "resumable": 0.5}, most=2)
        kept, _ = await streamed(
            here, COMPLETIONS, {**TEXT, "max_tokens": 100, "resumable": None}, most=2, **{"x-headrace-resumable": "30"}
        )
        assert (await until_state(there, lost, "ended"))["finish_reason"] == "abort"
        assert (await until_state(there, short, "ended"))["finish_reason"] == "abort"
        assert (await until_state(there, kept, "ended"))["finish_reason"] == "length"
        for wrong in (-1, 1e9):
            assert (await here.post(COMPLETIONS, json={**TEXT, "resumable": wrong})).status_code == 400


async def test_retries_with_an_idempotency_key_have_one_answer(pair: Pair) -> None:
    headers = {"Idempotency-Key": "fish-1"}
    body = {**CHAT, "seed": None, "temperature": 1.0, "max_tokens": 100}
    async with pair.client(0) as here, pair.client(1) as there:
        answers = await asyncio.gather(*[(there if i % 2 else here).post(CHATS, json=body, headers=headers) for i in range(40)])
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.text for answer in answers}) == 1
        later = await there.post(CHATS, json=body, headers=headers)
        assert later.text == answers[0].text
        other = await here.post(CHATS, json={**body, "max_tokens": 7}, headers=headers)
        assert other.status_code == 422 and other.json()["error"]["type"] == "IdempotencyKeyReused"
        listed = (await here.get("/v1/requests", params={"state": "all"})).json()["data"]
        assert len([each for each in listed if each["max_tokens"] == 100 and each["endpoint"] == CHATS]) == 1
    async with pair.client(0, BOB) as bob:
        assert (await bob.post(CHATS, json=body, headers=headers)).json()["id"] != later.json()["id"]


async def test_a_retried_stream_begins_anew_and_the_first_one_ends_whole(pair: Pair) -> None:
    body = {**TEXT, "max_tokens": 150, "stream": True}
    headers = {"Idempotency-Key": "fish-2"}

    async def stream(place: int) -> dict[str, Any]:
        async with pair.client(place) as http, http.stream("POST", COMPLETIONS, json=body, headers=headers) as answer:
            return merged(await events_of(answer))

    told = await asyncio.gather(*[stream(place % 2) for place in range(6)])
    assert told[0][0]["ends"] == [("length", None)]
    assert all(each == told[0] for each in told)


async def test_a_retry_finds_the_request_whose_client_gave_up(pair: Pair) -> None:
    body, headers = {**TEXT, "max_tokens": 200}, {"Idempotency-Key": "fish-3"}
    async with pair.client(0) as here, pair.client(1) as there:
        with pytest.raises(httpx.ReadTimeout):
            await here.post(COMPLETIONS, json=body, headers=headers, timeout=0.3)
        answer = await there.post(COMPLETIONS, json=body, headers=headers)
        assert answer.json()["usage"]["completion_tokens"] == 200
        listed = (await there.get("/v1/requests", params={"state": "all"})).json()["data"]
        assert len([each for each in listed if each["max_tokens"] == 200]) == 1


async def test_a_retry_does_not_get_the_beginning_of_an_aborted_answer(pair: Pair) -> None:
    body, headers = {**TEXT, "max_tokens": 190, "request_id": "fish-4"}, {"Idempotency-Key": "fish-4"}
    async with pair.client(0) as here, pair.client(1) as there:
        first = asyncio.create_task(here.post(COMPLETIONS, json=body, headers=headers))
        await until_state(here, "fish-4", "running")
        retry = asyncio.create_task(there.post(COMPLETIONS, json=body, headers=headers))
        await until_loaded(there)
        assert (await here.post("/v1/requests/fish-4/cancel")).status_code == 200
        assert (await first).json()["choices"][0]["finish_reason"] == "abort"
        refused = await retry
        assert refused.status_code == 503 and refused.headers["Retry-After"]
        again = await there.post(COMPLETIONS, json=body, headers=headers)
        assert again.json()["usage"]["completion_tokens"] == 190


async def test_a_retried_stream_does_not_join_a_request_that_is_being_aborted(pair: Pair) -> None:
    """Its first client got a 503, say, and the engine has the order to end it and has not obeyed yet."""
    body, headers = {**TEXT, "max_tokens": 180, "stream": True, "request_id": "fish-5"}, {"Idempotency-Key": "fish-5"}
    async with pair.client(0) as here, pair.client(1) as there:
        first = asyncio.create_task(here.post(COMPLETIONS, json=body, headers=headers))
        await until_state(here, "fish-5", "running")
        pair.server.engine.send_signal(signal.SIGSTOP)  # for less than its time to live
        try:
            cancel = asyncio.create_task(here.post("/v1/requests/fish-5/cancel"))
            await until_ordered(pair.server.redis.url, "fish-5")
            retry = asyncio.create_task(there.post(COMPLETIONS, json=body, headers=headers))
            await asyncio.wait({retry}, timeout=1.0)
        finally:
            pair.server.engine.send_signal(signal.SIGCONT)
        refused = await retry
        assert refused.status_code == 503 and refused.headers["Retry-After"], refused.text
        await asyncio.gather(first, cancel)
        async with there.stream("POST", COMPLETIONS, json=body, headers=headers) as again:
            assert merged(await events_of(again))[0]["ends"] == [("length", None)]


async def until_ordered(redis_url: str, external_id: str) -> None:
    """The request's record has the order to end it."""
    async with redis.asyncio.Redis.from_url(redis_url) as client:

        async def ordered() -> bool:
            names = [name async for name in client.scan_iter(f"*:record:{external_id}*")]
            return bool(names) and bool(await client.hexists(names[0], "finish:-1"))

        await wait_for_async(ordered, "an order to end the request")


async def test_a_stopping_server_hands_its_resumable_streams_on(pair: Pair) -> None:
    process, url = pair.server.start_api("--shutdown-timeout", "30")
    pair.server.wait_until_healthy(url)
    body = {**TEXT, "max_tokens": 150}
    async with httpx.AsyncClient(base_url=url, headers=ALICE, timeout=60) as stopping, pair.client(1) as there:
        want = merged((await streamed(there, COMPLETIONS, body))[1])
        async with stopping.stream("POST", COMPLETIONS, json={"stream": True, "resumable": True, **body}) as answer:
            request_id = answer.headers["x-headrace-request-id"]
            process.send_signal(signal.SIGTERM)
            seen = await events_of(answer)
        assert seen[-2][1]["error"]["code"] == 503
        told = seen[:-2]
        assert merged(told + await continued(there, request_id, told[-1][0] if told else "")) == want
    assert pair.server.ended(process) == 0


async def test_streams_of_a_killed_api_server_go_on_at_the_other(pair: Pair) -> None:
    process, url = pair.server.start_api()
    pair.server.wait_until_healthy(url)
    bodies = [{**TEXT, "max_tokens": 120, "n": 1 + number % 2, "stop": ["zzzz never"]} for number in range(16)]
    async with httpx.AsyncClient(base_url=url, headers=ALICE, timeout=60) as doomed, pair.client(1) as there:
        wanted = [merged((await streamed(there, COMPLETIONS, body))[1]) for body in bodies[:2]]
        pieces = await broken_streams(doomed, COMPLETIONS, bodies, 20, lambda: process.send_signal(signal.SIGKILL))
        pair.server.ended(process)
        rest = await asyncio.gather(*[continued(there, request_id, before[-1][0]) for request_id, before in pieces])
    for number, ((_, before), after) in enumerate(zip(pieces, rest, strict=True)):
        assert merged(before + after) == wanted[number % 2]
