"""Grammars of tool calls: what they let through, the parser reads, and they let nothing else through."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from api.errors import BadRequest
from api.request.schemas import ChatCompletionRequest
from api.request.tools import AUTO, OFF, check_tools, tool_use, tools_of_template
from api.tools.formats import FORMATS, format_of_template
from api.tools.parser import ToolParser
from engine.config import ApiConfig
from engine.protocol import AnswerOptions
from tests.api.tools.test_parser import summed
from tests.byte_tokenizer import byte_tokenizer

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"enum": ["C", "F"]},
        "more": {"$ref": "#/$defs/more"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"more": {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False}},
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
STOP = {"type": "function", "function": {"name": "stop"}}
ARGUMENTS = {"city": 'O"slo\n', "days": 3, "unit": "C", "more": {"a": True}}
TOKENIZER = byte_tokenizer()


class NoTokens:
    """A tokenizer to which marks are text."""

    added_ids: dict[str, int] = {}  # noqa: RUF012


def asked(**fields: Any) -> Any:
    body = ChatCompletionRequest(messages=[{"role": "user", "content": "Hi"}], **{"tools": [WEATHER, STOP], **fields})
    check_tools(body)
    return body


def use_of(format: str, **fields: Any) -> Any:
    return tool_use(asked(**fields), FORMATS[format], NoTokens())  # type: ignore[arg-type]


def matches(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar)
    assert not matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


JSON = json.dumps(ARGUMENTS)
QWEN = """<tool_call>
<function=get_weather>
<parameter=city>
O"slo

