"""openai-agents: an agent that calls a tool and answers; by responses, which it asks for by itself, and by chat completions."""

from __future__ import annotations

import asyncio
import sys

import openai
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

URL, MODEL = sys.argv[1:]
cities: list[str] = []


async def main() -> None:
    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        cities.clear()

        @function_tool
        def get_weather(city: str) -> str:
            """The weather of a city."""
            cities.append(city)
            return "5 degrees"

        agent = Agent(name="helper", instructions="Be short.", tools=[get_weather], model=kind(model=MODEL, openai_client=client))
        ran = await Runner.run(agent, "What is the weather in Oslo?")
        assert (ran.final_output, cities) == ("It is cold.", ["Oslo"]), (kind, ran.final_output, cities)
        streamed = Runner.run_streamed(agent, "What is the weather in Oslo?")
        async for _ in streamed.stream_events():
            pass
        assert (streamed.final_output, cities) == ("It is cold.", ["Oslo", "Oslo"]), kind


asyncio.run(main())
