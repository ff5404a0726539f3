"""Content and calls of every format, and that no cut of a text into pieces changes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from api.tools.formats import FORMATS
from api.tools.parser import ToolDelta, ToolParser

TOOLS = {
    "get_weather": {"city": "string", "days": "integer", "options": "object", "any": ""},
    "stop": {},
}
Calls = list[tuple[str, str]]


def summed(deltas: list[ToolDelta]) -> tuple[str, Calls]:
    """Content and calls that deltas add up to, as a client of OpenAI's adds them."""
    content = ""
    calls: list[list[str]] = []
    position = 0
    for delta in deltas:
        assert delta.position >= position
        position = delta.position
        if delta.call < 0:
            assert delta.text
            content += delta.text
        elif delta.name is not None:
            assert delta.call == len(calls)
            assert not delta.text
            calls.append([delta.name, ""])
        else:
            assert delta.text
            calls[delta.call][1] += delta.text
    return content, [(name, arguments) for name, arguments in calls]


def told_by(format: str, pieces: list[str], **options: Any) -> list[ToolDelta]:
    parser = ToolParser(FORMATS[format], TOOLS, **options)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return deltas + parser.finish()


def parsed(format: str, text: str, **options: Any) -> tuple[str, Calls]:
    return summed(told_by(format, [text], **options))


def call(**arguments: Any) -> tuple[str, str]:
    return "get_weather", json.dumps(arguments, ensure_ascii=False)


