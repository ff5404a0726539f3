"""What requests say of their output's form: the grammar that it becomes, or a 400 that names what is wrong and where."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from api.errors import BadRequest
from api.request.schemas import CompletionRequest
from api.request.structured_output import output_grammar
from tests.byte_tokenizer import byte_tokenizer

PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]}
TAG = {"structures": [{"begin": "<f=a>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f"]}


TOKENIZER = byte_tokenizer()


def grammar_of(**fields: Any) -> str:
    return output_grammar(CompletionRequest(prompt="", **fields))


def as_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def matches(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar)
    assert not matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1, {}]}', "[1]"),
        (as_schema(PERSON), '{"name": "Ann",\n  "age": 3}', '{"age": 3}'),
        ({"structured_outputs": {"json": PERSON}}, '{"name": "\u00e9"}', '{"name": 1}'),
        ({"structured_outputs": {"json": json.dumps(PERSON)}}, '{"name": ""}', "{}"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        (as_schema(True), '[{"a": 1}]', "[1"),
        ({"structured_outputs": {"regex": r"\d{3}-\d+"}}, "123-4", "12-4"),
        ({"structured_outputs": {"choice": ["yes", 'no "\u00e9"\n']}}, 'no "\u00e9"\n', "maybe"),
        ({"structured_outputs": {"grammar": 'root ::= "a" root | "b"'}}, "aab", "aa"),
        ({"structured_outputs": {"grammar": 'start: "a" b\nb: /x+/'}}, "axx", "a"),
        ({"structured_outputs": {"structural_tag": TAG}}, 'so: <f=a>{"name": "x"}</f> done', "so: <f=b>"),
        ({"response_format": {"type": "structural_tag", **TAG}}, "no tag", '<f=a>{"age": 1}</f>'),
        ({"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}}, '{"name":"x"}', '{ "name":"x"}'),
        ({"structured_outputs": {"json": PERSON, "disable_additional_properties": True}}, '{"name":"x"}', '{"name":"x","z":1}'),
        ({"structured_outputs": {"json": PERSON, "whitespace_pattern": "_+"}}, '{"name":__"x"}', '{"name": "x"}'),
    ],
)
def test_a_form_becomes_its_grammar(fields: dict[str, Any], good: str, bad: str) -> None:
    grammar = grammar_of(**fields)
    assert matches(grammar, good)
    assert not matches(grammar, bad)


def test_white_space_has_an_end() -> None:
    grammar = grammar_of(response_format={"type": "json_object"})
    assert matches(grammar, '{\n\t"a": 1,\r\n' + " " * 32 + '"b":2\n}')
    assert not matches(grammar, "{\n" + " " * 33 + "}")
    assert not matches(grammar, "{\n\n}")
    assert not matches(grammar, "{  }")


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}])
def test_no_form_is_no_grammar(fields: dict[str, Any]) -> None:
    assert grammar_of(**fields) == ""


NESTED = {"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"not": {}}}]}}}
REFERRED = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "format": "odd"}}}
DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (as_schema(NESTED), "response_format", 'at /properties/a/anyOf/1/items is not supported: Unimplemented keys: ["not"]'),
        (as_schema(REFERRED), "response_format", "at /$defs/a is not supported: Unknown format: odd"),
        (as_schema({"type": "strin"}), "response_format", "the schema is not supported: Invalid type: strin"),
        (as_schema({"x-guidance": {"lenient": True}, "not": {}}), "response_format", 'Unimplemented keys: ["not"]'),
        (as_schema({"properties": {"\ud800": {}}}), "response_format", "cannot be read"),
        (as_schema({"$ref": "#/nope"}), "response_format", "does not exist"),
        (as_schema(DEEP), "response_format", "nested more than 64 levels deep"),
        (as_schema(False), "response_format", 'Unimplemented keys: ["not"]'),
        (as_schema([1]), "response_format", "must be an object or a truth value"),
        (as_schema({"enum": ["x" * 1000] * 200}), "response_format", "more than 131,072"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema.schema"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one of json, regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "choice must not be empty"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "json_object must not be empty or false"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "empty text"),
        ({"structured_outputs": {"regex": "a\0"}}, "structured_outputs.regex", "NUL"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"regex": r"a\b"}}, "structured_outputs.regex", "lookarounds"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "is no JSON"),
        ({"structured_outputs": {"grammar": "x ::= ("}}, "structured_outputs.grammar", "cannot be read"),
        ({"structured_outputs": {"structural_tag": {"format": {}}}}, "structured_outputs.structural_tag", "has structures"),
        ({"response_format": {"type": "structural_tag", **TAG, "triggers": ["<g"]}}, "response_format", "triggers"),
        ({**as_schema(PERSON), "structured_outputs": {"regex": "a"}}, "structured_outputs", "cannot both"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        grammar_of(**fields)
    assert refusal.value.param == param
    assert message in str(refusal.value)
