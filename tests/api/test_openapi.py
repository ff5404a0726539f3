"""Requests made up from the OpenAPI document: none gets a 5xx, and all errors have the form of their API."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.schemas import APIOperation

from tests.api.live_server import LiveServer

OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/requests"),
    ("GET", "/v1/requests/{request_id}"),
    ("GET", "/v1/requests/{request_id}/stream"),
    ("DELETE", "/v1/requests/{request_id}"),
    ("POST", "/v1/requests/{request_id}/cancel"),
    ("GET", "/health"),
    ("GET", "/live"),
    ("GET", "/ready"),
    ("GET", "/ping"),
    ("POST", "/ping"),
    ("GET", "/v1/usage"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/tokenizer_info"),
    ("GET", "/load"),
    ("GET", "/version"),
    ("GET", "/metrics"),
]
SETTINGS = settings(
    max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate], database=None
)
DEAR = {"n": 2, "max_tokens": 8, "max_completion_tokens": 8, "max_output_tokens": 8}  # more is valid, but slow
SLOW = range(5, 20_000)


@pytest.fixture(scope="module")
def schema(null_server: LiveServer) -> Any:
    return schemathesis.openapi.from_dict(null_server.http.get("/openapi.json").json())


def test_all_routes_are_documented(schema: Any) -> None:
    documented = {(operation.ok().method.upper(), operation.ok().path) for operation in schema.get_all_operations()}
    assert documented == set(OPERATIONS)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_made_up_requests_get_no_5xx(null_server: LiveServer, schema: Any, method: str, path: str, mode: GenerationMode) -> None:
    operation: APIOperation = schema[path][method]
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
        return  # there is nothing to get wrong

    with httpx.Client(base_url=null_server.url, timeout=60) as client:

        @SETTINGS
        @given(case=operation.as_strategy(generation_mode=mode))
        def one(case: Case) -> None:
            check(send(client, case), mode)

        one()


def send(client: httpx.Client, case: Case) -> httpx.Response:
    if isinstance(case.body, dict) and case.path.endswith(("completions", "responses", "messages")):
        for field, most in DEAR.items():
            if case.body.get(field) is None or case.body[field] in SLOW:
                case.body[field] = most
    sent = case.as_transport_kwargs(base_url=str(client.base_url))
    sent.pop("cookies", None)
    if "data" in sent:
        sent["content"] = sent.pop("data")
    return client.request(sent.pop("method"), sent.pop("url"), **sent)


def check(answer: httpx.Response, mode: GenerationMode) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"]
        if answer.request.url.path.startswith("/v1/messages"):
            assert error.keys() == {"type", "message"}  # Anthropic's form
            return
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] == answer.status_code