OSLO = call(city="Oslo")
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
QWEN = "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n</invoke>\n</minimax:tool_call>'
)
MISTRAL = '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}'
BARE = '{"name": "get_weather", "parameters": {"city": "Oslo"}}'
CASES: list[tuple[str, str, str, Calls]] = [
    ("hermes", HERMES, "", [OSLO]),
    ("hermes", f"Let me look.\n\n{HERMES}\n{HERMES}\n", "Let me look.", [OSLO, OSLO]),
    ("hermes", f"{HERMES} done ", " done ", [OSLO]),
    ("hermes", "no call < here <tool \n", "no call < here <tool \n", []),
    ("hermes", '<tool_call>{"name": "stop"}</tool_call>', "", [("stop", "{}")]),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": null}</tool_call>', "", [("unknown", "{}")]),
    ("hermes", '<tool_call>{"arguments": {"city": "Oslo"}, "name": "get_weather"}</tool_call>', "", [OSLO]),
    ("hermes", '<tool_call>{"id": [1, {}], "name": "get_weather", "arguments": {"city": "Oslo"}, "x": 1}', "", [OSLO]),
    ("hermes", '<tool_call>{"name": "stop", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("stop", '{"a": 1}')]),
    ("hermes", "<tool_call>junk</tool_call>", "<tool_call>junk</tool_call>", []),
    ("hermes", f"<tool_call><tool_call>{HERMES}", "<tool_call><tool_call>", [OSLO]),
    ("hermes", '<tool_call>{"name": "stop', '<tool_call>{"name": "stop', []),
    ("hermes", '<tool_call>{"name": "st\\', '<tool_call>{"name": "st\\', []),
    ("hermes", '<tool_call>{"name": "stop", "arguments":', "", [("stop", "")]),
    ("hermes", '<tool_call>{"name": "stop", "arguments": {"a": [1', "", [("stop", '{"a": [1')]),
    ("hermes", '<tool_call>{"name": "stop", "arguments": {"a": 1]}} x', "]}} x", [("stop", '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "stop"} and text', " and text", [("stop", "{}")]),
    ("hermes", f'<tool_call>{{"name": "stop"}}{HERMES}', "", [("stop", "{}"), OSLO]),
    (
        "hermes",
        '<tool_call>{"name": "stop", "arguments": {"a": "}</tool_call>\\"{"}}</tool_call>',
        "",
        [("stop", '{"a": "}</tool_call>\\"{"}')],
    ),
    ("llama3_json", BARE, "", [OSLO]),
    ("llama3_json", f"<|python_tag|>{BARE}; {BARE}", "", [OSLO, OSLO]),
    ("llama3_json", f"\n{BARE} so", " so", [OSLO]),
    ("llama3_json", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ("llama3_json", ' {"a": 1}\n', ' {"a": 1}\n', []),
    ("llama3_json", f"So: {BARE}", f"So: {BARE}", []),
    ("llama3_json", "", "", []),
    ("mistral", MISTRAL, "", [OSLO]),
    ("mistral", f"Ok. {MISTRAL}{MISTRAL}", "Ok.", [OSLO, OSLO]),
    ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{"city": "Oslo"}', "", [OSLO]),
    (
        "mistral_list",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}, {"name": "stop"}]',
        "",
        [OSLO, ("stop", "{}")],
    ),
    ("mistral_list", '[TOOL_CALLS]get_weather{"city": "Oslo"}', "", [OSLO]),
    ("mistral_list", "[TOOL_CALLS] [1]", "[TOOL_CALLS] [1]", []),
    ("qwen3_coder", QWEN, "", [OSLO]),
    ("qwen3_coder", f"I see.\n{QWEN}\n{QWEN}", "I see.", [OSLO, OSLO]),
    ("qwen3_coder", QWEN.replace("Oslo", 'a\n"b\\'), "", [call(city='a\n"b\\')]),
    ("qwen3_coder", QWEN.replace("city", "days").replace("Oslo", "3"), "", [call(days=3)]),
    ("qwen3_coder", QWEN.replace("city", "days").replace("Oslo", "three"), "", [call(days="three")]),
    ("qwen3_coder", QWEN.replace("city", "options").replace("Oslo", '{"a": [true]}'), "", [call(options={"a": [True]})]),
    ("qwen3_coder", "<tool_call><function=stop></function></tool_call>", "", [("stop", "{}")]),
    ("glm", GLM, "", [OSLO]),
    ("glm", "<tool_call>stop</tool_call>", "", [("stop", "{}")]),
    (
        "glm",
        "<tool_call>get_weather<arg_key>any</arg_key><arg_value>True</arg_value>"
        "<arg_key>city</arg_key><arg_value> 5\n</arg_value></tool_call>",
        "",
        [call(any=True, city=" 5\n")],
    ),
    ("minimax", MINIMAX, "", [OSLO]),
    ("minimax", "A" + MINIMAX.replace("</minimax", '<invoke name="stop"></invoke></minimax'), "A", [OSLO, ("stop", "{}")]),
    ("gemma", '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>', "", [OSLO]),
    (
        "functiongemma",
        'So<start_function_call>call:get_weather{city:<escape>a, {b} "c"<escape>,days:3,options:{a:[<escape>x<escape>,true]}}'
        "<end_function_call><start_function_call>call:stop{}<end_function_call>",
        "So",
        [call(city='a, {b} "c"', days=3, options={"a": ["x", True]}), ("stop", "{}")],
    ),
    ("functiongemma", "<start_function_call>call:get_weather{days:x}", "", [call(days="x")]),
    ("pythonic", '[get_weather(city="Oslo")]', "", [OSLO]),
    (
        "pythonic",
        "<|python_start|>[get_weather(city='O\\'s, (lo', days=3, any=[True, None]), stop()]<|python_end|>",
        "",
        [call(city="O's, (lo", days=3, any=[True, None]), ("stop", "{}")],
    ),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[other()]", "[other()]", []),
    ("pythonic", "[get_weather(days=true, any=x)]", "", [call(days=True, any="x")]),
]


@pytest.mark.parametrize(("format", "text", "content", "calls"), CASES)
def test_content_and_calls(format: str, text: str, content: str, calls: Calls) -> None:
    assert parsed(format, text) == (content, calls)
    assert summed(told_by(format, list(text))) == (content, calls)


def test_a_text_may_break_off_anywhere() -> None:
    """It loses nothing: without a call it is content."""
    for format, text, _, _ in CASES:
        for length in range(len(text)):
            broken = text[:length]
            content, calls = parsed(format, broken)
            assert summed(told_by(format, list(broken))) == (content, calls)
            assert calls or content == broken


def test_one_call_alone() -> None:
    assert parsed("hermes", f"{HERMES}{HERMES} x", one_call=True) == (" x", [OSLO])


def test_content_is_held_back_no_longer_than_needed() -> None:
    parser = ToolParser(FORMATS["hermes"], TOOLS)
    assert summed(parser.feed("a <tool")) == ("a", [])
    assert summed(parser.feed("s> b")) == (" <tools> b", [])
    assert summed(parser.feed('<tool_call>{"name": "stop"')) == ("", [("stop", "")])
    assert [delta.text for delta in parser.feed(', "arguments": {"a')] == ['{"a']


def test_a_name_that_does_not_come_is_not_waited_for() -> None:
    parser = ToolParser(FORMATS["hermes"], TOOLS)
    text = '<tool_call>{"' + "x" * 3000
    assert len(summed(parser.feed(text))[0]) > 2000
    assert summed(told_by("hermes", [text]))[0] == text


def test_the_first_delta_of_a_call_has_its_name_alone() -> None:
    for format, text, _, calls in CASES:
        deltas = told_by(format, list(text))
        assert sum(1 for delta in deltas if delta.name is not None) == len(calls)


PIECES = [
    *{text for _, text, _, _ in CASES},
    "<",
    "<tool_call>",
    '{"',
    "[",
    "\n",
    " ",
    "</tool_call>",
    "]",
    "}",
    '"',
    "a",
    "é",
    "\\",
]


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A format, and pieces of what may be a text in it."""
    format = draw(st.sampled_from(list(FORMATS)))
    parts = draw(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=4))
    text = "".join(part[: draw(st.integers(0, len(part)))] if draw(st.booleans()) else part for part in parts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return format, [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(cut_texts())
@example(("hermes", ["a ", "<tool_call>", " "]))
def test_no_cut_changes_what_a_text_tells(cut: tuple[str, list[str]]) -> None:
    """Nor how much of it is told after each piece: what another API server relies on that goes on with a stream."""
    format, pieces = cut
    parser = ToolParser(FORMATS[format], TOOLS)
    told: list[ToolDelta] = []
    text = ""
    for piece in pieces:
        text += piece
        told += parser.feed(piece)
        assert summed(told) == summed(ToolParser(FORMATS[format], TOOLS).feed(text))
    told += parser.finish()
    assert summed(told) == summed(told_by(format, list(text))) == parsed(format, text)