</parameter>
<parameter=days>
3
</parameter>
<parameter=unit>
C
</parameter>
<parameter=more>
{"a": true}
</parameter>
</function>
</tool_call>"""
CALLS = {  # what a grammar lets through: a call of get_weather, and what joins it to a call of stop
    "hermes": (f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>', "\n",
               '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'),
    "qwen3_coder": (QWEN, "\n",
                    "<tool_call>\n<function=stop>\n</function>\n</tool_call>"),
    "glm": ('<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>O"slo\n</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3'
            "</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n<arg_key>more</arg_key>\n"
            '<arg_value>{"a": true}</arg_value>\n</tool_call>', "\n", "<tool_call>stop\n</tool_call>"),
    "mistral": (f"[TOOL_CALLS]get_weather[ARGS]{JSON}", "", "[TOOL_CALLS]stop[ARGS]{}"),
    "functiongemma": ("<start_function_call>call:get_weather{city:<escape>O\"slo\n<escape>,days:3,unit:<escape>C<escape>,"
                      'more:{"a": true}}<end_function_call>', "\n", "<start_function_call>call:stop{}<end_function_call>"),
    "llama3_json": (f'{{"name": "get_weather", "parameters": {JSON}}}', "; ", '{"name": "stop", "parameters": {}}'),
}  # fmt: skip


@pytest.mark.parametrize("format", CALLS)
def test_a_required_call_is_what_the_parser_reads(format: str) -> None:
    weather, between, stop = CALLS[format]
    use = use_of(format, tool_choice="required")
    both = f"{weather}{between}{stop}"
    for text, calls in ((weather, 1), (stop, 1), (both, 2)):
        assert matches(use.grammar, text), use.grammar
        parser = ToolParser(use.format, use.types, use.one_call)
        content, found = summed(parser.feed(text) + parser.finish())
        assert (content, len(found)) == ("", calls)
        assert json.loads(found[0][1]) == ({} if text == stop else ARGUMENTS)
    bads = (weather.replace(old, new) for old, new in (("slo", "slo" * 9), ("3", "0"), ("get_weather", "other")))
    for bad in ("", "Hello", *bads, f"{weather} so"):
        assert not matches(use.grammar, bad)
    assert not matches(use_of(format, tool_choice="required", parallel_tool_calls=False).grammar, both)


@pytest.mark.parametrize("format", CALLS)
def test_a_named_function_is_called_once(format: str) -> None:
    weather, between, stop = CALLS[format]
    use = use_of(format, tool_choice={"type": "function", "function": {"name": "stop"}})
    assert use.one_call
    assert matches(use.grammar, stop)
    assert not matches(use.grammar, weather)
    assert not matches(use.grammar, f"{stop}{between}{stop}")


@pytest.mark.parametrize("format", CALLS)
def test_strict_tools_hold_calls_to_their_schemas_and_leave_text_free(format: str) -> None:
    weather, _, _ = CALLS[format]
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    grammar = use_of(format, tools=[strict, STOP]).grammar
    assert matches(grammar, weather)
    assert matches(grammar, "Hello <tool> {}")
    assert not matches(grammar, weather.replace("3", "0"))
    assert use_of(format).grammar == ""


@pytest.mark.parametrize("format", CALLS)
def test_an_answer_has_its_form_or_is_a_call(format: str) -> None:
    weather, _, _ = CALLS[format]
    for fields, good, bad in (
        ({"response_format": {"type": "json_object"}}, '{"a": 1}', "[1]"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
        ({"structured_outputs": {"regex": "a+"}}, "aa", "b"),
    ):
        grammar = use_of(format, **fields).grammar
        assert matches(grammar, good) and matches(grammar, weather)
        assert not matches(grammar, bad) and not matches(grammar, f"{weather} so")


def test_arguments_of_python_syntax() -> None:
    use = use_of("pythonic", tool_choice="required")
    assert matches(use.grammar, '[get_weather(city="O", days=3, more={"a": true}), stop()]')
    assert not matches(use.grammar, "[get_weather(days=3)]")


def test_marks_that_are_tokens_are_asked_for_as_such() -> None:
    class Tokens:
        added_ids = {"<tool_call>": 255}  # noqa: RUF012

    use = tool_use(asked(tool_choice="required"), FORMATS["hermes"], Tokens())  # type: ignore[arg-type]
    assert "<[255]>" in use.grammar
    assert '"<tool_call>' not in use.grammar


def test_a_loose_tool_may_have_a_schema_that_is_not_supported() -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string", "format": "no-such"}}}}
    loose, strict = ({"type": "function", "function": {**function, "strict": strict}} for strict in (False, True))
    assert matches(use_of("llama3_json", tools=[loose], tool_choice="required").grammar, '{"name": "f", "parameters": {"b": 1}}')
    with pytest.raises(BadRequest, match=r"tools\.0\.function\.parameters"):
        use_of("llama3_json", tools=[strict])


def test_templates_see_the_tools_as_they_were_sent() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "d", "strict": True, "x": 1}, "y": 2}
    shown = {"type": "function", "function": {"name": "f", "description": "d", "x": 1}, "y": 2}
    assert tools_of_template(asked(tools=[tool])) == [shown]


def test_answers_can_be_continued_elsewhere() -> None:
    use = use_of("qwen3_coder")
    types = {"city": "string", "days": "integer", "unit": "string", "more": ""}
    assert AnswerOptions(tools=use.types).tools["get_weather"] == types


def test_every_format_can_be_set() -> None:
    option = ApiConfig.__dataclass_fields__["tool_call_parser"]
    assert set(option.metadata["choices"]) == {AUTO, OFF, *FORMATS}


@pytest.mark.parametrize(
    ("source", "format"),
    [
        ("{% if tools %}<tool_call>\n{{ '{' }}</tool_call>", "hermes"),
        ("{% if tools %}<tool_call>\n<function=example>", "qwen3_coder"),
        ("{% if tools %}<tool_call><arg_key>", "glm"),
        ("{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]", "mistral"),
        ("{% if tools %}[TOOL_CALLS] [", "mistral_list"),
        ("{% if tools %}<|python_tag|>", "llama3_json"),
        ("{% if tools %}<|python_start|>", "pythonic"),
        ("{% if tools %}<|tool_call>call:", "gemma"),
        ("{% if tools %}<start_function_call>call:", "functiongemma"),
        ("{% if tools %}", None),
        ("<tool_call>", None),
    ],
)
def test_a_template_tells_its_format(source: str, format: str | None) -> None:
    assert format_of_template(source) == (None if format is None else FORMATS[format])
