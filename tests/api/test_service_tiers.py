"""Service tiers: who gets which, and what the answers say."""

from __future__ import annotations

from typing import Any

import pytest

from api.service_tiers import used_tier
from engine.config import ApiConfig
from tests.api.live_server import LiveServer, sse_events

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("asked", "tenant", "expected"),
    [
        ("priority", "gold", "priority"),
        ("priority", "other", "default"),
        ("flex", "other", "flex"),
        ("auto", "gold", "default"),
        ("scale", "gold", "default"),
        ("default", "gold", "default"),
    ],
)
def test_which_tier_a_key_gets(asked: str, tenant: str, expected: str) -> None:
    config = ApiConfig(api_key=["gold=a", "other=b"], priority_tenant=["gold"])
    assert used_tier(asked, tenant, config) == expected
    assert used_tier("priority", "", ApiConfig()) == "priority", "without keys everybody may have it"


def test_answers_say_which_tier_was_used(null_server: LiveServer) -> None:
    for asked, told in (("flex", "flex"), ("priority", "priority"), ("auto", "default"), (None, None)):
        body: dict[str, Any] = {**CHAT, "service_tier": asked}
        assert null_server.http.post("/v1/chat/completions", json=body).json()["service_tier"] == told
        events = sse_events(null_server.http.post("/v1/chat/completions", json={**body, "stream": True}).text.splitlines())
        assert {event.get("service_tier") for event in events[:-1]} == {told}
        responses = {"input": "x", "max_output_tokens": 2, "service_tier": asked}
        assert null_server.http.post("/v1/responses", json=responses).json()["service_tier"] == (told or "default")
    refused = null_server.http.post("/v1/chat/completions", json={**CHAT, "service_tier": "gold"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "body.service_tier"
