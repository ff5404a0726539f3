"""Deltas of tool calls: what they add up to, streamed, whole, and told by two servers one after the other."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from api.response.message_parts import ChatDelta, MessageReader, whole_message
from api.response.output_processor import ChoiceOutput
from engine.protocol import AnswerOptions, FinishReason

TEXT = (
    'Let me see.\n<tool_call>{"name": "f", "arguments": {"a": [1, 2]}}</tool_call>\n'
    '<tool_call>{"arguments": {}, "name": "g"}</tool_call> <tool'
)
CALLS = [("f", '{"a": [1, 2]}'), ("g", "{}")]


def calls() -> MessageReader:
    return MessageReader(AnswerOptions(tool_format="hermes", tools={"f": {}, "g": {}}), "request", 0)


def outputs(pieces: list[str]) -> list[ChoiceOutput]:
    *first, last = pieces
    return [*(ChoiceOutput(0, text) for text in first), ChoiceOutput(0, last, finish_reason=FinishReason.STOP)]


def summed(deltas: list[ChatDelta]) -> tuple[str, list[tuple[str, str]]]:
    content, found = "", []
    for _, delta in deltas:
        content += delta.get("content", "")
        for part in delta.get("tool_calls", []):
            if "id" in part:
                assert part["function"]["arguments"] == ""
                found.append([part["function"]["name"], ""])
            else:
                found[part["index"]][1] += part["function"]["arguments"]
    return content, [(name, arguments) for name, arguments in found]


def cut(text: str, places: list[int]) -> list[str]:
    places = sorted(place % (len(text) + 1) for place in places)
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


def test_a_whole_message_has_content_and_calls() -> None:
    (output,) = outputs([TEXT])
    message = whole_message(calls(), output, "")
    assert message["content"] == "Let me see. <tool"
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]] == CALLS
    ids = {call["id"] for call in message["tool_calls"]}
    assert len(ids) == 2 and all(name.startswith("call_") for name in ids)
    (nothing,) = outputs([""])
    assert whole_message(calls(), nothing, "") == {"content": None, "reasoning": None}


@given(st.lists(st.integers(0, 500), max_size=6), st.lists(st.integers(0, 500), max_size=6), st.integers(0, 500))
def test_another_server_tells_the_rest_and_nothing_twice(here: list[int], there: list[int], stop: int) -> None:
    """A client's place is the position of the last delta that it got, wherever the servers cut the text."""
    first = calls()
    told = [delta for output in outputs(cut(TEXT, here)) for delta in first.read(output)]
    assert summed(told) == ("Let me see. <tool", CALLS)
    told = told[: stop % (len(told) + 1)]
    position = told[-1].position if told else 0
    second = calls()
    rest: list[Any] = [delta for output in outputs(cut(TEXT, there)) for delta in second.read(output, position)]
    assert summed(told + rest) == ("Let me see. <tool", CALLS)
    assert second.finish_reason(FinishReason.STOP) == "tool_calls"
    assert second.finish_reason(FinishReason.LENGTH) == "length"


def test_an_answer_without_calls_stops() -> None:
    choice = calls()
    assert summed(list(choice.read(outputs(["Hello"])[0]))) == ("Hello", [])
    assert choice.finish_reason(FinishReason.STOP) == "stop"


THOUGHT = f"\nHm, <so.\n</think>\n\n{TEXT}"


@given(st.lists(st.integers(0, 500), max_size=6), st.lists(st.integers(0, 500), max_size=6), st.integers(0, 500), st.booleans())
def test_reasoning_comes_before_content_and_calls(here: list[int], there: list[int], stop: int, hidden: bool) -> None:
    """Also where another server goes on in the middle of it."""

    def reader() -> MessageReader:
        options = AnswerOptions(
            tool_format="hermes", tools={"f": {}}, reasoning_format="think", reasoning_open=True, reasoning_hidden=hidden
        )
        return MessageReader(options, "request", 0)

    def reasoning(deltas: list[ChatDelta]) -> str:
        assert all(delta.get("reasoning") == delta.get("reasoning_content") for _, delta in deltas)
        return "".join(delta.get("reasoning", "") for _, delta in deltas)

    first, second = reader(), reader()
    told = [delta for output in outputs(cut(THOUGHT, here)) for delta in first.read(output)]
    expected = "" if hidden else "Hm, <so."
    assert (reasoning(told), summed(told)) == (expected, ("Let me see. <tool", CALLS))
    told = told[: stop % (len(told) + 1)]
    rest = [delta for output in outputs(cut(THOUGHT, there)) for delta in second.read(output, told[-1].position if told else 0)]
    assert (reasoning(told + rest), summed(told + rest)) == (expected, ("Let me see. <tool", CALLS))
    (output,) = outputs([THOUGHT])
    message = whole_message(reader(), output, "")
    assert (message["reasoning"], message["content"]) == (expected or None, "Let me see. <tool")


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(0, 30))
def test_reasoning_that_is_cut_off_is_told_once(here: list[int], stop: int) -> None:
    options = AnswerOptions(reasoning_format="think", reasoning_open=True)
    first, second = MessageReader(options, "request", 0), MessageReader(options, "request", 0)
    told = [delta for output in outputs(cut("Hm </thi", here)) for delta in first.read(output)]
    assert "".join(delta["reasoning"] for _, delta in told) == "Hm </thi"
    told = told[: stop % (len(told) + 1)]
    rest = [delta for output in outputs(["Hm </thi"]) for delta in second.read(output, told[-1].position if told else 0)]
    assert "".join(delta["reasoning"] for _, delta in told + rest) == "Hm </thi"
