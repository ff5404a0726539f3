"""pydantic-ai: an agent with a tool, an output of a type, and a stream; by chat completions and by responses."""

from __future__ import annotations

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.output import NativeOutput
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1:]
cities: list[str] = []


class Person(BaseModel):
    name: str
    age: int


async def main() -> None:
    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider=provider)
        cities.clear()

        def get_weather(city: str) -> str:
            """The weather of a city."""
            cities.append(city)
            return "5 degrees"

        agent = Agent(model, tools=[get_weather])
        ran = await agent.run("What is the weather in Oslo?")
        assert (ran.output, cities) == ("It is cold.", ["Oslo"]), (kind, ran.output, cities)
        async with agent.run_stream("hello") as stream:
            assert "".join([piece async for piece in stream.stream_text(delta=True)]) == "Hi there."
        typed = await Agent(model, output_type=NativeOutput(Person)).run("A person as JSON, please")
        assert typed.output == Person(name="Ada", age=36), (kind, typed.output)


asyncio.run(main())
