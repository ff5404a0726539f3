"""Bodies on their way into an endpoint: parsed once, however they come; what is wrong with them is told as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request
from starlette.types import Message

from api.errors import install_error_handlers
from api.http.json_route import CLIENT_CLOSED_REQUEST, JsonRoute
from api.http.middleware import BodyLimit
from api.request.schemas import CompletionRequest

MAX_BYTES = 200
JSON = {"content-type": "application/json"}
router = APIRouter(route_class=JsonRoute)


@router.post("/here")
async def here(body: CompletionRequest, request: Request) -> dict[str, Any]:
    return {"prompt": body.prompt}


@router.get("/here")
async def without_body(request: Request, limit: int = 1) -> dict[str, Any]:
    return {"limit": limit}


async def ask(*pieces: bytes, headers: dict[str, str] = JSON, leaves: bool = False, **scope: Any) -> tuple[int, Any]:
    """Status and body of the answer to a request whose body comes in `pieces`; `leaves`: the client, before its last one."""
    app = FastAPI()
    app.include_router(router)
    install_error_handlers(app)
    messages: list[Message] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    if leaves:
        messages.append({"type": "http.disconnect"})
    elif messages:
        messages[-1]["more_body"] = False
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    request = {"type": "http", "method": "POST", "path": "/here", "query_string": b"", "headers": pairs, **scope}
    await BodyLimit(app, MAX_BYTES)(request, receive, send)
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(body) if body else None


async def told(*pieces: bytes, **more: Any) -> tuple[int, str, str | None]:
    """Status, message and param of an error."""
    status, answer = await ask(*pieces, **more)
    return status, answer["error"]["message"], answer["error"]["param"]


async def test_a_body_in_pieces() -> None:
    assert await ask(b'{"prom', b'pt": "x"}') == (200, {"prompt": "x"})


@pytest.mark.parametrize(
    ("content", "prompt"),
    [
        (b'{"prompt": [1, 2, 3.0], "unknown": {"a": [null, 1e400]}}', [1, 2, 3]),
        ('{"prompt": "\u00e4\U0001f600", "max_tokens": 1e0}'.encode(), "\u00e4\U0001f600"),
        (b'{"prompt": "\\ud83d\\ude00"}', "\U0001f600"),
        (b'\xef\xbb\xbf{"prompt": "x"}', "x"),
    ],
)
async def test_a_valid_body_reaches_the_endpoint(content: bytes, prompt: Any) -> None:
    assert await ask(content) == (200, {"prompt": prompt})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "EOF while parsing a value"),
        (b"{", "EOF while parsing an object"),
        (b'{"prompt": "x",}', "trailing comma"),
        (b'{"prompt": "\xff"}', "invalid unicode code point"),
        (b'{"prompt": "\\ud800"}', "unexpected end of hex escape"),
        (b'{"unknown": "x \\uDC00"}', "lone leading surrogate in hex escape"),
        (b'{"prompt": "x"}'.decode().encode("utf-16"), "expected value"),
    ],
)
async def test_a_body_that_is_not_json_is_refused(content: bytes, said: str) -> None:
    status, message, param = await told(content)
    assert (status, param) == (400, "body")
    assert message.startswith(f"1 validation error:\n  body: Invalid JSON: {said} at line 1 column ")
    assert message.endswith("(type=json_invalid)"), "the body is not repeated"


async def test_every_wrong_field_is_named_up_to_ten() -> None:
    status, message, param = await told(json.dumps({"prompt": "x", "n": "one", "seed": []}).encode())
    assert (status, param) == (400, "body.n")
    assert [line.split(":")[0] for line in message.splitlines()] == ["2 validation errors", "  body.n", "  body.seed"]
    _, message, _ = await told(json.dumps({"prompt": "x", "logit_bias": {str(token_id): "x" for token_id in range(12)}}).encode())
    assert message.splitlines()[-1] == "  ... and 2 more"


async def test_an_error_repeats_only_the_beginning_of_a_large_value() -> None:
    _, message, _ = await told(b'{"prompt": "x", "n": [%b]}' % b",".join([b"0"] * 60))
    assert message.endswith("input=[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ...])")


@pytest.mark.parametrize("given", ["text/plain", "", "application/json-seq"])
async def test_only_json_is_read(given: str) -> None:
    status, message, param = await told(b'{"prompt": "x"}', headers={"content-type": given})
    assert (status, param) == (400, "header.content-type") and f"input={given!r}" in message


async def test_a_content_type_may_have_parameters() -> None:
    assert await ask(b'{"prompt": "x"}', headers={"content-type": "Application/JSON; charset=utf-8"}) == (200, {"prompt": "x"})


async def test_a_client_that_leaves_before_the_bodys_end_gets_no_error_answer() -> None:
    assert await ask(b'{"prompt"', leaves=True) == (CLIENT_CLOSED_REQUEST, None)


@pytest.mark.parametrize("told_beforehand", [True, False])
async def test_a_body_over_the_limit_is_a_413(told_beforehand: bool) -> None:
    headers = {**JSON, "content-length": "300"} if told_beforehand else JSON
    status, message, _ = await told(b"[" * 150, b"[" * 150, headers=headers)
    assert (status, message) == (413, f"The request body is larger than {MAX_BYTES} bytes.")


async def test_fastapi_handles_a_route_without_a_body() -> None:
    assert await ask(method="GET", query_string=b"limit=3") == (200, {"limit": 3})
    assert (await told(method="GET", query_string=b"limit=x"))[::2] == (400, "query.limit")
