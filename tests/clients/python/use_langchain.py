"""langchain-openai: ChatOpenAI whole, streamed, with tools and with an output of a schema."""

from __future__ import annotations

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"5 degrees in {city}"


def main() -> None:
    for use_responses in (False, True):
        model = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, use_responses_api=use_responses)
        assert model.invoke("hello").text == "Hi there."
        assert "".join(chunk.text for chunk in model.stream("hello")) == "Hi there."
        bound = model.bind_tools([get_weather])
        asked = [HumanMessage("What is the weather in Oslo?")]
        called = bound.invoke(asked)
        (call,) = called.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"}), called
        result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
        assert bound.invoke([*asked, called, result]).text == "It is cold."
        for method in ("json_schema", "function_calling"):
            ask = "A person as JSON, please" if method == "json_schema" else "A person as a call, please"
            found = model.with_structured_output(Person, method=method).invoke(ask)
            assert found == Person(name="Ada", age=36), (use_responses, method, found)


main()
