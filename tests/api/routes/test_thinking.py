"""Thinking budgets through real processes: a model whose marks are tokens is made to end its reasoning, and the answer goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.live_server import LiveServer, sse_events

PATH = "/v1/chat/completions"
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"
)
MARKS = {"<repo_name>": "<think>", "<file_sep>": "</think>"}


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A small random model, two of whose unused tokens are the marks."""
    folder = tmp_path_factory.mktemp("thinker")
    shutil.copytree(tiny_llama, folder, dirs_exist_ok=True)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    for token in tokenizer["added_tokens"]:
        token["content"] = MARKS.get(token["content"], token["content"])
    vocab = tokenizer["model"]["vocab"]
    for old, new in MARKS.items():
        vocab[new] = vocab.pop(old)
    path.write_text(json.dumps(tokenizer))
    template = folder / "thinking.jinja"
    template.write_text(TEMPLATE)
    with LiveServer(folder, ("--seed", "0"), ("--chat-template", str(template))) as server:
        yield server


def body(budget: int | None, **fields: Any) -> dict[str, Any]:
    common = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    return {**common, "thinking_token_budget": budget, **fields}


def asked(server: LiveServer, budget: int | None, **fields: Any) -> tuple[list[Any], dict[str, Any]]:
    """Choices and usage."""
    answer = server.http.post(PATH, json=body(budget, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"], answer.json()["usage"]


def test_reasoning_ends_behind_its_budget_and_the_answer_goes_on(server: LiveServer) -> None:
    (free,), usage = asked(server, None)
    assert free["message"]["content"] is None and usage["completion_tokens_details"] == {"reasoning_tokens": 40}
    (held,), usage = asked(server, 10)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 11}, "with the mark"
    assert usage["completion_tokens"] == 40
    assert free["message"]["reasoning"].startswith(held["message"]["reasoning"].rstrip("\ufffd"))
    assert held["message"]["content"]
    (none,), usage = asked(server, 0)
    assert (none["message"]["reasoning"], usage["completion_tokens_details"]) == (None, {"reasoning_tokens": 1})
    assert asked(server, -1)[0] == [free]
    assert (
        asked(server, 5, chat_template_kwargs={"enable_thinking": False})[1]["completion_tokens_details"]["reasoning_tokens"] == 0
    )


def test_choices_streams_and_forms_keep_the_budget(server: LiveServer) -> None:
    more: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 5, "presence_penalty": 1.0}
    choices, usage = asked(server, 8, **more)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 27}
    assert len({choice["message"]["content"] for choice in choices}) == 3
    streamed = server.http.post(PATH, json=body(8, **more, stream=True, stream_options={"include_usage": True}))
    events = sse_events(streamed.text.splitlines())[:-1]
    assert events[-1]["usage"] == usage
    deltas = [item for event in events for item in event["choices"]]
    for index, choice in enumerate(choices):
        for name in ("reasoning", "content"):
            told = "".join(item["delta"].get(name) or "" for item in deltas if item["index"] == index)
            assert told == choice["message"][name]
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
    (formed,), _ = asked(server, 6, response_format=schema, ignore_eos=False)
    assert formed["message"]["content"] in ("true", "false")


def test_an_engines_death_changes_nothing(server: LiveServer) -> None:
    asking = body(30, max_tokens=400, stream=True, stream_options={"include_usage": True})
    (calm,), usage = asked(server, 30, max_tokens=400)
    with server.http.stream("POST", PATH, json=asking) as answer:
        lines: list[str] = []
        for line in answer.iter_lines():
            lines.append(line)
            if len(lines) == 20:
                server.restart_engine()
    events = sse_events(lines)[:-1]
    deltas = [item["delta"] for event in events for item in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == calm["message"]["content"]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == calm["message"]["reasoning"]
    assert events[-1]["usage"] == usage


@pytest.mark.parametrize("budget", [-2, 2**31, "5", 1.5])
def test_budgets_that_cannot_be_are_refused(server: LiveServer, budget: Any) -> None:
    refused = server.http.post(PATH, json=body(budget))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] in ("thinking_token_budget", "body.thinking_token_budget")


def test_a_model_without_marks_refuses_a_budget(null_server: LiveServer) -> None:
    refused = null_server.http.post(PATH, json=body(5))
    assert refused.status_code == 400
    assert "needs a model that marks its reasoning" in refused.json()["error"]["message"]
