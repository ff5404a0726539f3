"""What a request says about the form of its output, made into a grammar of llguidance, which engines hold the output to.

`response_format` is OpenAI's (https://platform.openai.com/docs/guides/structured-outputs), `structured_outputs` vLLM's. What the
library does not support is refused here, by name and place: nothing of a schema is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from llguidance import LLMatcher, LLParserLimits, StructTag, grammar_from

from api.errors import BadRequest
from api.request.schemas import ResponseFormat, SamplingFields, StructuredOutputs
from engine.protocol import GRAMMAR_LIMITS

MOST_CHARACTERS = 128 * 1024  # of a grammar
MOST_NESTED = 64  # levels of a schema
MOST_TRIED = 256  # parts of a refused schema that are compiled alone, to find the place
# Between the parts of JSON: a space, or one line's end and the next line's indent. Without an end, models may write nothing else.
WHITESPACE = r"\x20|\r?\n[\x20\t]{0,32}"
_FORM_FIELDS = ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")
# Keywords whose values are schemas: one, a list of them, or some by name.
_ONE = ("items", "additionalProperties", "additionalItems", "not", "contains", "propertyNames", "if", "then", "else")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def output_grammar(request: SamplingFields) -> str:
    """The grammar that the output must match; empty where the request does not say. Raises BadRequest."""
    formats, options = request.response_format, request.structured_outputs
    from_format = _of_format(formats) if formats is not None else ""
    from_options = _of_options(options) if options is not None else ""
    if from_format and from_options:
        raise BadRequest("response_format and structured_outputs cannot both say what the output is.", param="structured_outputs")
    return from_format or from_options


def _of_format(wanted: ResponseFormat) -> str:
    match wanted.type:
        case "text":
            return ""
        case "json_object":
            return _of_schema({"type": "object"}, "response_format")
        case "json_schema":
            schema = (wanted.json_schema or {}).get("schema")
            if schema is None:
                raise BadRequest("response_format of type 'json_schema' needs json_schema.schema.", param="response_format")
            return _of_schema(schema, "response_format")
        case "structural_tag":
            return _of_tags(wanted.model_dump(exclude_none=True), "response_format")


def _of_options(options: StructuredOutputs) -> str:
    given = [name for name in _FORM_FIELDS if getattr(options, name) is not None]
    if not given:
        return ""
    names = ", ".join(name.rstrip("_") for name in _FORM_FIELDS)
    if len(given) > 1:
        raise BadRequest(f"structured_outputs must have exactly one of {names}.", param="structured_outputs")
    value = getattr(options, given[0])
    if value in ("", [], False):
        raise BadRequest(f"structured_outputs.{given[0].rstrip('_')} must not be empty or false.", param="structured_outputs")
    param = f"structured_outputs.{given[0].rstrip('_')}"
    match given[0]:
        case "json_":
            return _of_schema(_loaded(value, param), param, options)
        case "json_object":
            return _of_schema({"type": "object"}, param, options)
        case "regex":
            if "\0" in value:
                raise BadRequest(f"{param} must not have the character NUL.", param=param)
            return checked_grammar(_made(lambda: LLMatcher.grammar_from_regex(value), param), param)
        case "choice":
            if not all(value):
                raise BadRequest(f"{param} must not have an empty text.", param=param)
            return checked_grammar("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value), param)
        case "grammar":
            return checked_grammar(_made(lambda: grammar_from("grammar", value), param), param)
        case _:
            return _of_tags(_loaded(value, param), param)


def _loaded(value: Any, param: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{param} is no JSON: {error}", param=param) from None


def _of_schema(schema: Any, param: str, options: StructuredOutputs | None = None) -> str:
    if not isinstance(schema, dict | bool):
        raise BadRequest(f"{param}: a schema must be an object or a truth value, got {type(schema).__name__}.", param=param)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    _check_depth(schema, param)
    options = options or StructuredOutputs.model_validate({})
    if options.disable_additional_properties:
        schema = _without_additional_properties(schema)
    grammar = _made(lambda: _schema_grammar(schema, options), param)
    if why := _fault(grammar):
        raise BadRequest(f"{param}: the schema{_place_of_fault(schema, options)} is not supported: {why}", param=param)
    return _of_bounded_size(grammar, param)


def _schema_grammar(schema: Any, options: StructuredOutputs) -> str:
    if options.disable_any_whitespace:
        rules: dict[str, Any] = {"whitespace_flexible": False}
    else:
        rules = {"whitespace_pattern": options.whitespace_pattern or WHITESPACE}
    rules["lenient"] = False  # which a schema could ask for: then keywords would be ignored
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=rules)  # type: ignore[arg-type]


def _of_tags(value: Any, param: str) -> str:
    """Free text, in which a trigger begins a part that matches a schema. The form is vLLM's of structures and triggers."""
    try:
        structures, triggers = value["structures"], value["triggers"]
        tags = [
            StructTag(
                trigger=next(trigger for trigger in triggers if trigger and structure["begin"].startswith(trigger)),
                begin=structure["begin"],
                grammar=dict(structure["schema"]),
                end=structure["end"],
            )
            for structure in structures
        ]
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration):
        message = f"{param}: a structural tag has structures, each with begin, schema and end, and triggers that they begin with."
        raise BadRequest(message, param=param) from None
    for structure in structures:
        _of_schema(structure["schema"], param)
    return checked_grammar(_made(lambda: StructTag.to_grammar(tags, assume_special=False), param), param)


