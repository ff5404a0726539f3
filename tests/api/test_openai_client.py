"""The `openai` package, as users have it, against real processes."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.api.live_server import LiveServer


@pytest.fixture
def client(null_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{null_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_client_lists_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"


def test_the_client_gets_a_chat_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=9, seed=1, logprobs=True, top_logprobs=2
    )
    (choice,) = answer.choices
    assert choice.message.content
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 9
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9


def test_chat_streamed_is_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=30, seed=2)
    parts = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=30,
        seed=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for part in parts:
        if part.choices:
            text += part.choices[0].delta.content or ""
        usage = part.usage or usage
    assert text == whole.choices[0].message.content
    assert usage == whole.usage


def test_the_client_gets_the_same_completions_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=7, n=2, seed=3)
    assert len(whole.choices) == 4
    texts = [""] * 4
    for part in client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=7, n=2, seed=3, stream=True):
        texts[part.choices[0].index] += part.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gone", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature must be in"):
        client.completions.create(model="tiny", prompt="x", temperature=3)


def test_the_client_may_send_extra_fields(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="x", max_tokens=5, extra_body={"min_tokens": 5, "top_k": 3})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


async def test_concurrent_streams_do_not_mix(null_server: LiveServer) -> None:
    """Concurrent streams do not mix."""
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{null_server.url}/v1", api_key="none", max_retries=0) as client:

        async def one(seed: int) -> str:
            parts = await client.completions.create(model="tiny", prompt="go", max_tokens=25, seed=seed, stream=True)
            return "".join([part.choices[0].text async for part in parts])

        first = await asyncio.gather(*(one(seed) for seed in range(24)))
        again = await asyncio.gather(*(one(seed) for seed in reversed(range(24))))
    assert first == again[::-1]
    assert len(set(first)) == 24
