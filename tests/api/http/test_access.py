"""Keys at the door, sizes of bodies, limits of the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from http.client import HTTPConnection
from urllib.parse import urlsplit

import httpx
import pytest

from api.app import create_app
from engine.config import ApiConfig, RedisConfig
from tests.api.conftest import KEYS
from tests.api.live_server import LiveServer
from tests.api.request_states import until_live, until_none_lives

ALICE = {"Authorization": f"Bearer {KEYS['alice']}"}
GUARDED = [
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/requests"),
    ("DELETE", "/v1/requests/x"),
    ("GET", "/load"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
]


@pytest.mark.parametrize(("method", "path"), GUARDED)
@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic a2V5LWE="])
def test_a_request_without_a_known_key_is_a_401(slow_server: LiveServer, method: str, path: str, header: str | None) -> None:
    answer = slow_server.http.request(method, path, headers={"Authorization": header} if header else {})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json() == {
        "error": {"message": "Invalid or missing API key.", "type": "AuthenticationError", "param": None, "code": 401}
    }


@pytest.mark.parametrize("path", ["/health", "/live", "/ready", "/version", "/ping", "/metrics"])
def test_probes_need_none(slow_server: LiveServer, path: str) -> None:
    assert slow_server.http.get(path).status_code == 200


def test_a_request_with_a_key_is_answered(slow_server: LiveServer) -> None:
    assert slow_server.http.get("/v1/models", headers=ALICE).json()["data"][0]["id"] == "tiny"


def chunks() -> Iterator[bytes]:
    for _ in range(30):
        yield b"x" * 10_000


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_that_are_too_large(slow_server: LiveServer, chunked: bool) -> None:
    headers = {**ALICE, "Content-Type": "application/json"}
    answer = slow_server.http.post("/v1/completions", content=chunks() if chunked else b"x" * 100_001, headers=headers)
    assert answer.status_code == 413
    message = "The request body is larger than 100000 bytes."
    assert answer.json()["error"]["message"] == message
    assert answer.json()["error"]["code"] == 413


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_all_before_it_reads_gets_the_413_too(slow_server: LiveServer, chunked: bool) -> None:
    """http.client knows of no answer before its whole body is sent: a connection closed before would be reset."""
    address = urlsplit(slow_server.url)
    for _ in range(8):
        connection = HTTPConnection(str(address.hostname), address.port, timeout=60)
        body = (b"x" * 10_000 for _ in range(300)) if chunked else b"x" * 3_000_000
        headers = {**ALICE, "Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers, encode_chunked=chunked)
        assert connection.getresponse().status == 413
        connection.close()


async def test_a_full_queue_refuses_all_or_nothing(slow_server: LiveServer) -> None:
    """24 choices are the limit: 20 are in, five more do not come in, not even four of them."""
    async with httpx.AsyncClient(base_url=slow_server.url, headers=ALICE, timeout=60) as http:
        body = {"prompt": ["fill"] * 20, "max_tokens": 1500}
        filling = asyncio.create_task(http.post("/v1/completions", json=body))
        await until_live(http, 20)
        for fields in ({"prompt": ["x"] * 5}, {"prompt": "x", "n": 5, "stream": True}):
            refused = await http.post("/v1/completions", json={**fields, "max_tokens": 1})
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            error = refused.json()["error"]
            assert (error["type"], error["code"], error["param"]) == ("ServiceUnavailableError", 503, None)
            assert "with the new ones 25 choices would wait or run, the limit is 24" in error["message"]
        assert len((await http.get("/v1/requests")).json()["data"]) == 20
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)
        await until_none_lives(http)
    rejected = [line for line in slow_server.http.get("/metrics").text.splitlines() if "admission_rejections_total{" in line]
    assert any('reason="max_num_queued_reqs"' in line for line in rejected)


async def test_comments_keep_a_silent_stream_alive(slow_server: LiveServer) -> None:
    async with httpx.AsyncClient(base_url=slow_server.url, headers=ALICE, timeout=60) as http:
        filling = asyncio.create_task(http.post("/v1/completions", json={"prompt": ["fill"] * 8, "max_tokens": 1500}))
        await until_live(http, 7, "running")
        async with http.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 40, "stream": True}) as answer:
            lines = answer.aiter_lines()
            first, blank, second, another_blank = [await anext(lines) for _ in range(4)]
            assert first.startswith(": ") and second.startswith(": ") and blank == another_blank == "", "it waits, and says so"
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)
        await until_none_lives(http)


@pytest.mark.parametrize(("key", "status"), [("key-a", 503), ("wrong", 401)])
async def test_answers_name_the_allowed_origin_of_a_page(key: str, status: int) -> None:
    """A preflight and an answer name the origin, also an error: here Redis was never reached."""
    app = create_app(ApiConfig(allowed_origins=["http://page"], api_key=["alice=key-a"]), RedisConfig())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        asked = {
            "Origin": "http://page",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        preflight = await client.options("/v1/completions", headers=asked)
        headers = {"Origin": "http://page", "Authorization": f"Bearer {key}"}
        answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        elsewhere = await client.post("/v1/completions", json={"prompt": "x"}, headers={**headers, "Origin": "http://other"})
    assert preflight.status_code == 200
    assert answer.status_code == elsewhere.status_code == status
    assert preflight.headers["access-control-allow-origin"] == answer.headers["access-control-allow-origin"] == "http://page"
    assert "access-control-allow-origin" not in elsewhere.headers
