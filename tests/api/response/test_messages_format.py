"""Events of Anthropic's messages: they add up to the whole message, however the text is cut, and behind each of their ids any
API server goes on without a loss or a repetition."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic_core import from_json

from api.errors import GenerationError
from api.preparation.task import Task
from api.request.prompts import Prompt
from api.response.generation import Generation
from api.response.message_parts import MessageReader, whole_message
from api.response.messages_format import MessagesFormat
from api.response.output_processor import ChoiceOutput
from api.response.stream_position import StreamPosition
from api.text.tokenizer import TextTokenizer
from engine.config import ApiConfig
from engine.protocol import AnswerOptions, FinishReason
from gpu.plan import SamplingParams
from tests.api.response.test_generation import FakeModel, Recorder
from tests.api.response.test_message_parts import cut
from tests.api.tools.test_parser import CASES, TOOLS

TEXT = (
    'Hm, <so.\n</think>\n\nI look.\n<tool_call>\n{"name": "f", "arguments": {"city": "Oslo", "n": [1, 2]}}\n</tool_call>\n'
    '<tool_call>{"arguments": {}, "name": "g"}</tool_call>'
)
CONTENT = [
    {"type": "thinking", "thinking": "Hm, <so.", "signature": ""},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "f", "input": {"city": "Oslo", "n": [1, 2]}},
    {"type": "tool_use", "name": "g", "input": {}},
]
THOUGHTS = {"": "", "think": "<think>\nHm.\n</think>\n\n", "mistral": "[THINK]Hm. [/THINK]"}
Event = tuple[str, str, dict[str, Any]]  # id, type, data
TOKENIZER: TextTokenizer  # which hypothesis' functions share
Pieces = st.lists(st.integers(0, 500), max_size=8)


def outputs(pieces: list[str], reason: FinishReason = FinishReason.STOP, stop: str | None = None) -> list[ChoiceOutput]:
    *first, last = pieces
    return [*(ChoiceOutput(0, text) for text in first), ChoiceOutput(0, last, (), (), reason, stop)]


HERMES = AnswerOptions(tool_format="hermes", tools={"f": {}, "g": {}}, reasoning_format="think", reasoning_open=True)


def make(last_id: str | None = None, options: AnswerOptions = HERMES) -> MessagesFormat:
    """`last_id`: of the last event that the client has, "" for none; None: of a stream that cannot be continued."""
    model: Any = FakeModel(TOKENIZER)
    task = Task("/v1/messages", model, [Prompt([5, 6])], [SamplingParams(max_tokens=99)], options, stream=True)
    generation = Generation(task, "mine", ["mine-1"], 1.0, "tenant", Recorder())
    if last_id is None:
        return MessagesFormat(generation, ApiConfig())
    return MessagesFormat(generation, ApiConfig(), StreamPosition.parse(last_id, 1) if last_id else StreamPosition(1))


def events(format: MessagesFormat, parts: list[ChoiceOutput]) -> list[Event]:
    written = format.opening() + b"".join(map(format.chunks, parts)) + format.closing()
    found = []
    for event in written.decode().split("\n\n")[:-1]:
        *ids, type, data = event.split("\n")
        found.append(("".join(ids).removeprefix("id: "), type.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def summed(told: list[Event]) -> dict[str, Any]:
    """The message that a client makes of the events, which come in the order that Anthropic's documentation gives."""
    message: dict[str, Any] = {}
    blocks: list[dict[str, Any]] = []
    is_open = False
    for _, type, data in told:
        assert data["type"] == type
        match type:
            case "message_start":
                assert not message
                message = dict(data["message"])
            case "content_block_start":
                assert not is_open and data["index"] == len(blocks)
                is_open = True
                blocks.append({**data["content_block"], "json": ""})
            case "content_block_delta":
                assert is_open and data["index"] == len(blocks) - 1
                block, delta = blocks[-1], data["delta"]
                name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}[delta["type"]]
                assert delta[name]
                block["json" if name == "partial_json" else name] += delta[name]
            case "content_block_stop":
                assert is_open and data["index"] == len(blocks) - 1
                is_open = False
            case "message_delta":
                assert not is_open
                message |= data["delta"] | {"usage": data["usage"]}
            case "message_stop":
                message["stopped"] = message.get("stopped", 0) + 1
    for block in blocks:
        written = block.pop("json")
        if written:
            block["input"] = from_json(written, allow_partial=True)
    return {**message, "content": blocks}


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


@pytest.fixture(scope="module", autouse=True)
def module_tokenizer(tokenizer: TextTokenizer) -> None:
    global TOKENIZER
    TOKENIZER = tokenizer