def _made(make: Callable[[], str], param: str) -> str:
    try:
        return make()
    except (ValueError, AssertionError) as error:
        raise BadRequest(f"{param} cannot be read: {error}", param=param) from None


def check_schema(schema: Any, param: str) -> None:
    """Raises BadRequest for a schema that the library does not support."""
    _of_schema(schema, param)


def checked_grammar(grammar: str, param: str) -> str:
    """`grammar`, which the library can hold an output to. Raises BadRequest."""
    _of_bounded_size(grammar, param)
    if why := _fault(grammar):
        raise BadRequest(f"{param} is not supported: {why}", param=param)
    return grammar


def _of_bounded_size(grammar: str, param: str) -> str:
    if len(grammar) > MOST_CHARACTERS:
        raise BadRequest(f"{param} has {len(grammar):,} characters, more than {MOST_CHARACTERS:,}.", param=param)
    return grammar


def _fault(grammar: str) -> str:
    """Why the library cannot hold an output to the grammar; "": it can."""
    if len(grammar) > MOST_CHARACTERS:
        return ""
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=LLParserLimits(**GRAMMAR_LIMITS))
    return " ".join(messages[0].split()) if failed else ""


def _place_of_fault(schema: dict[str, Any], options: StructuredOutputs) -> str:
    """Where the deepest part of a schema is that alone is refused, as the end of "the schema"; empty: only the whole is."""
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    place, part = "", schema
    tried = 0
    while True:
        for step, inner in _parts(part):
            tried += 1
            if tried > MOST_TRIED:
                return place and f" at {place}"
            if _fault(_schema_grammar({**shared, **inner}, options)):
                place, part = f"{place}/{step}", inner
                break
        else:
            return place and f" at {place}"


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas right inside a schema, each with its place."""
    for key, value in schema.items():
        if key in _ONE and isinstance(value, dict):
            yield key, value
        elif key in _LISTED and isinstance(value, list):
            yield from ((f"{key}/{number}", each) for number, each in enumerate(value) if isinstance(each, dict))
        elif key in _NAMED and isinstance(value, dict):
            yield from ((f"{key}/{name}", each) for name, each in value.items() if isinstance(each, dict))


def _without_additional_properties(schema: Any) -> Any:
    """The schema, in which an object has no properties but those that it names."""
    if isinstance(schema, list):
        return [_without_additional_properties(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {
        key: {name: _without_additional_properties(each) for name, each in value.items()}
        if key in _NAMED and isinstance(value, dict)
        else _without_additional_properties(value)
        if key in (*_ONE, *_LISTED)
        else value
        for key, value in schema.items()
    }
    if changed.get("type") == "object" or "properties" in changed:
        changed.setdefault("additionalProperties", False)
    return changed


def _check_depth(value: Any, param: str) -> None:
    level = [value]
    for _ in range(MOST_NESTED + 1):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise BadRequest(f"{param}: the schema is nested more than {MOST_NESTED} levels deep.", param=param)
