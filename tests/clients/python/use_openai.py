"""The `openai` package of the time before its third version, which other clients bring: parsing, streams, tools, errors."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    name: str
    age: int


def main() -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    asked: Any = [{"role": "user", "content": "A person as JSON, please"}]
    parsed = client.chat.completions.parse(model=MODEL, messages=asked, response_format=Person)
    assert parsed.choices[0].message.parsed == Person(name="Ada", age=36), parsed
    with client.chat.completions.stream(model=MODEL, messages=asked, response_format=Person) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == Person(name="Ada", age=36)
    assert {"content.delta", "content.done", "chunk"} <= kinds, kinds
    messages: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
    called = client.chat.completions.parse(model=MODEL, messages=messages, tools=[WEATHER]).choices[0].message
    assert called.tool_calls and called.tool_calls[0].function.parsed_arguments == {"city": "Oslo"}, called
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=[WEATHER]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [{"city": "Oslo"}]
    messages += [
        called.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "5 degrees"},
    ]
    assert (
        client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER]).choices[0].message.content == "It is cold."
    )
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
    assert raw.headers["x-request-id"] and raw.parse().choices[0].message.content == "Hi there."
    answer = client.responses.parse(model=MODEL, input="A person as JSON, please", text_format=Person)
    assert answer.output_parsed == Person(name="Ada", age=36)
    try:
        client.chat.completions.create(model="other", messages=asked)
    except openai.NotFoundError as error:
        assert error.code == 404 and "does not exist" in error.message
    else:
        raise AssertionError("another model was served")


main()
