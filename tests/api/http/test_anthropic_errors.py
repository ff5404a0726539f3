"""Errors of Anthropic's routes as its client raises them, whichever layer refuses. In process: no Redis is reached."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2
import pytest

from api.app import create_app
from api.errors import (
    ApiError,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    GenerationError,
    IdempotencyKeyReused,
    ServiceUnavailable,
    TooManyRequests,
)
from engine.config import ApiConfig, RedisConfig

SERVER = "http://server"
HELLO: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
RAISED: list[tuple[Exception, type[anthropic.APIStatusError], int, str]] = [
    (IdempotencyKeyReused("x"), anthropic.UnprocessableEntityError, 422, "invalid_request_error"),
    (TooManyRequests("x"), anthropic.RateLimitError, 429, "rate_limit_error"),
    (Forbidden("x"), anthropic.PermissionDeniedError, 403, "permission_error"),
    (Conflict("x"), anthropic.ConflictError, 409, "invalid_request_error"),
    (ServiceUnavailable("x"), anthropic.InternalServerError, 503, "overloaded_error"),
    (DeadlineExceeded("x"), anthropic.InternalServerError, 504, "timeout_error"),
    (GenerationError("x"), anthropic.InternalServerError, 500, "api_error"),
    (RuntimeError("secret"), anthropic.InternalServerError, 500, "api_error"),
]


def transport(**config: Any) -> httpx2.ASGITransport:
    return httpx2.ASGITransport(create_app(ApiConfig(**config), RedisConfig()))


async def refused(over: httpx2.ASGITransport, key: str = "key-a", **body: Any) -> anthropic.APIStatusError:
    http = httpx2.AsyncClient(transport=over)
    async with anthropic.AsyncAnthropic(base_url=SERVER, api_key=key, max_retries=0, http_client=http) as client:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await client.messages.create(**{**HELLO, **body})
    assert caught.value.request_id
    return caught.value


def body_of(error: anthropic.APIStatusError, type: str, message: str) -> bool:
    told = {"type": "error", "error": {"type": type, "message": message}, "request_id": error.request_id}
    return error.body == told and int(error.response.headers["content-length"]) == len(error.response.content)


@pytest.mark.parametrize(("raised", "kind", "status", "type"), RAISED)
async def test_what_a_route_raises(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: type[anthropic.APIStatusError], status: int, type: str
) -> None:
    def fail(service: object) -> None:
        raise raised

    monkeypatch.setattr("api.submit._admit", fail)
    error = await refused(transport())
    assert isinstance(error, kind) and error.status_code == status
    assert body_of(error, type, raised.message if isinstance(raised, ApiError) else "Internal server error.")


async def test_what_a_layer_raises_that_nobody_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*keys: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("api.http.key_ring.KeyRing.identify", fail)
    error = await refused(transport())
    assert error.status_code == 500
    assert body_of(error, "api_error", "Internal server error.")


async def test_keys_and_sizes_and_an_absent_redis() -> None:
    over = transport(api_key=["alice=key-a"], max_request_bytes=1000)
    stranger = await refused(over, "wrong")
    assert isinstance(stranger, anthropic.AuthenticationError)
    assert body_of(stranger, "authentication_error", "Invalid or missing API key.")
    large = await refused(over, system="x" * 1000)
    assert isinstance(large, anthropic.RequestTooLargeError)
    assert body_of(large, "request_too_large", "The request body is larger than 1000 bytes.")
    away = await refused(over)
    assert (away.status_code, away.type) == (503, "overloaded_error")
    assert away.response.headers["retry-after"] == "1"


async def test_only_anthropics_routes_speak_so() -> None:
    async with httpx2.AsyncClient(transport=transport(), base_url=SERVER) as client:
        for path, is_anthropics in (("/v1/messages/batches", True), ("/v1/messagesx", False), ("/v1/nothing", False)):
            answer = await client.post(path, json={}, headers={"X-Request-Id": "mine"})
            assert answer.status_code == 404
            if is_anthropics:
                error = {"type": "not_found_error", "message": f"There is no POST {path} on this server."}
                assert answer.json() == {"type": "error", "error": error, "request_id": "mine"}
                assert answer.headers["request-id"] == "mine"
            else:
                assert answer.json()["error"]["code"] == 404
                assert "request-id" not in answer.headers
