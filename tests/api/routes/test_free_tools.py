"""Tool calls and reasoning that a model writes of its own accord, through real processes: a script says what it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.live_server import LiveServer
from tests.api.routes.test_tools import PATH, Told, agree, chunks
from tests.api.tools.test_parser import HERMES, MISTRAL, QWEN

TEXTS = {
    "hermes": HERMES,
    "qwen3_coder": QWEN,
    "mistral": MISTRAL,
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
}
BARE = ("llama3_json",)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
LONG = HERMES.replace("Oslo", "Oslo, which lies on the fjord of its name. " * 6)


def rules() -> list[dict[str, Any]]:
    """What the model writes to an input that names a format."""
    return [
        {"match": "think", "answer": f"<think>\nThey ask for Oslo.\n</think>\n\n{HERMES}"},
        {"match": "degrees", "answer": "It is cold."},
        {"match": "long", "answer": LONG},
        {"match": "broken", "answer": f"So: <tool_call>no {{json</tool_call> {HERMES}{HERMES}"},
        *({"match": name, "answer": text if name in BARE else f"I look.\n{text}\n{text}"} for name, text in TEXTS.items()),
    ]


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    script = tmp_path_factory.mktemp("script") / "script.json"
    script.write_text(json.dumps(rules()))
    engine = ("--load-format", "scripted", "--script", str(script), "--max-model-len", "16k")
    api = ("--tool-call-parser", "hermes", "--reasoning-parser", "think")
    with LiveServer(smollm2_gguf, engine, api, null="step_seconds=0.005") as server:
        yield server


def asked(url: str, text: str, **fields: Any) -> dict[str, Any]:
    """The one choice of a whole answer, with which the stream's sum agrees."""
    body = {"messages": [{"role": "user", "content": text}], "tools": [TOOL], "tool_choice": "auto", "max_tokens": 500, **fields}
    answer = httpx.post(url + PATH, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    events = chunks(url, **body)
    agree(Told(events), choice)
    deltas = [item["delta"] for event in events for item in event["choices"]]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == (choice["message"].get(name) or "")
    return choice


def oslo(choice: dict[str, Any]) -> list[bool]:
    """Of each call, whether it is the expected one."""
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return [call["name"] == "get_weather" and json.loads(call["arguments"]) == {"city": "Oslo"} for call in calls]


@pytest.mark.parametrize("format", TEXTS)
def test_calls_in_several_formats(server: LiveServer, format: str) -> None:
    _, url = server.start_api("--tool-call-parser", format)
    server.wait_until_healthy(url)
    choice = asked(url, format)
    assert oslo(choice) == ([True] if format in BARE else [True, True])
    assert choice["message"]["content"] == (None if format in BARE else "I look.")
    assert choice["finish_reason"] == "tool_calls"
    if format not in BARE:
        assert oslo(asked(url, format, parallel_tool_calls=False)) == [True]


def test_without_tools_nothing_is_looked_for(server: LiveServer) -> None:
    choice = asked(server.url, "hermes", tool_choice="none")
    assert choice["message"]["content"] == f"I look.\n{HERMES}\n{HERMES}"
    assert choice["finish_reason"] == "stop"


def test_text_that_does_not_parse_is_content(server: LiveServer) -> None:
    choice = asked(server.url, "broken")
    assert choice["message"]["content"] == "So: <tool_call>no {json</tool_call>"
    assert oslo(choice) == [True, True]


def test_reasoning_comes_before_a_call(server: LiveServer) -> None:
    choice = asked(server.url, "think")
    message = choice["message"]
    assert (message["reasoning"], message["content"], oslo(choice)) == ("They ask for Oslo.", None, [True])
    assert asked(server.url, "think", include_reasoning=False)["message"]["reasoning"] is None
    assert asked(server.url, "think", max_tokens=5)["message"]["reasoning"]
    assert oslo(asked(server.url, "think", tool_choice="required")) == [True]


def test_an_engine_killed_in_the_middle_of_a_call_changes_nothing(server: LiveServer) -> None:
    expected = asked(server.url, "long")
    body = {"messages": [{"role": "user", "content": "long"}], "tools": [TOOL], "tool_choice": "required", "max_tokens": 500}
    items: list[Any] = []
    with server.http.stream("POST", PATH, json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                items.append(json.loads(line.removeprefix("data: ")))
                if len(items) == 20:
                    server.restart_engine()
    agree(Told(items), expected)


def test_the_clients_tool_loop(server: LiveServer) -> None:
    """As OpenAI's documentation has it: the model calls, gets the results, and answers."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo? (hermes)"}]
        tools: Any = [TOOL]
        message = client.chat.completions.create(model="tiny", messages=messages, tools=tools).choices[0].message
        assert message.tool_calls
        messages.append(message)
        for call in message.tool_calls:
            assert call.type == "function"
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"12 degrees in {city}"})
        answer = client.chat.completions.create(model="tiny", messages=messages, tools=tools).choices[0]
        assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == ("It is cold.", None, "stop")
