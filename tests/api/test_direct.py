"""The direct way of completion requests and FastAPI's: the same answers, whatever is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from api.direct import DirectRoutes
from api.schemas import CompletionRequest
from tests.api.live_server import LiveServer

IDS = {"X-Request-Id": "same"}
CHAT = [{"role": "user", "content": "x"}]
COMPLETIONS = [
    {"prompt": "x"},
    {"prompt": [1, 2, 3.0], "n": 2, "temperature": 1, "stop": ["a", "b"], "logit_bias": {"5": 1, "7": -2.5}},
    {"prompt": [[1], [2, 3]], "logprobs": 2, "unknown": {"a": [None, 1e400]}},
    {"prompt": ["x", "y"], "stream": True, "stream_options": {"include_usage": True}},
    {"prompt": "\u00e4\U0001f600", "stream": True, "max_tokens": 1e0},
    {"prompt": "x", "model": "nobody"},
    {"prompt": "x", "temperature": 9},
    {"prompt": "x", "temperature": "warm"},
    {"prompt": "x", "n": True, "min_p": float("nan")},
    {"prompt": [1, -1]},
    {"prompt": [1, "x"]},
    {"prompt": "\ud800"},
    {"prompt": None},
    {"prompt": "x", "seed": 2**63},
    [],
    None,
    "x",
]
CHATS = [
    {"messages": CHAT},
    {"messages": [*CHAT, {"role": "assistant", "content": None, "extra": 1}, *CHAT], "logprobs": True, "top_logprobs": 2},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "stream": True},
    {"messages": []},
    {"messages": [{"content": "x"}]},
    {"messages": CHAT, "response_format": {"type": "text"}},
    {"messages": CHAT, "tools": []},
]
GOOD = '{"prompt": "x", "seed": 3}'
RAW = [
    b"",
    b"{",
    b'{"prompt": "x",}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "x", "priority": 1%b}' % (b"0" * 5000),
    b"[" * 5000,
    GOOD.encode("utf-16"),
    GOOD.encode("utf-8-sig"),
]
QUESTIONS = [
    *(("/v1/completions", _body) for _body in COMPLETIONS),
    *(("/v1/chat/completions", _body) for _body in CHATS),
    *(("/v1/completions", _raw) for _raw in RAW),
]


@pytest.mark.parametrize(("path", "body"), QUESTIONS)
def test_both_ways_answer_the_same(null_server: LiveServer, path: str, body: Any) -> None:
    """A body whose length is not told beforehand goes FastAPI's way."""
    if isinstance(body, dict):
        body = {"seed": 3, "max_tokens": 4, "ignore_eos": True, **body}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **IDS}
    direct = null_server.http.post(path, content=content, headers=headers)
    other = null_server.http.post(path, content=_in_chunks(content), headers=headers)
    assert direct.status_code == other.status_code
    assert direct.headers.keys() == other.headers.keys()
    assert _without_times(direct.text) == _without_times(other.text)


def _in_chunks(content: bytes) -> Iterator[bytes]:
    yield content


def _without_times(text: str) -> Any:
    """Chunks of several choices come in no fixed order."""
    if not text.startswith("data: "):
        return {**json.loads(text), "created": 0}
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + (choice.get("text") or choice.get("delta", {}).get("content") or "")
    return texts, chunks[-1].get("usage"), text.endswith("data: [DONE]\n\n")


router = APIRouter()


@router.post("/here")
async def here(body: CompletionRequest, request: Request) -> Response:
    return Response(f"direct {body.prompt}")


class Exchange:
    """One request of `DirectRoutes` in front of an application that says what it received."""

    def __init__(
        self, *messages: Message, path: str = "/here", method: str = "POST", headers: dict[str, str] | None = None
    ) -> None:
        self._messages = list(messages)
        headers = {"content-type": "application/json", "content-length": "20"} if headers is None else headers
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._scope = {"type": "http", "method": method, "path": path, "headers": pairs, "state": {}}
        self._sent = b""

    async def answer(self) -> str:
        await DirectRoutes(self._app, [router], max_bytes=100)(self._scope, self._receive, self._send)
        return self._sent.decode()

    async def _receive(self) -> Message:
        return self._messages.pop(0) if self._messages else {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self._sent += message.get("body", b"")

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = []
        while not received or received[-1].get("more_body", False):
            received.append(await receive())
        text = "+".join(message.get("body", message["type"].encode()).decode() for message in received)
        await Response(f"other {text}")(scope, receive, send)


def piece(body: str, more: bool = False) -> Message:
    return {"type": "http.request", "body": body.encode(), "more_body": more}


async def test_a_body_in_pieces() -> None:
    assert await Exchange(piece('{"prom', True), piece('pt": "x"}')).answer() == "direct x"


async def test_what_is_not_valid_is_given_on_as_it_came() -> None:
    assert await Exchange(piece('{"prom', True), piece('pt": {}}')).answer() == 'other {"prom+pt": {}}'


async def test_a_client_that_leaves_before_the_bodys_end() -> None:
    assert await Exchange(piece('{"prom', True)).answer() == 'other {"prom+http.disconnect'


@pytest.mark.parametrize(
    "change",
    [
        {"path": "/there"},
        {"method": "PUT"},
        {"headers": {}},
        {"headers": {"content-type": "application/json"}},
        {"headers": {"content-type": "text/plain", "content-length": "20"}},
        {"headers": {"content-type": "application/json", "content-length": "101"}},
        {"headers": {"content-type": "application/json", "content-length": "-1"}},
    ],
)
async def test_what_is_out_of_the_ordinary_is_not_touched(change: dict[str, Any]) -> None:
    assert await Exchange(piece('{"prompt": "x"}'), **change).answer() == 'other {"prompt": "x"}'


async def test_a_content_type_with_parameters() -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8", "content-length": "20"}
    assert await Exchange(piece('{"prompt": "x"}'), headers=headers).answer() == "direct x"
