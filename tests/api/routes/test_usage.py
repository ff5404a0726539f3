"""GET /v1/usage: a key sees what its own requests have used, an admin key what all have."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tests.api.conftest import KEYS
from tests.api.live_server import LiveServer
from tests.waiting import wait_for

Rows = dict[str, dict[str, Any]]  # by tenant


def usage_of(server: LiveServer, who: str, **query: str) -> Rows:
    answer = server.http.get("/v1/usage", params=query, headers={"Authorization": f"Bearer {KEYS[who]}"})
    assert answer.status_code == 200, answer.text
    return {row["tenant"]: row for row in answer.json()["data"]}


def complete(server: LiveServer, who: str, **fields: Any) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 4, **fields}
    assert server.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {KEYS[who]}"}).status_code == 200


def test_a_key_sees_its_own_usage_and_an_admin_all(slow_server: LiveServer) -> None:
    today = datetime.now(UTC).date().isoformat()
    before = usage_of(slow_server, "ops", since=today)
    complete(slow_server, "alice")
    complete(slow_server, "bob", max_tokens=2)

    def counted() -> Rows:
        rows = usage_of(slow_server, "ops", since=today)
        new = sum(row["requests"] for row in rows.values()) - sum(row["requests"] for row in before.values())
        return rows if new == 2 else {}

    rows = wait_for(counted, "the usage of both")
    for tenant, tokens in (("alice", 4), ("bob", 2)):
        row, old = rows[tenant], before.get(tenant, {})
        assert (row["object"], row["date"]) == ("usage", today)
        assert row["output_tokens"] - old.get("output_tokens", 0) == tokens
        assert row["prompt_tokens"] - old.get("prompt_tokens", 0) == 3
        assert row["finish_reasons"]["length"] - old.get("finish_reasons", {}).get("length", 0) == 1
        assert usage_of(slow_server, tenant, since=today) == {tenant: row}


def test_days_and_models_bound_what_is_told(slow_server: LiveServer) -> None:
    complete(slow_server, "alice")
    assert usage_of(slow_server, "alice", until="2020-01-01") == {}
    headers = {"Authorization": f"Bearer {KEYS['alice']}"}
    answer = slow_server.http.get("/v1/usage", params={"model": "nobody"}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
    answer = slow_server.http.get("/v1/usage", params={"since": "yesterday"}, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "query.since"
    assert slow_server.http.get("/v1/usage").status_code == 401
