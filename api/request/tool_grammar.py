"""Grammars of tool calls: llguidance's Lark, in which the arguments are JSON schemas and all else is the format's own writing."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from api.errors import BadRequest
from api.request.structured_output import WHITESPACE, check_schema
from api.tools.formats import JsonBody, Listing, LiteralBody, MarkedBody, NamedBody, TaggedBody, ToolFormat


class Choice(enum.Enum):
    AUTO = 0  # text, in which calls may stand
    REQUIRED = 1  # calls and nothing else


@dataclass(frozen=True)
class Offered:
    """A tool. `parameters`: the schema that its arguments are held to."""

    name: str
    parameters: dict[str, Any]
    strict: bool

    @classmethod
    def of(cls, name: str, parameters: dict[str, Any], strict: bool, param: str) -> Offered:
        """A strict tool's schema must be supported. Any object will do for another tool whose schema is not."""
        try:
            check_schema(parameters, param)
        except BadRequest:
            if strict:
                raise
            parameters = {"type": "object"}
        return cls(name, parameters, strict)


def tool_grammar(format: ToolFormat, tools: Iterable[Offered], choice: Choice, one_call: bool, token_ids: Mapping[str, int]) -> str:
    """`token_ids`: of texts that are tokens of their own, whatever stands around them."""
    return _Grammar(format, token_ids).text(list(tools), choice, one_call)


def calls_or_answer(calls: str, answer: str) -> str:
    """A grammar for outputs of either of two grammars."""
    parts = [json.loads(each)["grammars"][0] if each.startswith("{") else {"lark_grammar": each} for each in (calls, answer)]
    named = [{**part, "name": name} for name, part in zip(("calls", "content"), parts, strict=True)]
    return json.dumps({"grammars": [{"lark_grammar": "start: @calls | @content"}, *named]})


