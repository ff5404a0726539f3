"""Ids that clients and proxies send: what becomes of those that are not of our form."""

from __future__ import annotations

import pytest

from api.errors import BadRequest
from api.http.request_ids import body_id, header_id
from tests.api.live_server import LiveServer

CLEANED = [
    ("from.header:1", "from.header:1"),
    ("a:1, a:1", "a:1"),  # a proxy joined two headers
    (", b", "b"),
    ("u#1", "u-1"),
    ("Root=1-67891233-abcdef012345678912345678;Self=1-2", "Root-1-67891233-abcdef012345678912345678-Self-1-2"),
    ("q83vEjRWeJA/+w==", "q83vEjRWeJA-w"),
    ("user@host", "user-host"),
    ("a b", "a-b"),
    ("{12345678-9abc-def0}", "12345678-9abc-def0"),
    ("x" * 200, "x" * 128),
    ("@", None),
    ("\u00e9", None),
    (" , ", None),
    ("", None),
]


@pytest.mark.parametrize(("given", "kept"), CLEANED)
def test_an_id_keeps_the_allowed_characters_of_its_header(given: str, kept: str | None) -> None:
    assert (header_id({"headers": [(b"x-request-id", given.encode("latin-1"))]}) or None) == kept


def test_no_id_is_read_without_the_header() -> None:
    assert header_id({"headers": []}) is None


@pytest.mark.parametrize("given", ["a b", "x" * 129, "\u00e9", "u#1"])
def test_a_bodys_id_is_taken_as_it_is_or_refused(given: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        body_id(given)
    assert refusal.value.param == "request_id"
    assert body_id("fine-1") == "fine-1" and body_id(None) is None


@pytest.mark.parametrize(("given", "kept"), [("a:1, a:1", "a:1"), ("u#1", "u-1"), ("@", None)])
def test_an_answer_is_found_under_the_id_that_was_kept(null_server: LiveServer, given: str, kept: str | None) -> None:
    answer = null_server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": given})
    shown = answer.headers["x-request-id"]
    assert (answer.status_code, answer.json()["id"]) == (200, f"cmpl-{shown}")
    assert shown == kept or (kept is None and len(shown) == 32)
    assert null_server.http.get(f"/v1/requests/{shown}").json()["external_id"] == shown
