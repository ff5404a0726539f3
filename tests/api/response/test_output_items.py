"""The items and events of a response: however outputs are cut and merged, the same tokens tell the same."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from api.response.message_parts import MessageReader
from api.response.output_items import Event, OutputItems
from api.response.output_processor import ChoiceOutput, CollectedOutput, TokenLogprobs
from engine.protocol import AnswerOptions, FinishReason

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b c"}}\n</tool_call>'
FRAGMENTS = ["<think>", "</think>", CALL, CALL[:20], CALL[-30:], "<tool_call>", "\n", "  ", "word", " and more", "é"]
ANSWER = AnswerOptions(tool_format="hermes", tools={"f": {}}, reasoning_format="think")
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


@st.composite
def tokens(draw: st.DrawFn) -> list[str]:
    """A text cut into tokens, of which some have none of it."""
    text = draw(TEXTS)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=20)))
    return [text[start:end] for start, end in pairwise([0, *places, len(text)])]


def outputs(texts: list[str], reason: FinishReason = FinishReason.STOP) -> list[ChoiceOutput]:
    """Those of the tokens, and the end, as a `Choice` tells them."""
    made = [ChoiceOutput(0, text, (number,), (TokenLogprobs(0, [number], [-1.0], 1),)) for number, text in enumerate(texts)]
    return [*made, ChoiceOutput(0, finish_reason=reason)]


def items(answer: AnswerOptions = ANSWER) -> OutputItems:
    return OutputItems(MessageReader(answer, "r", 0), "r", lambda entries: [entry.token_ids[0] for entry in entries])


def told(parts: list[ChoiceOutput]) -> tuple[list[Event], list[dict[str, Any]]]:
    """Events, and the items after the last one."""
    made = items()
    events: list[Event] = []
    for part in parts:
        for piece in part.pieces or (part,):
            events += made.take(piece)
    return [*events, *made.close("completed")], made.items


@given(tokens(), st.data())
def test_merged_outputs_tell_the_events_of_their_tokens(texts: list[str], data: st.DataObject) -> None:
    single = outputs(texts)
    parts, merged = [], CollectedOutput(0, keeps_pieces=True)
    for output in single:
        merged.add(output)
        if output is single[-1] or data.draw(st.booleans()):
            parts.append(merged.output())
            merged = CollectedOutput(0, keeps_pieces=True)
    assert told(parts) == told(single)


@given(tokens())
def test_items_do_not_depend_on_how_the_text_is_cut(texts: list[str]) -> None:
    def shown(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Without logprobs, which go with the tokens."""
        return [{**item, "content": [{**part, "logprobs": []} for part in item.get("content", [])]} for item in items]

    assert shown(told(outputs(texts))[1]) == shown(told(outputs(["".join(texts)]))[1])


@given(tokens())
def test_each_done_event_has_the_sum_of_its_deltas(texts: list[str]) -> None:
    events, made = told(outputs(texts))
    sums: dict[str, str] = {}
    logprobs: dict[str, list[int]] = {}
    open_items: list[str] = []
    for kind, members in events:
        if kind == "output_item.added":
            assert members["item"]["status"] == "in_progress" and members["output_index"] == len(sums)
            assert not open_items
            open_items.append(members["item"]["id"])
            sums[open_items[0]], logprobs[open_items[0]] = "", []
        elif kind == "output_item.done":
            assert open_items.pop() == members["item"]["id"]
            assert members["item"] == made[members["output_index"]] and members["item"]["status"] == "completed"
        elif kind.endswith(".delta"):
            assert members["delta"] and members["item_id"] in open_items
            sums[members["item_id"]] += members["delta"]
            logprobs[members["item_id"]] += members.get("logprobs", [])
        elif kind == "function_call_arguments.done":
            assert members["arguments"] == sums[members["item_id"]]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert members["text"] == sums[members["item_id"]]
            assert members.get("logprobs", []) == logprobs[members["item_id"]]
        elif kind == "content_part.done":
            assert members["part"]["text"] == sums[members["item_id"]]
    assert not open_items


def test_an_item_that_a_limit_cuts_off_is_incomplete() -> None:
    for text, kind in ((CALL[:-20], "function_call"), ("<think>So", "reasoning"), ("Well", "message")):
        made = items()
        for output in outputs(list(text), FinishReason.LENGTH):
            made.take(output)
        events = made.close("incomplete")
        (item,) = made.items
        assert (item["type"], item["status"]) == (kind, "incomplete")
        assert events[-1] == ("output_item.done", {"output_index": 0, "item": item})
