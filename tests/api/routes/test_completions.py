"""Text completions against real processes: lists of prompts, echo, scoring, logprobs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from api.text.tokenizer import TextTokenizer
from tests.api.live_server import LiveServer, sse_events

PATH = "/v1/completions"


def ask(server: LiveServer, prompt: Any = "Once upon", **fields: Any) -> dict[str, Any]:
    answer = server.http.post(PATH, json={"prompt": prompt, "seed": 5, "max_tokens": 6, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def stream(server: LiveServer, prompt: Any = "Once upon", **fields: Any) -> list[Any]:
    body = {"prompt": prompt, "seed": 5, "max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}, **fields}
    with server.http.stream("POST", PATH, json=body, timeout=60) as answer:
        assert answer.status_code == 200
        events = sse_events(list(answer.iter_lines()))
    assert events.pop() == "[DONE]"
    return events


def add_up(events: list[Any], count: int) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = [{"index": index, "text": "", "logprobs": None} for index in range(count)]
    for event in events:
        for part in event["choices"]:
            choice = choices[part["index"]]
            choice["text"] += part["text"]
            if part["logprobs"]:
                whole = choice["logprobs"] = choice["logprobs"] or {name: [] for name in part["logprobs"]}
                for name, values in part["logprobs"].items():
                    whole[name] += values
            if part["finish_reason"]:
                choice["finish_reason"], choice["stop_reason"] = part["finish_reason"], part["stop_reason"]
    return choices


MATRIX = [
    (echo, logprobs, max_tokens, n)
    for echo, logprobs, max_tokens, n in itertools.product([False, True], [None, 0, 2], [0, 1, 6], [1, 2])
    if echo or max_tokens  # else refused: nothing would be answered
]


@pytest.mark.parametrize(("echo", "logprobs", "max_tokens", "n"), MATRIX)
def test_streamed_and_whole_agree(null_server: LiveServer, echo: bool, logprobs: int | None, max_tokens: int, n: int) -> None:
    """Every combination of echo, logprobs, length and n, over two prompts."""
    fields = {"echo": echo, "logprobs": logprobs, "max_tokens": max_tokens, "n": n}
    prompts = ["Once upon", "a naïve 🚀"]
    whole = ask(null_server, prompts, **fields)
    events = stream(null_server, prompts, **fields)
    streamed = add_up(events, 2 * n)
    assert [choice["index"] for choice in whole["choices"]] == list(range(2 * n))
    for one, other in zip(whole["choices"], streamed, strict=True):
        assert {name: one[name] for name in other} == other
        assert one["text"].startswith(prompts[one["index"] // n]) is echo
    assert events[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 2 * n * max_tokens


def test_choices_of_the_same_prompt_differ(null_server: LiveServer) -> None:
    assert len({choice["text"] for choice in ask(null_server, n=4)["choices"]}) == 4


def test_text_and_tokens_are_the_same_prompt(null_server: LiveServer, tokenizer: TextTokenizer) -> None:
    token_ids = tokenizer.encode("Once upon")
    texts = [ask(null_server, prompt)["choices"][0]["text"] for prompt in ("Once upon", token_ids, [token_ids])]
    assert len(set(texts)) == 1


@pytest.mark.parametrize("logprobs", [0, 1, 5])
def test_a_scored_prompt_has_logprobs_of_each_token(null_server: LiveServer, tokenizer: TextTokenizer, logprobs: int) -> None:
    prompt = "Scoring: naïve 🚀 text"
    body = ask(null_server, prompt, echo=True, max_tokens=0, logprobs=logprobs)
    (choice,) = body["choices"]
    count = len(tokenizer.encode(prompt))
    assert choice["text"] == prompt
    assert choice["logprobs"].keys() == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert {len(values) for values in choice["logprobs"].values()} == {count}
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert all(isinstance(value, float) for value in choice["logprobs"]["token_logprobs"][1:])
    assert body["usage"] == {
        "prompt_tokens": count,
        "total_tokens": count,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }
    record = null_server.http.get(f"/v1/requests/{body['id']}").json()
    assert (record["output_tokens"], record["max_tokens"], record["prompt_tokens"]) == (0, 0, count)


def test_offsets_point_into_the_text(null_server: LiveServer) -> None:
    (choice,) = ask(null_server, "offsets count", echo=True, logprobs=1, max_tokens=20)["choices"]
    text, logprobs = choice["text"], choice["logprobs"]
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        if not token.startswith("bytes:") and "\ufffd" not in text[offset : offset + len(token)]:
            assert text[offset : offset + len(token)] == token


def test_return_token_ids_shows_prompt_and_output(null_server: LiveServer, tokenizer: TextTokenizer) -> None:
    (choice,) = ask(null_server, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == tokenizer.encode("Once upon")
    assert len(choice["token_ids"]) == 6
    assert tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == choice["text"]
    first, *rest = [event["choices"][0] for event in stream(null_server, return_token_ids=True) if event["choices"]]
    assert first["prompt_token_ids"] == choice["prompt_token_ids"]
    assert all("prompt_token_ids" not in part for part in rest)


def test_truncation_keeps_the_end(null_server: LiveServer) -> None:
    body = ask(null_server, [10, 11, 12, 13], truncate_prompt_tokens=2, return_token_ids=True)
    assert body["choices"][0]["prompt_token_ids"] == [12, 13]
    assert body["usage"]["prompt_tokens"] == 2


def test_a_hundred_prompts_are_answered_in_order(null_server: LiveServer) -> None:
    answer = null_server.http.post(PATH, json={"prompt": ["x"] * 100, "max_tokens": 2}, timeout=60)
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(100))
    assert answer.headers["x-headrace-request-id"].endswith(", ...")
    assert len(answer.headers["x-headrace-request-id"]) < 8192
