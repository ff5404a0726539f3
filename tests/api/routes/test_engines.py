"""Operators' calls into engines, and what a server says only when it was told to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from api.admission import NO_COMMON_VERSION
from engine.bus import leases
from engine.bus.connection import Bus
from tests.api.conftest import KEYS, NULL_ENGINE
from tests.api.live_server import LiveServer, sse_events
from tests.engine.bus.ledger_world import engine_info
from tests.waiting import wait_for

ASK = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}
NUMBERS = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[LiveServer]:
    """One model under three names."""
    options = ("--enable-per-request-metrics", "--enable-tokenizer-info-endpoint")
    names = ("--served-model-name", "alpha", "--served-model-name", "mid")
    with LiveServer(smollm2_gguf, (*NULL_ENGINE, *names), options, name="zulu") as server:
        yield server


def test_the_prefix_cache_is_forgotten(server: LiveServer) -> None:
    long = {**ASK, "prompt": list(range(100, 200))}
    server.http.post("/v1/completions", json=long)

    def reset() -> bool:
        answer = server.http.post("/reset_prefix_cache")
        assert answer.status_code == 200 and len(answer.json()["engines"]) == 1
        success: bool = answer.json()["success"]
        return success

    wait_for(reset, "an engine without requests")
    assert server.http.post("/reset_prefix_cache?model=alpha").json()["success"]
    assert server.http.post("/reset_prefix_cache?model=nobody").status_code == 404


def test_only_an_admin_may_reset_the_prefix_cache(slow_server: LiveServer) -> None:
    refused = slow_server.http.post("/reset_prefix_cache", headers={"Authorization": f"Bearer {KEYS['alice']}"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "PermissionDeniedError")
    assert slow_server.http.post("/reset_prefix_cache", headers={"Authorization": f"Bearer {KEYS['ops']}"}).status_code == 200


def test_an_engine_without_a_common_version_gets_no_requests(null_server: LiveServer) -> None:
    """Until it has gone."""

    def status() -> int:
        answer = null_server.http.post("/v1/completions", json=ASK)
        if answer.status_code == 503:
            assert answer.json()["error"]["message"] == NO_COMMON_VERSION and answer.headers["retry-after"]
        return answer.status_code

    with Bus(null_server.redis.url) as bus:
        bus.run(leases.claim_slot(null_server.name, replace(engine_info(null_server.name), protocol_versions=[1]), ttl=1.0))
        wait_for(lambda: status() == 503, "the API server to see the engine")
    wait_for(lambda: status() == 200, "the end of its heartbeat")


def test_tokenizer_info_is_shown_only_if_enabled(server: LiveServer, null_server: LiveServer) -> None:
    told = server.http.get("/tokenizer_info").json()
    assert told["eos_token"] == "<|im_end|>" and "messages" in told["chat_template"]
    assert null_server.http.get("/tokenizer_info").status_code == 404


def test_names_are_listed_as_given_and_metrics_have_the_first(server: LiveServer) -> None:
    assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == ["zulu", "alpha", "mid"]
    for name in ("mid", "zulu"):
        assert server.http.post("/v1/completions", json={**ASK, "model": name}).json()["model"] == name
    assert server.http.post("/v1/completions", json=ASK).json()["model"] == "zulu"
    lines = server.http.get("/metrics").text.splitlines()
    labels = {line.split('model_name="')[1].split('"')[0] for line in lines if "model_name=" in line}
    assert labels == {"zulu"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_times_of_a_request_are_in_its_answer(server: LiveServer, path: str) -> None:
    body = {**ASK, "messages": [{"role": "user", "content": "x"}]} if "chat" in path else ASK
    whole = server.http.post(path, json=body).json()["metrics"]
    assert whole.keys() == NUMBERS and whole["time_to_first_token_ms"] > 0
    streamed = server.http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    events = sse_events(streamed.text.splitlines())
    assert events[-2]["metrics"].keys() == NUMBERS and all("metrics" not in event for event in events[:-2])
    one = server.http.post(path, json={**body, "max_tokens": 1}).json()["metrics"]
    assert one["mean_itl_ms"] is None and one["tokens_per_second"] is None