class _Grammar:
    def __init__(self, format: ToolFormat, token_ids: Mapping[str, int]) -> None:
        self._format = format
        self._token_ids = token_ids
        self._rules: list[str] = []

    def text(self, tools: list[Offered], choice: Choice, one_call: bool) -> str:
        self._rule("call", " | ".join(self._call(place, tool) for place, tool in enumerate(tools)))
        self._rule("calls", self._calls(one_call))
        if choice is Choice.REQUIRED:
            self._rule("start", "calls")
        elif self._format.opening:
            self._rule("start", f"tagged{'?' if one_call else '*'} TEXT")
            self._rule("tagged", f"{self._up_to(self._format.opening)} {self._behind_opening(one_call)}")
        else:
            first = "[" if self._format.listing is Listing.ALWAYS else "{"
            self._rule("start", "calls | OTHER_TEXT")
            self._rules.append(rf"OTHER_TEXT: /(\s*[^\s\{first}](.|\n)*)?/")
        return "\n".join(["%llguidance {}", *self._rules, r"TEXT: /(.|\n)*/"])

    def _rule(self, name: str, body: str) -> None:
        self._rules.append(f"{name}: {body}")

    def _mark(self, text: str) -> str:
        """A text that may be a token of its own."""
        return f"<[{self._token_ids[text]}]>" if text in self._token_ids else _quoted(text)

    def _up_to(self, mark: str, text: str = "TEXT") -> str:
        """Any text, or one of the expression `text`, then `mark`."""
        if mark in self._token_ids:
            return f"{text} {self._mark(mark)}"
        name = f"up_to_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: {text} {_quoted(mark)}")
        return name

    def _calls(self, one_call: bool) -> str:
        """All calls of an output that has nothing else."""
        format = self._format
        if not format.opening:
            return self._behind_opening(one_call)
        group = f"{self._mark(format.opening)} {self._behind_opening(one_call)}"
        return group if one_call or not format.one_a_group else f"({group}) ({_quoted(chr(10))}? {group})*"

    def _behind_opening(self, one_call: bool) -> str:
        """The rest of a group."""
        format = self._format
        separator = _quoted(f"{format.separator} " if format.separator else "\n")
        calls = "call" if one_call or format.one_a_group else f"call ({separator} call)*"
        if format.listing is Listing.ALWAYS or (format.listing is Listing.MAYBE and isinstance(format.body, JsonBody)):
            calls = f'"[" {calls} "]"'
        if not format.closing or not format.opening:
            return calls
        is_one_line = isinstance(format.body, MarkedBody) or (isinstance(format.body, TaggedBody) and not format.body.end)
        between = "" if is_one_line else _quoted("\n")
        return f"{between} {calls} {between} {self._mark(format.closing)}"

    def _call(self, place: int, tool: Offered) -> str:
        name = f"call_{place}"
        match self._format.body:
            case JsonBody(arguments):
                # The lexemes are those of JSON: the lexer takes the longest one, and an answer may be JSON too.
                head = ["{", '"name"', ":", " ", json.dumps(tool.name), ",", " ", json.dumps(arguments[0]), ":", " "]
                self._rule(name, f'{" ".join(map(_quoted, head))} {_json(tool.parameters)} "}}"')
            case NamedBody(separator):
                between = self._mark(separator) if separator else ""
                self._rule(name, f"{_quoted(tool.name)} {between} {_json(tool.parameters)}")
            case TaggedBody() as body:
                self._rule(name, self._tagged(place, tool, body))
            case LiteralBody():
                self._rule(name, self._arguments(tool, f"{tool.name}(", "=", ", ", ")", _json))
            case MarkedBody(before_name, quote):
                value = partial(self._marked_value, quote)
                self._rule(name, self._arguments(tool, f"{before_name}{tool.name}{{", ":", ",", "}", value))
        return name

    def _tagged(self, place: int, tool: Offered, body: TaggedBody) -> str:
        parts = [_quoted(body.before_name + tool.name + body.after_name + "\n")]
        for number, (key, schema, required) in enumerate(_properties(tool.parameters)):
            name = f"value_{place}_{number}"
            line = _quoted("\n") if body.lines else ""
            before = f"{self._mark(body.before_key)} {_quoted(key)} {self._mark(body.after_key)}"
            if body.before_value:
                before += f" {_quoted(chr(10))} {self._mark(body.before_value)}"
            self._rule(name, f"{before} {line} {self._tagged_value(schema, line, body.after_value)} {_quoted(chr(10))}")
            parts.append(name if required else f"{name}?")
        if body.end:
            parts.append(self._mark(body.end))
        return " ".join(parts)

    def _tagged_value(self, schema: dict[str, Any], line: str, after: str) -> str:
        """The value and its closing tag. A string stands without quotes, so of its schema only a list of values counts."""
        values = _texts(schema)
        if values:
            return f"({' | '.join(map(_quoted, values))}) {line} {self._mark(after)}"
        if schema.get("type") == "string":
            return self._up_to(after, _text(schema, num_more=1 if line else 0))
        return f"{_json(schema)} {line} {self._mark(after)}"

    def _arguments(
        self, tool: Offered, before: str, assign: str, between: str, after: str, value: Callable[[dict[str, Any]], str]
    ) -> str:
        """Required arguments, then the others, each of which may be left out; where none is required, those at the end alone."""
        arguments = [
            (f"{_quoted(key + assign)} {value(schema)}", required) for key, schema, required in _properties(tool.parameters)
        ]
        required = [argument for argument, is_required in arguments if is_required]
        others = [argument for argument, is_required in arguments if not is_required]
        comma = _quoted(between)
        if required:
            inside = f" {comma} ".join(required) + "".join(f" ({comma} {argument})?" for argument in others)
        else:
            inside = ""
            for argument in reversed(others):
                inside = f"({argument} ({comma} {inside})?)" if inside else f"({argument})"
            inside += "?" if inside else ""
        return f"{_quoted(before)} {inside} {_quoted(after)}"

    def _marked_value(self, quote: str, schema: dict[str, Any]) -> str:
        values = _texts(schema)
        if values:
            return f"{self._mark(quote)} ({' | '.join(map(_quoted, values))}) {self._mark(quote)}"
        return f"{self._mark(quote)} {self._up_to(quote, _text(schema))}" if schema.get("type") == "string" else _json(schema)


def _text(schema: dict[str, Any], num_more: int = 0) -> str:
    """An expression of a string that stands without quotes, by the lengths of its schema. `num_more`: characters beyond them."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    return f"/(.|\\n){{{least},{'' if most is None else most + num_more}}}/"


def _texts(schema: dict[str, Any]) -> list[str]:
    """The values that a schema allows, where these are texts and counted."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else []


def _properties(parameters: dict[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    """Name, schema and whether it is required, of each parameter."""
    properties = parameters.get("properties")
    required = parameters.get("required")
    shared: dict[str, Any] = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    return [
        (name, {**shared, **schema} if isinstance(schema, dict) else {}, isinstance(required, list) and name in required)
        for name, schema in (properties.items() if isinstance(properties, dict) else ())
    ]


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': WHITESPACE, 'lenient': False}})}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
