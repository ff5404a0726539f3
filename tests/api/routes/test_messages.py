"""Anthropic's API through real processes and its own client: answers, streams, tools, errors, and what holds for all requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.api.live_server import LiveServer
from tests.api.resuming import continued, streamed
from tests.api.routes.test_free_tools import LONG, PARAMETERS, rules

PATH = "/v1/messages"
TOOL: dict[str, Any] = {"name": "get_weather", "description": "The weather.", "input_schema": PARAMETERS}
HELLO: dict[str, Any] = {"model": "tiny", "max_tokens": 400, "messages": [{"role": "user", "content": "hello"}]}
KEY = "sk-mine"


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    script = tmp_path_factory.mktemp("script") / "script.json"
    script.write_text(json.dumps([*rules(), {"match": "hello", "answer": "Hi! How are you?"}, {"match": "", "answer": "Well."}]))
    engine = ("--load-format", "scripted", "--script", str(script), "--max-model-len", "16k")
    api = ("--tool-call-parser", "hermes", "--reasoning-parser", "think", "--api-key", f"me={KEY}", "--max-request-bytes", "300000")
    with LiveServer(smollm2_gguf, engine, api, null="step_seconds=0.005") as server:
        server.http.headers["x-api-key"] = KEY
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {**HELLO, "messages": [{"role": "user", "content": text}], **fields}


def test_the_client_gets_the_same_message_streamed_and_whole(client: anthropic.Anthropic) -> None:
    for body in (HELLO, asked("hermes", tools=[TOOL]), asked("think", tools=[TOOL]), asked("long", tools=[TOOL])):
        whole = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == "".join(block.text for block in whole.content if block.type == "text")
        told, expected = (message.to_dict() for message in (final, whole))
        for message in (told, expected):
            message.pop("id")
            for block in message["content"]:
                block.pop("id", None)
        assert told == expected
        counted = client.messages.count_tokens(**{name: value for name, value in body.items() if name != "max_tokens"})
        assert whole.usage.input_tokens == counted.input_tokens
        assert whole.stop_reason == ("end_turn" if body is HELLO else "tool_use")


def test_the_clients_tool_loop(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo? (hermes)"}]
    tools: Any = [TOOL]
    answer = client.messages.create(model="tiny", max_tokens=400, system="Be short.", messages=messages, tools=tools)
    messages.append({"role": "assistant", "content": answer.content})
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"city": "Oslo"}] * 2
    results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"} for call in calls]
    messages.append({"role": "user", "content": results})
    final = client.messages.create(model="tiny", max_tokens=400, system="Be short.", messages=messages, tools=tools)
    assert ([block.to_dict() for block in final.content], final.stop_reason) == (
        [{"type": "text", "text": "It is cold."}],
        "end_turn",
    )


def test_ends_choices_and_prefills(client: anthropic.Anthropic) -> None:
    assert client.messages.create(**{**HELLO, "max_tokens": 2}).stop_reason == "max_tokens"
    stopped = client.messages.create(**HELLO, stop_sequences=["How"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "How", "Hi! ")
    begun = {**HELLO, "messages": [*HELLO["messages"], {"role": "assistant", "content": "Hi! How"}]}
    assert client.messages.create(**begun).content[0].text == " are you?"
    one = asked("hermes", tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in client.messages.create(**one).content] == ["text", "tool_use"]
    none = asked("hermes", tools=[TOOL], tool_choice={"type": "none"})
    assert [block.type for block in client.messages.create(**none).content] == ["text"]
    hidden = asked("think", tools=[TOOL], thinking={"type": "disabled"})
    assert [block.type for block in client.messages.create(**hidden).content] == ["tool_use"]
    shown = asked("think", tools=[TOOL], max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024})
    thought = client.messages.create(**shown)
    assert thought.content[0].to_dict() == {"type": "thinking", "thinking": "They ask for Oslo.", "signature": ""}
    details = thought.usage.output_tokens_details
    assert details is not None and 5 < details.thinking_tokens < thought.usage.output_tokens - 5


def test_a_large_conversation_is_read_in_another_process(client: anthropic.Anthropic) -> None:
    blocks: Any = [{"type": "text", "text": "word " * 1000, "cache_control": {"type": "ephemeral"}} for _ in range(14)]
    messages: Any = [{"role": "user", "content": [*blocks, {"type": "text", "text": "hello"}]}]
    assert client.messages.create(model="tiny", max_tokens=50, messages=messages).content[0].text == "Hi! How are you?"
    assert client.messages.count_tokens(model="tiny", messages=messages).input_tokens > 14_000


def test_errors_are_the_clients_own(client: anthropic.Anthropic, server: LiveServer) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(**{**HELLO, "model": "other"})
    assert unknown.value.request_id and unknown.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        client.messages.create(**asked("word " * 20_000))
    with pytest.raises(anthropic.RequestTooLargeError):
        client.messages.create(**asked("word " * 70_000))
    with anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            stranger.messages.create(**HELLO)
        assert refused.value.body == {
            "type": "error",
            "error": {"type": "authentication_error", "message": "Invalid or missing API key."},
            "request_id": refused.value.request_id,
        }


def wrong(field: str, message: str) -> str:
    return f"1 validation error:\n  body.{field}: {message}"


USER = {"role": "user", "content": "x"}
MALFORMED: list[tuple[dict[str, Any] | bytes, str]] = [  # members of the body, or all of it, and the error's message
    (b"{", "1 validation error:\n  body: Invalid JSON: EOF while parsing an object at line 1 column 1 (type=json_invalid)"),
    (b"[]", "1 validation error:\n  body: Input should be an object (type=model_type, input=[])"),
    (
        {"max_tokens": None},
        wrong(
            "max_tokens",
            "Field required (type=missing, input={'messages': [{'content': 'hello', 'role': 'user'}], 'model': 'tiny'})",
        ),
    ),
    ({"max_tokens": 0}, wrong("max_tokens", "Input should be greater than or equal to 1 (type=greater_than_equal, input=0)")),
    ({"max_tokens": "5"}, wrong("max_tokens", "Input should be a valid integer (type=int_type, input='5')")),
    (
        {"max_tokens": 10**9},
        "max_tokens=1000000000 cannot be greater than max_model_len=16000. Please request fewer output tokens.",
    ),
    (
        {"model": None},
        wrong(
            "model", "Field required (type=missing, input={'max_tokens': 400, 'messages': [{'content': 'hello', 'role': 'user'}]})"
        ),
    ),
    ({"messages": None}, wrong("messages", "Field required (type=missing, input={'max_tokens': 400, 'model': 'tiny'})")),
    ({"messages": []}, "messages must contain at least one message."),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        wrong("messages.0.role", "Input should be 'user', 'assistant' or 'system' (type=literal_error, input='tool')"),
    ),
    ({"messages": [{"role": "user"}]}, wrong("messages.0.content", "Field required (type=missing, input={'role': 'user'})")),
    (
        {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
        (
            "2 validation errors:\n  body.messages.0.content.str: Input should be a valid string (type=s"
            "tring_type, input=[{'text': 'x'}])\n  body.messages.0.content.list[ContentPart].0.type: Fie"
            "ld required (type=missing, input={'text': 'x'})"
        ),
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0: a content block of type 'text' needs its text."),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages.0: a content block of type 'image' is not supported here: this server takes text only.",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        "messages.0: a tool_result needs tool_use_id.",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": 5}]}]},
        "messages.0: content must be a string or a list of blocks.",
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}, USER]},
        "messages.1: a tool_use needs id, name and input.",
    ),
    (
        {"system": [{"type": "document"}]},
        "system: a content block of type 'document' is not supported here: this server takes text only.",
    ),
    (
        {"system": 5},
        (
            "2 validation errors:\n  body.system.str: Input should be a valid string (type=string_type, "
            "input=5)\n  body.system.list[ContentPart]: Input should be a valid array (type=list_type, i"
            "nput=5)"
        ),
    ),
    ({"temperature": 3.5}, "temperature must be in [0, 2], got 3.5."),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0.0."),
    ({"top_k": -5}, "top_k must be 0 (disable), or at least 1, got -5."),
    ({"stop_sequences": [""]}, "stop cannot contain an empty string."),
    ({"stop_sequences": ["a"] * 99}, "stop must contain at most 4 strings, got 99."),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema is required."),
    (
        {"tools": [{"name": "a b", "input_schema": {}}]},
        "A function's name must have 1 to 128 characters, of a-z, A-Z, 0-9, _ and -, got 'a b'.",
    ),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools.0: tools of type 'web_search_20250305' are not supported: this server runs no tools.",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice of type 'tool' needs the name of a tool."),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}},
        "tool_choice names the function 'other', which is not one of `tools`.",
    ),
    ({"tool_choice": {"type": "any"}}, "When using `tool_choice`, `tools` must be set."),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens must be at least 1024 and less than max_tokens."),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 400}},
        "thinking.budget_tokens must be at least 1024 and less than max_tokens.",
    ),
    (
        {"output_config": {"format": {"type": "json_schema"}}},
        wrong("output_config.format.schema", "Field required (type=missing, input={'type': 'json_schema'})"),
    ),
    (
        {"output_config": {"effort": "huge"}},
        wrong(
            "output_config.effort", "Input should be 'low', 'medium', 'high', 'xhigh' or 'max' (type=literal_error, input='huge')"
        ),
    ),
]


@pytest.mark.parametrize(("fields", "said"), MALFORMED)
def test_malformed_bodies_say_what_is_wrong_in_anthropics_form(
    server: LiveServer, fields: dict[str, Any] | bytes, said: str
) -> None:
    body = fields if isinstance(fields, bytes) else json.dumps({k: v for k, v in {**HELLO, **fields}.items() if v is not None})
    answer = server.http.post(PATH, content=body, headers={"content-type": "application/json"})
    error = {"type": "invalid_request_error", "message": said}
    expected = {"type": "error", "error": error, "request_id": answer.headers["request-id"]}
    assert (answer.status_code, answer.json()) == (400, expected)


def test_what_is_not_there_and_what_is_not_json(server: LiveServer) -> None:
    missing = server.http.get(f"{PATH}/batches")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    wrong = server.http.get(PATH)
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
    plain = server.http.post(PATH, content="hello", headers={"content-type": "text/plain"})
    assert (plain.status_code, plain.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "error" in server.http.get("/v1/nothing").json(), "all other routes speak as OpenAI's"


def told(events: list[tuple[str, Any]]) -> list[Any]:
    """Without what differs from run to run."""
    found = []
    for _, event in events:
        event = json.loads(json.dumps(event))
        for part in (event.get("message"), event.get("content_block")):
            if part is not None:
                part.pop("id", None)
        found.append(event)
    return found


def joined(events: list[Any]) -> list[Any]:
    """Deltas that follow each other in one block are one."""
    found: list[Any] = []
    for event in events:
        if found and event["type"] == found[-1]["type"] == "content_block_delta":
            ((name, text),) = ((k, v) for k, v in event["delta"].items() if k != "type")
            found[-1]["delta"][name] += text
        else:
            found.append(event)
    return found


async def test_a_stream_goes_on_at_another_server_over_the_death_of_its_engine(server: LiveServer) -> None:
    body = asked("long", tools=[TOOL])
    _, other = server.start_api("--tool-call-parser", "none", "--api-key", f"me={KEY}")
    server.wait_until_healthy(other)
    headers = {"x-api-key": KEY}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as here:
        _, calm = await streamed(here, PATH, body)
        request_id, first = await streamed(here, PATH, body, most=25)
    server.restart_engine()
    async with httpx.AsyncClient(base_url=other, headers=headers, timeout=60) as there:
        rest = await continued(there, request_id, first[-1][0])
        assert joined(told([*first, *rest])) == joined(told(calm))
        message_id = first[0][1]["message"]["id"]
        kept = (await there.get(f"/v1/requests/{message_id}")).json()
    assert kept["endpoint"] == PATH
    assert kept["answer"]["content"][0]["input"] == {"city": json.loads(LONG.split("\n")[1])["arguments"]["city"]}
    assert kept["answer"]["stop_reason"] == "tool_use"


def test_an_engine_killed_in_the_middle_of_a_streamed_call_changes_nothing(server: LiveServer) -> None:
    runs: list[list[tuple[str, Any]]] = []
    for kills in (False, True):
        run: list[tuple[str, Any]] = []
        with server.http.stream("POST", PATH, json=asked("long", tools=[TOOL], stream=True)) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    run.append(("", json.loads(line.removeprefix("data: "))))
                    if kills and len(run) == 20:
                        assert run[-1][1]["delta"]["type"] == "input_json_delta"
                        server.restart_engine()
        runs.append(run)
    calm, killed = (joined(told(run)) for run in runs)
    assert killed == calm
    assert killed[-1] == {"type": "message_stop"}


def test_a_message_is_seen_and_ended_by_its_id(server: LiveServer, client: anthropic.Anthropic) -> None:
    with client.messages.stream(**asked("long", tools=[TOOL])) as stream:
        next(event for event in stream if event.type == "input_json")
        seen = server.http.get(f"/v1/requests/{stream.current_message_snapshot.id}").json()
        ended = server.http.delete(f"/v1/requests/{stream.current_message_snapshot.id}").json()
        final = stream.get_final_message()
    assert (seen["endpoint"], seen["state"]) == (PATH, "running")
    assert (ended["state"], ended["finish_reason"], str(final.stop_reason)) == ("ended", "abort", "abort")


def test_a_retry_with_the_same_key_gets_the_same_message(server: LiveServer) -> None:
    once, again = (server.http.post(PATH, json=HELLO, headers={"Idempotency-Key": "one"}).json() for _ in range(2))
    assert once == again and once["type"] == "message"
    other = server.http.post(PATH, json=asked("other"), headers={"Idempotency-Key": "one"})
    assert (other.status_code, other.json()["error"]["type"]) == (422, "invalid_request_error")
