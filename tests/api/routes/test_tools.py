"""Tool calls of the real model, which a grammar makes it write: whole, streamed, continued elsewhere, and in a client's loop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.live_server import LiveServer, sse_events
from tests.api.resuming import Event, continued, streamed

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is the weather in Oslo?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time", "parameters": NOTHING}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
BODY: dict[str, Any] = {
    "messages": MESSAGES,
    "tools": [WEATHER, TIME],
    "tool_choice": NAMED,
    "max_tokens": 120,
    "temperature": 1,
    "seed": 3,
}
FORMATS = ("qwen3_coder", "llama3_json")


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[LiveServer]:
    engine = ("--max-model-len", "1024", "--num-gpu-blocks-override", "200", "--max-num-seqs", "24")
    with LiveServer(smollm2_gguf, engine) as server:
        yield server


@pytest.fixture(scope="module", params=FORMATS)
def url(server: LiveServer, request: pytest.FixtureRequest) -> str:
    """Of an API server for the format."""
    _, url = server.start_api("--tool-call-parser", request.param)
    server.wait_until_healthy(url)
    return url


class Told:
    """What a client adds up from the chunks of one choice."""

    def __init__(self, events: list[Any], index: int = 0) -> None:
        self.content = ""
        self.calls: list[dict[str, Any]] = []
        self.ends: list[str] = []
        self.token_ids: list[int] = []
        for event in events:
            for choice in event["choices"]:
                if choice["index"] == index:
                    self.add(choice)

    def add(self, choice: dict[str, Any]) -> None:
        assert not self.ends, "nothing comes after the end"
        self.content += choice["delta"].get("content") or ""
        self.token_ids += choice.get("token_ids", [])
        for part in choice["delta"].get("tool_calls", []):
            if part["index"] == len(self.calls):
                assert part.keys() == {"index", "id", "type", "function"}
                assert part["function"].keys() == {"name", "arguments"}
                assert part["function"]["arguments"] == ""
                self.calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
            else:
                assert part.keys() == {"index", "function"}
                self.calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        if choice["finish_reason"]:
            self.ends.append(choice["finish_reason"])


def whole(url: str, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(url + PATH, json={**BODY, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def chunks(url: str, **fields: Any) -> list[Any]:
    with httpx.stream("POST", url + PATH, json={**BODY, "stream": True, **fields}, timeout=60) as answer:
        assert answer.status_code == 200
        events = sse_events(list(answer.iter_lines()))
    assert events.pop() == "[DONE]"
    return events


def check_weather(call: dict[str, Any]) -> None:
    assert call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments.keys() == {"city", "unit"}
    assert isinstance(arguments["city"], str) and arguments["unit"] in ("C", "F")


def agree(told: Told, choice: dict[str, Any]) -> None:
    """A stream's sum with a whole answer."""
    strip = [{**call, "id": ""} for call in told.calls]
    assert strip == [{**call, "id": ""} for call in choice["message"].get("tool_calls", [])]
    assert (told.content or None) == choice["message"]["content"]
    assert told.ends == [choice["finish_reason"]]


def test_a_named_function_is_called(url: str) -> None:
    answer = whole(url)
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    check_weather(call)
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    events = chunks(url, stream_options={"include_usage": True})
    agree(Told(events), choice)
    assert events[-1]["usage"] == answer["usage"]


def test_a_required_call_names_one_of_the_tools(url: str) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "n": 3, "return_token_ids": True}
    answer, events = whole(url, **fields), chunks(url, **fields)
    for choice in answer["choices"]:
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] in ("get_weather", "get_time")
        json.loads(call["function"]["arguments"])
        told = Told(events, choice["index"])
        agree(told, choice)
        assert told.token_ids == choice["token_ids"]
    ids = {call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]}
    assert len(ids) == 3


def test_a_call_that_is_cut_off_ends_with_length(url: str) -> None:
    (choice,) = whole(url, max_tokens=14)["choices"]
    assert choice["finish_reason"] == "length"
    agree(Told(chunks(url, max_tokens=14)), choice)


def test_strict_tools_leave_text_free(url: str) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    fields = {"tools": [strict], "tool_choice": "auto", "max_tokens": 30}
    (choice,) = whole(url, **fields)["choices"]
    agree(Told(chunks(url, **fields)), choice)


async def test_a_stream_goes_on_in_the_middle_of_a_call_at_another_server(server: LiveServer, url: str) -> None:
    """Behind each of its events: the second server, whose own format is another, tells the rest and nothing twice."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as here, httpx.AsyncClient(base_url=server.url, timeout=60) as there:
        request_id, events = await streamed(here, PATH, BODY)
        expected = Told(_data(events))
        assert len(events) > 8
        for count in range(len(events)):
            last_id = events[count - 1][0] if count else ""
            rest = await continued(there, request_id, last_id)
            told = Told(_data(events[:count] + rest))
            assert (told.content, told.calls, told.ends) == (expected.content, expected.calls, expected.ends)


def _data(events: list[Event]) -> list[Any]:
    return [data for _, data in events if data != "[DONE]"]


def test_the_clients_tool_loop(server: LiveServer) -> None:
    """As OpenAI's documentation has it: ask, run the calls, send their results, get an answer."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = list(MESSAGES)
        tools: Any = [WEATHER]
        first = client.chat.completions.create(
            model="tiny", messages=messages, tools=tools, tool_choice="required", max_tokens=120, seed=3
        )
        message = first.choices[0].message
        assert message.tool_calls
        messages.append(message)
        for call in message.tool_calls:
            assert call.type == "function"
            arguments = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"12 degrees in {arguments['city']}"})
        second = client.chat.completions.create(
            model="tiny", messages=messages, tools=tools, tool_choice="none", max_tokens=10, seed=3
        )
        assert second.choices[0].message.content
        assert second.choices[0].message.tool_calls is None


def test_the_clients_stream_helper_adds_a_call_up(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        tools: Any = [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]
        choice: Any = NAMED
        with client.chat.completions.stream(
            model="tiny",
            messages=MESSAGES,
            tools=tools,
            tool_choice=choice,
            max_tokens=120,
            seed=3,  # type: ignore[arg-type]
        ) as stream:
            kinds = {event.type for event in stream}
            (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
        assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
        assert call.function.parsed_arguments is not None


def test_tools_can_be_turned_off(server: LiveServer) -> None:
    _, url = server.start_api("--tool-call-parser", "none")
    server.wait_until_healthy(url)
    answer = httpx.post(url + PATH, json=BODY, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
