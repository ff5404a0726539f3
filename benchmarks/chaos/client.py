"""A good client: it goes to another API server when one is gone.

It takes a stream up where it broke, and repeats a request under the same idempotency key.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from benchmarks.chaos.answers import Answer
from benchmarks.chaos.cases import Case

Behaviour = Literal["stream", "unary", "slow", "abort", "resume", "retry", "duplicate"]

PAUSE_SECONDS = 0.5  # a shorter time without a token is none
RETRY_SECONDS = 0.25  # between two tries
SILENCE_SECONDS = 60.0  # in which a connection brings nothing at all, keep-alive comments included
MOST_SLOW = 64  # events that a slow client takes slowly: then it reads what was kept for it
WANTED = {"return_token_ids": True, "return_tokens_as_token_ids": True}


class Broken(Exception):
    """The connection ended before the answer did, or the server asked to come again."""


class Failed(Exception):
    """The server gave an error as the answer."""


@dataclass(frozen=True)
class Item:
    """One request of the load."""

    number: int
    case: Case
    behaviour: Behaviour
    server: int  # where it begins
    cut: int  # events, or tenths of a second, after which a client that leaves does so

    @classmethod
    def draw(cls, seed: int, number: int, cases: Sequence[Case], behaviours: Sequence[Behaviour], num_servers: int) -> Item:
        chance = random.Random(f"item {seed} {number}")
        return cls(
            number, chance.choice(cases), chance.choice(behaviours), chance.randrange(num_servers), chance.choice((1, 2, 5, 12))
        )


@dataclass
class Outcome:
    """How a request went, as its client saw it."""

    item: Item
    answer: Answer = field(default_factory=Answer)
    other: Answer | None = None  # of a duplicate's second connection
    is_whole: bool = False  # the client stayed to the end, and the end came
    error: str = ""
    request_id: str = ""
    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    pauses: list[tuple[float, float]] = field(default_factory=list)  # begin and end of each, the wait for the first token included
    restarts: int = 0  # a stream could not go on, and was asked for again under its key
    history: list[str] = field(default_factory=list)  # what happened on the way, for the report

    def note(self, what: str) -> None:
        self.history.append(f"{time.monotonic() - self.started:.2f} s: {what}")


class Client:
    """Asks the API servers at `urls`."""

    def __init__(self, urls: Sequence[str]) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        timeout = httpx.Timeout(SILENCE_SECONDS, connect=5.0)
        self._servers = [httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout) for url in urls]

    async def close(self) -> None:
        for server in self._servers:
            await server.aclose()

    async def calm_answer(self, case: Case, top: int) -> Answer:
        """The whole answer with the logprobs of `top` candidates a token. Raises Failed."""
        logprobs = {"logprobs": True, "top_logprobs": top} if case.is_chat else {"logprobs": top}
        response = await self._servers[0].post(case.path, json={**case.body, **WANTED, **logprobs})
        if response.status_code != 200:
            raise Failed(response.text)
        answer = Answer()
        answer.add(response.json())
        return answer

    async def ask(self, item: Item, most_seconds: float) -> Outcome:
        """The outcome of a request. One that takes longer than `most_seconds` is given up as stuck."""
        outcome = Outcome(item)
        conversation = _Conversation(self._servers, outcome, outcome.answer, str(uuid.uuid4()))
        try:
            async with asyncio.timeout(most_seconds):
                if item.behaviour == "duplicate":
                    await self._ask_twice(conversation, outcome)
                else:
                    await conversation.run()
        except Failed as error:
            outcome.error = str(error)
        except TimeoutError:
            outcome.error = "stuck"
        outcome.ended = time.monotonic()
        return outcome

    async def _ask_twice(self, first: _Conversation, outcome: Outcome) -> None:
        """The same request under one key, through two API servers at once."""
        outcome.other = Answer()
        second = _Conversation(self._servers, outcome, outcome.other, first.key, shift=1)
        await asyncio.gather(first.run(), second.run())


class _Conversation:
    """One answer in the making, over as many connections as it takes."""

    def __init__(self, servers: Sequence[httpx.AsyncClient], outcome: Outcome, answer: Answer, key: str, shift: int = 0) -> None:
        self.key = key
        self._servers = servers
        self._outcome = outcome
        self._answer = answer
        self._item = item = outcome.item
        self._next_server = item.server + shift
        self._streams = item.behaviour in ("stream", "slow", "abort", "resume", "duplicate")
        self._cuts_left = 1 if item.behaviour in ("abort", "resume", "retry") else 0
        self._event_id = ""
        self._num_events = 0
        self._silent_since = time.monotonic()

    async def run(self) -> None:
        """Until the whole answer is there, or the client leaves for good. Raises Failed."""
        while True:
            server = self._servers[self._next_server % len(self._servers)]
            try:
                await (self._stream(server) if self._streams else self._whole(server))
            except (Broken, httpx.TransportError) as error:
                self._outcome.note(f"{type(error).__name__} {error}")
                self._next_server += 1
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    async def _whole(self, server: httpx.AsyncClient) -> None:
        item = self._item
        post = server.post(item.case.path, json={**item.case.body, **WANTED}, headers={"Idempotency-Key": self.key})
        if self._cuts_left:
            self._cuts_left -= 1
            try:
                response = await asyncio.wait_for(post, 0.1 * item.cut)
            except TimeoutError:
                raise Broken("left by plan") from None
        else:
            response = await post
        self._check(response.status_code, response.headers, response.content)
        self._answer.add(response.json())
        self._outcome.is_whole = True
        self._got_tokens()

    async def _stream(self, server: httpx.AsyncClient) -> None:
        async with self._open_stream(server) as response:
            if response.status_code == 404 and self._event_id:
                self._event_id = ""
                self._outcome.restarts += 1
                raise Broken("the server does not know the request now")
            if response.status_code != 200:
                self._check(response.status_code, response.headers, await response.aread())
            self._outcome.request_id = response.headers.get("x-headrace-request-id", self._outcome.request_id)
            async for event_id, data in _events(response):
                if data == "[DONE]":
                    self._outcome.is_whole = True
                    return
                self._take(json.loads(data))
                self._event_id = event_id
                if self._cuts_left and self._num_events >= self._item.cut:
                    self._cuts_left -= 1
                    if self._item.behaviour == "abort":
                        return
                    raise Broken("left by plan")
                if self._item.behaviour == "slow" and self._num_events < MOST_SLOW:
                    await asyncio.sleep(0.15)
                    self._silent_since = time.monotonic()
        raise Broken("the stream ended without [DONE]")

    def _open_stream(self, server: httpx.AsyncClient) -> Any:
        case = self._item.case
        if self._event_id:
            path = f"/v1/requests/{self._outcome.request_id}/stream"
            return server.stream("GET", path, headers={"Last-Event-ID": self._event_id})
        self._answer.choices.clear()  # nothing to go on from: from the beginning, under the same key
        body = {**case.body, **WANTED, "stream": True, "stream_options": {"include_usage": True}}
        body["resumable"] = self._item.behaviour != "abort"
        return server.stream("POST", case.path, json=body, headers={"Idempotency-Key": self.key})

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            error = chunk["error"]
            raise Broken(error["message"]) if error["code"] == 503 else Failed(error["message"])
        if self._answer.add(chunk):
            self._num_events += 1
            self._got_tokens()

    def _got_tokens(self) -> None:
        now = time.monotonic()
        if self._streams and now - self._silent_since > PAUSE_SECONDS:
            self._outcome.pauses.append((self._silent_since, now))
        self._silent_since = now

    def _check(self, status: int, headers: httpx.Headers, content: bytes) -> None:
        """Raises Broken for a refusal that asks to come again, Failed for any other error."""
        if status in (429, 503) and "retry-after" in headers:
            raise Broken(f"{status}: {content[:200].decode(errors='replace')}")
        if status != 200:
            raise Failed(f"{status}: {content[:500].decode(errors='replace')}")


async def _events(response: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """Id and data of each event; an event without an id has its predecessor's."""
    event_id = ""
    async for line in response.aiter_lines():
        if line.startswith("id:"):
            event_id = line[3:].strip()
        elif line.startswith("data:"):
            yield event_id, line[5:].strip()
