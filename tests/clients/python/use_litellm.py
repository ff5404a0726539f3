"""litellm: completions, streams, tools and Anthropic's form through one function."""

from __future__ import annotations

import json
import sys

import litellm

URL, MODEL = sys.argv[1:]
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
HELLO = [{"role": "user", "content": "hello"}]


def main() -> None:
    litellm.telemetry = False
    for provider, base in (("hosted_vllm", f"{URL}/v1"), ("openai", f"{URL}/v1"), ("anthropic", URL)):
        given = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none", "max_tokens": 100}
        whole = litellm.completion(messages=HELLO, **given)
        assert whole.choices[0].message.content == "Hi there.", (provider, whole)
        parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(messages=HELLO, stream=True, **given)]
        assert "".join(parts) == "Hi there.", (provider, parts)
        asked = [{"role": "user", "content": "What is the weather in Oslo?"}]
        for stream in (False, True):
            answer = litellm.completion(messages=asked, tools=[WEATHER], stream=stream, **given)
            if stream:
                answer = litellm.stream_chunk_builder(list(answer), messages=asked)
            (call,) = answer.choices[0].message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"}), (
                provider,
                answer,
            )
            assert answer.choices[0].finish_reason == "tool_calls", (provider, answer)


main()
