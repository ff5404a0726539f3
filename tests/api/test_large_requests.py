"""Requests so large that other clients could have to wait. A client asks `/live` while the server reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from engine.bus import keys
from tests.api.live_server import LiveServer
from tests.api.loop_watch import LoopWatch

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LONGEST_GAP = 0.5  # seconds; on a calm machine it is under 0.1, without readers it is 1 to 15
TOO_LONG, HELLO = "This model's maximum context length is 2048 tokens.", {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def watch(null_server: LiveServer) -> Iterator[LoopWatch]:
    with LoopWatch(null_server.url) as watch:
        yield watch


@pytest.mark.parametrize(
    ("path", "body", "count", "status", "said"),
    [
        pytest.param(TEXT, {"prompt": "语" * 660_000}, 4, 400, TOO_LONG, id="four of the same character"),
        pytest.param(TEXT, {"prompt": "语" * 660_000, "truncate_prompt_tokens": 9}, 1, 200, "text_completion", id="truncated"),
        pytest.param(TEXT, {"prompt": [500] * 3_000_000}, 1, 400, TOO_LONG, id="token ids"),
        pytest.param(TEXT, {"prompt": [[500]] * 500_000}, 1, 400, "prompt list length 500000", id="lists of token ids"),
        pytest.param(TEXT, {"prompt": [[500] * 1000] * 512, "max_tokens": 1}, 1, 200, "text_completion", id="many long prompts"),
        pytest.param(TEXT, {"prompt": [{}] * 100_000}, 1, 400, "body.prompt", id="wrong items"),
        pytest.param(TEXT, {"prompt": "x", "logit_bias": {str(n): 1 for n in range(100_000)}}, 1, 400, "logit_bias", id="bias"),
        pytest.param(TEXT, {"logit_bias": dict.fromkeys(map(str, range(100_000)), "")}, 1, 400, "and 99990 more", id="no bias"),
        pytest.param(TEXT, {"prompt": "x", "stop": ["x" * 99] * 50_000}, 1, 400, "stop must contain", id="stop strings"),
        pytest.param(TEXT, {"prompt": "x", "stop": "x" * 9_000_000}, 1, 400, "stop must have", id="a stop string"),
        pytest.param(TEXT, {"prompt": "x", "bad_words": ["语" * 300_000]}, 1, 400, "1200001 entries", id="a bad word"),
        pytest.param(TEXT, {"prompt": "x", "bad_words": [str(n) for n in range(100_000)]}, 1, 400, "Too many bad", id="bad words"),
        pytest.param(TEXT, {"prompt": "x", "model": "m" * 9_000_000}, 1, 404, "does not exist", id="a model's name"),
        pytest.param(TEXT, {"promt": "x" * 9_000_000}, 1, 400, "prompt must be given", id="an unknown field"),
        pytest.param(CHAT, {"messages": [HELLO] * 50_000}, 1, 400, TOO_LONG, id="messages"),
        pytest.param(CHAT, {"message": [HELLO] * 50_000}, 1, 400, "body.messages: Field required", id="a missing field"),
        pytest.param(
            TEXT,
            {"prompt": [[500] * 1000] * 512, "max_tokens": 1, "echo": True, "logprobs": 20},
            *(
                1,
                400,
                "This request asks for too many logprobs: 10,752,000 of 512,000 prompt tokens and 10,752 of up to 512 output",
            ),
            id="too many logprobs",
        ),
        pytest.param(
            TEXT,
            {"prompt": [[500] * 1000] * 3, "max_tokens": 1, "prompt_logprobs": 20, "n": 80},
            *(1, 400, "too many logprobs: 5,040,000 of 240,000 prompt tokens"),
            id="too many logprobs of prompts",
        ),
        *(
            pytest.param(
                TEXT,
                {"prompt": [500] * 2000, "max_tokens": 1, "n": 4096, field: True},
                1,
                400,
                "2,000 prompt tokens in each of",
                id=field,
            )
            for field in ("echo", "return_token_ids")
        ),
        pytest.param(
            CHAT,
            {"messages": [{"role": "assistant", "content": "a " * 1500}], "n": 4000, "max_tokens": 1, "echo": True}
            | {"continue_final_message": True, "add_generation_prompt": False},
            *(1, 400, "prompt tokens in each of n=4000"),
            id="echo of a chat",
        ),
        pytest.param(
            CHAT,
            {"messages": [HELLO], "n": 128, "logprobs": True, "top_logprobs": 20},
            *(1, 400, "0 of 31 prompt tokens and 5,421,696 of up to"),
            id="too many logprobs of a chat",
        ),
        pytest.param(
            TEXT,
            {"prompt": [5] * 1900, "echo": True, "logprobs": 20, "prompt_logprobs": 20, "n": 4, "max_tokens": 100},
            *(1, 200, "text_completion"),
            id="logprobs",
        ),
        pytest.param(
            TEXT,
            {"prompt": [5] * 1900, "echo": True, "logprobs": 20, "n": 16, "max_tokens": 1, "stream": True},
            *(1, 200, "top_logprobs"),
            id="streamed logprobs of an echo",
        ),
        pytest.param(
            RESPONSES,
            {"input": [HELLO, *[{"type": "reasoning", "content": [{"text": "a"}]}] * 100_000, HELLO]},
            *(1, 400, "of them in input; at most"),
            id="reasoning that no prompt shows",
        ),
        pytest.param(
            RESPONSES, {"input": "a", "user": "x" * 9_000_000, "store": False}, 1, 400, "of them in user", id="a kept field"
        ),
        pytest.param("/tokenize", {"prompt": "hello wo" * 200_000}, 1, 200, '"count"', id="tokenize"),
        pytest.param("/detokenize", {"tokens": [500] * 1_000_000}, 1, 200, '"prompt"', id="detokenize"),
    ],
)
def test_other_clients_do_not_wait_for_a_large_request(
    null_server: LiveServer, watch: LoopWatch, path: str, body: dict[str, Any], count: int, status: int, said: str
) -> None:
    content = json.dumps(body, ensure_ascii=False).encode()
    with watch.measure() as waiting, ThreadPoolExecutor(count) as pool:
        headers = {"Content-Type": "application/json"}
        answers = list(pool.map(lambda _: null_server.http.post(path, content=content, headers=headers), range(count)))
    assert [answer.status_code for answer in answers] == [status] * count, answers[0].text[:500]
    assert said in answers[0].text
    assert waiting.count > 0
    assert waiting.longest < LONGEST_GAP


def test_other_clients_do_not_wait_for_a_long_list_of_requests(null_server: LiveServer, watch: LoopWatch) -> None:
    fields = {"state": "ended", "reason": "stop", "model": "tiny", "enqueued": "1.5", "prompt_tokens": "3", "endpoint": TEXT}
    names = [f"old-{number}" for number in range(10_000)]
    with redis.Redis.from_url(null_server.redis.url) as client, client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hset(keys.record("tiny", name), mapping={"id": name, **fields})
        pipe.zadd(keys.ended("tiny"), dict.fromkeys(names, 1.0))
        pipe.execute()
        with watch.measure() as waiting:
            listed = null_server.http.get("/v1/requests?state=ended&limit=10000").json()["data"]
        for name in names:
            pipe.delete(keys.record("tiny", name))
        pipe.zrem(keys.ended("tiny"), *names)
        pipe.execute()
    assert len(listed) == 10_000
    assert "old-9000" in {request["id"] for request in listed}
    assert waiting.longest < LONGEST_GAP


def test_lists_that_each_prompt_would_repeat_are_limited(null_server: LiveServer) -> None:
    body = {"prompt": ["x"] * 512, "logit_bias": dict.fromkeys(map(str, range(2000)), 1), "max_tokens": 1}
    answer = null_server.http.post(TEXT, json=body)
    assert answer.status_code == 400
    assert "2000 entries in each of 512 prompts" in answer.json()["error"]["message"]
