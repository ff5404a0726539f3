"""Probes, models, tokenizer routes: what surrounds generation."""

from __future__ import annotations

from contextlib import suppress
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from api.app_state import Service
from api.errors import ServiceUnavailable
from api.routes.health import check
from api.text.tokenizer import TextTokenizer
from api.version import VERSION
from engine.bus import leases
from engine.config import ApiConfig, RedisConfig
from tests.api.live_server import LiveServer
from tests.engine.bus.ledger_world import engine_info
from tests.waiting import wait_for_async


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/health"), ("GET", "/live"), ("GET", "/ready"), ("GET", "/ping"), ("POST", "/ping")]
)
def test_probes_answer_200_while_an_engine_lives(null_server: LiveServer, method: str, path: str) -> None:
    answer = null_server.http.request(method, path)
    assert (answer.status_code, answer.content) == (200, b"")


async def test_an_engine_is_seen_when_it_comes(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next probe, without a round of housekeeping. Where there is none, probes do not ask Redis each time."""
    monkeypatch.setattr("engine.client.client.HOUSEKEEPING_SECONDS", 60.0)
    monkeypatch.setattr("api.app_state.SEEK_SECONDS", 0.2)
    service = Service(ApiConfig(), RedisConfig(redis_url=redis_url))

    async def is_healthy() -> bool:
        with suppress(ServiceUnavailable):
            await check(service)
            return True
        return False

    await service.start()
    try:
        with pytest.raises(ServiceUnavailable, match="No live engine"):
            await check(service)
        await service.bus.run(leases.claim_slot("tiny", engine_info("tiny")))
        with pytest.raises(ServiceUnavailable, match="No live engine"):
            await check(service)
        await wait_for_async(is_healthy, "the engine")
    finally:
        await service.close()


@pytest.mark.parametrize("path", ["/health", "/live", "/ready", "/ping", "/v1/models", "/v1/models/tiny", "/metrics", "/version"])
def test_head_is_get_without_the_body(null_server: LiveServer, path: str) -> None:
    head, get = null_server.http.head(path), null_server.http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["x-request-id"]
    if path != "/metrics":  # which changes
        assert head.headers.get("content-length") == get.headers.get("content-length")


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/health", "GET, HEAD, OPTIONS"),
        ("/ping", "GET, POST, HEAD, OPTIONS"),
        ("/v1/models", "GET, HEAD, OPTIONS"),
        ("/v1/requests/any", "GET, DELETE, HEAD, OPTIONS"),
        ("/v1/completions", "POST, OPTIONS"),
    ],
)
def test_options_are_the_methods_of_a_path(null_server: LiveServer, path: str, allowed: str) -> None:
    answer = null_server.http.options(path)
    assert (answer.status_code, answer.headers["allow"], answer.content) == (204, allowed, b"")


def test_options_of_the_server_are_all_methods(slow_server: LiveServer) -> None:
    """`OPTIONS *` is a ping, as Go's net/http and Apache answer it; it needs no key."""
    url = urlsplit(slow_server.url)
    connection = HTTPConnection(url.hostname or "", url.port)
    connection.request("OPTIONS", "*")
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (204, b"")
    assert answer.headers["allow"] == "GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS"
    connection.request("GET", "*")
    assert connection.getresponse().status == 401
    connection.close()


def test_head_of_an_unknown_path_is_a_404(null_server: LiveServer) -> None:
    assert null_server.http.head("/nowhere").status_code == 404
    assert null_server.http.options("/nowhere").status_code == 404
    assert null_server.http.head("/v1/completions").status_code == 405


def test_version_and_load_are_shown(null_server: LiveServer) -> None:
    assert null_server.http.get("/version").json() == {"version": VERSION}
    assert null_server.http.get("/load").json() == {"server_load": 0}


def test_a_model_is_listed_and_found_by_name(null_server: LiveServer) -> None:
    listing = null_server.http.get("/v1/models").json()
    (card,) = listing["data"]
    assert listing["object"] == "list"
    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == ("tiny", "model", "headrace", 2048)
    assert null_server.http.get("/v1/models/tiny").json() == card


def test_tokenize_and_detokenize_are_inverse(null_server: LiveServer, tokenizer: TextTokenizer) -> None:
    body = {"prompt": "naïve 🚀", "return_token_strs": True}
    answer = null_server.http.post("/tokenize", json=body).json()
    token_ids = tokenizer.encode("naïve 🚀")
    assert answer["tokens"] == token_ids
    assert (answer["count"], answer["max_model_len"]) == (len(token_ids), 2048)
    assert answer["token_strs"] == [tokenizer.id_to_token(token_id) for token_id in token_ids]
    assert null_server.http.post("/detokenize", json={"tokens": token_ids}).json() == {"prompt": "naïve 🚀"}


def test_tokenize_messages_is_the_prompt_of_chat(null_server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    answer = null_server.http.post("/tokenize", json=body).json()
    chat = null_server.http.post("/v1/chat/completions", json={**body, "max_tokens": 1, "return_token_ids": True}).json()
    assert answer["tokens"] == chat["prompt_token_ids"]
    assert answer["token_strs"] is None


def test_empty_inputs_have_no_tokens_and_no_text(null_server: LiveServer) -> None:
    assert null_server.http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert null_server.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
