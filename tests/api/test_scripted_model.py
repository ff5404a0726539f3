"""The scripted model through real processes: answers by turns, streamed and whole, over an engine's death, and under a schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.live_server import LiveServer, sse_events

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
LONG = " ".join(f"Line {number} of the poem, naïve as it is." for number in range(12))
RULES: list[dict[str, Any]] = [
    {"match": r"weather in (\w+)", "answer": [CALL.replace("Rome", r"\1"), r"It is sunny in \1."]},
    {"match": "thank you", "answer": "Any time."},
    {"match": "object", "answer": '{"a": 1}'},
    {"match": "poem", "answer": LONG},
]


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Steps of 10 ms, so that a stream can be met in its middle."""
    script = tmp_path_factory.mktemp("script") / "script.json"
    script.write_text(json.dumps(RULES))
    engine = ("--load-format", "scripted", "--script", str(script), "--max-model-len", "16k")
    with LiveServer(smollm2_gguf, engine, null="step_seconds=0.01") as server:
        yield server


def chat(server: LiveServer, messages: list[dict[str, str]], **more: Any) -> httpx.Response:
    return server.http.post("/v1/chat/completions", json={"model": server.name, "messages": messages, **more})


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def test_a_conversation_of_three_turns(server: LiveServer) -> None:
    messages = [user("What is the weather in Rome?")]
    for expected, following in ((CALL, "21 degrees, no clouds"), ("It is sunny in Rome.", "thank you"), ("Any time.", "")):
        choice = chat(server, messages, temperature=1.0).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (expected, "stop")
        messages += [choice["message"], user(following)]


def test_a_stream_is_the_whole_answer_in_parts(server: LiveServer) -> None:
    body: dict[str, Any] = {"n": 2, "logprobs": True}
    whole = chat(server, [user("a poem")], **body).json()["choices"]
    events = sse_events(chat(server, [user("a poem")], **body, stream=True).text.splitlines())
    for index in range(2):
        parts = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
        assert "".join(part["delta"].get("content") or "" for part in parts) == whole[index]["message"]["content"] == LONG
        logprobs = [entry for part in parts for entry in (part.get("logprobs") or {}).get("content") or []]
        assert logprobs == whole[index]["logprobs"]["content"]
    assert len(events) > 2 * 12


def test_limits_and_stops_cut_an_answer(server: LiveServer) -> None:
    choice = chat(server, [user("a poem")], max_tokens=3).json()["choices"][0]
    assert choice["finish_reason"] == "length" and LONG.startswith(choice["message"]["content"])
    choice = chat(server, [user("a poem")], stop=["Line 2"]).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (LONG[: LONG.index("Line 2")], "stop")


def test_a_message_to_be_continued_is_continued(server: LiveServer) -> None:
    begun = {"role": "assistant", "content": "Any"}
    answer = chat(server, [user("thank you"), begun], add_generation_prompt=False, continue_final_message=True)
    assert answer.json()["choices"][0]["message"]["content"] == " time."


def test_an_answer_is_of_the_schema_or_the_request_is_refused(server: LiveServer) -> None:
    def schema(kind: str) -> dict[str, Any]:
        made = {"type": "object", "properties": {"a": {"type": kind}}, "required": ["a"], "additionalProperties": False}
        return {"type": "json_schema", "json_schema": {"name": "a", "schema": made}}

    fitting = chat(server, [user("an object")], response_format=schema("integer"))
    assert fitting.json()["choices"][0]["message"]["content"] == '{"a": 1}'
    refused = chat(server, [user("an object")], response_format=schema("string"))
    assert refused.status_code == 400
    assert "the script's answer does not match the request's grammar" in refused.json()["error"]["message"]


def test_a_prompt_that_the_script_does_not_know_is_a_bad_request(server: LiveServer) -> None:
    refused = chat(server, [user("what?")])
    assert refused.status_code == 400
    assert "the script has no rule for an input that ends in" in refused.json()["error"]["message"]


def test_an_engine_killed_in_mid_stream_changes_nothing(server: LiveServer) -> None:
    body = {"model": server.name, "messages": [user("a poem")], "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines: list[str] = []
        for line in answer.iter_lines():
            lines.append(line)
            if len(lines) == 40:
                server.restart_engine()
    events = sse_events(lines)
    assert events[-1] == "[DONE]"
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events[:-1]) == LONG
