"""Messages that leave the server."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from api.app import create_app
from api.errors import MAX_MESSAGE, GenerationError, ServiceUnavailable, as_api_error, body_of, sanitize_message
from engine.bus.call import BusUnavailable
from engine.config import ApiConfig, RedisConfig


def test_messages_hide_addresses_frames_and_paths() -> None:
    said = sanitize_message('<X object at 0x7f00aa> File "/srv/app/x.py", line 3, in f: cannot open /etc/secret/key.pem')
    assert said == "<X object> <frame>: cannot open <path>"


def test_long_messages_are_cut() -> None:
    body = msgspec.json.decode(body_of(GenerationError("x" * 10_000)))
    assert len(body["error"]["message"]) == MAX_MESSAGE


def test_an_exceptions_text_is_not_shown_to_clients() -> None:
    assert as_api_error(RuntimeError("secret")).message == "Internal server error."
    away = as_api_error(BusUnavailable("10.0.0.1 refused"))
    assert isinstance(away, ServiceUnavailable)
    assert away.headers["Retry-After"]
    assert "10.0.0.1" not in away.message


@pytest.mark.parametrize("content", [b'{"prompt": "x"}', b'{"prompt": "x", "n": "one"}'])
async def test_an_uncaught_exception_is_one_500_without_details(
    monkeypatch: pytest.MonkeyPatch, caplog: Any, content: bytes
) -> None:
    """One 500 without details, which pages of an allowed origin may read, and one log line with them. A bad body comes first."""

    def fail(service: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("api.submit._admit", fail)
    transport = httpx.ASGITransport(create_app(ApiConfig(allowed_origins=["http://page"]), RedisConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        headers = {"Content-Type": "application/json", "X-Request-Id": "told", "Origin": "http://page"}
        answer = await client.post("/v1/completions", content=content, headers=headers)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["access-control-allow-origin"] == "http://page"
    error = answer.json()["error"]
    if b"one" in content:
        assert (answer.status_code, error["param"]) == (400, "body.n")
        return
    assert (answer.status_code, error["message"], error["type"]) == (500, "Internal server error.", "InternalServerError")
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.request_id == "told" and "secret" in record.exc_text