@given(Pieces)
def test_the_events_add_up_to_the_whole_message(places: list[int]) -> None:
    told = summed(events(make(), outputs(cut(TEXT, places))))
    whole = json.loads(make().whole(outputs([TEXT])))
    assert told.pop("stopped") == 1
    assert told == whole
    assert without_ids(whole["content"]) == CONTENT
    assert whole["stop_reason"] == "tool_use"
    assert len({block["id"] for block in whole["content"] if "id" in block}) == 2


@given(st.sampled_from(CASES), st.sampled_from(list(THOUGHTS)), st.booleans(), st.integers(0, 99), Pieces)
@example(("hermes", '<tool_call>{"arguments": {"city": "Oslo"}, "name": "f"x y', "", []), "", False, 0, list(range(99)))
def test_the_sum_is_the_whole_message_in_every_format_of_tools_and_reasoning(
    case: tuple[str, str, str, Any], thoughts: str, one_call: bool, missing: int, places: list[int]
) -> None:
    """Also where the text breaks off. The whole message has what a chat's has."""
    format, text, _, _ = case
    text = THOUGHTS[thoughts] + text[: max(0, len(text) - missing)]
    options = AnswerOptions(tool_format=format, tools=TOOLS, one_call=one_call, reasoning_format=thoughts)
    whole = json.loads(make(options=options).whole(outputs([text])))
    told = summed(events(make(options=options), outputs(cut(text, places))))
    assert told.pop("stopped") == 1
    assert told == whole
    message = whole_message(MessageReader(options, "mine-1", 0), outputs([text])[0], "")
    kinds: dict[str, list[Any]] = {"thinking": [], "text": [], "tool_use": []}
    for block in whole["content"]:
        kinds[block["type"]].append(block)
    assert "".join(block["thinking"] for block in kinds["thinking"]) == (message["reasoning"] or "")
    assert "".join(block["text"] for block in kinds["text"]) == (message["content"] or "")
    called = [(call["id"], call["function"]["name"], written(call["function"])) for call in message.get("tool_calls", [])]
    assert [(block["id"], block["name"], block["input"]) for block in kinds["tool_use"]] == called


def written(function: dict[str, str]) -> Any:
    """Arguments, as far as they are there."""
    return from_json(function["arguments"] or "{}", allow_partial=True)


@given(Pieces, Pieces, st.integers(0, 500))
def test_another_server_tells_the_rest_and_nothing_twice(here: list[int], there: list[int], stop: int) -> None:
    told = events(make(""), outputs(cut(TEXT, here)))
    expected = summed(told)
    told = told[: stop % (len(told) + 1)]
    rest = events(make(told[-1][0] if told else ""), outputs(cut(TEXT, there)))
    assert summed([*told, *rest]) == expected
    assert rest or told[-1][1] == "message_stop"


@pytest.mark.parametrize(
    ("text", "reason", "stop", "expected"),
    [
        ("Hm.</think>Hello", FinishReason.STOP, None, ("end_turn", None)),
        ("Hm.</think>Hello", FinishReason.STOP, "!", ("stop_sequence", "!")),
        ("Hm.</think>Hello", FinishReason.LENGTH, None, ("max_tokens", None)),
        ("Hm.</think>Hello", FinishReason.ABORT, None, ("abort", None)),
        (TEXT, FinishReason.LENGTH, None, ("max_tokens", None)),
    ],
)
def test_why_a_message_ended(text: str, reason: FinishReason, stop: str | None, expected: tuple[str, str | None]) -> None:
    whole = json.loads(make().whole(outputs([text], reason, stop)))
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected


def test_a_call_that_was_cut_off_has_the_input_that_was_written() -> None:
    whole = json.loads(make().whole(outputs(['.</think><tool_call>{"name": "f", "arguments": {"city": "Os'], FinishReason.LENGTH)))
    assert whole["content"][-1]["input"] in ({"city": "Os"}, {})
    assert whole["content"][-1]["name"] == "f"


def test_an_answer_without_a_word_has_no_blocks() -> None:
    assert json.loads(make().whole(outputs([""])))["content"] == []
    assert [type for _, type, _ in events(make(), outputs([""]))] == ["message_start", "message_delta", "message_stop"]


def test_a_failure_ends_the_stream_with_an_error() -> None:
    event = make().failure(GenerationError("broken")).decode()
    assert event.startswith("event: error\ndata: ") and event.endswith("\n\n")
    error = json.loads(event.partition("data: ")[2])
    assert error == {"type": "error", "error": {"type": "api_error", "message": "broken"}, "request_id": "mine"}
