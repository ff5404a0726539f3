"""Values of arguments as models write them, turned into JSON."""

from __future__ import annotations

import ast
import json
from typing import Any

_WORDS = {"True": "true", "False": "false", "None": "null"}


def as_object(text: str) -> str:
    """Arguments that are a JSON value but no object: some models write the object as a string, or null for none."""
    if text == "null":
        return "{}"
    try:
        inner = json.loads(text)
        if isinstance(inner, str) and isinstance(json.loads(inner), dict):
            return inner
    except (ValueError, RecursionError):
        pass
    return text


def json_of_text(text: str, type: str) -> str:
    """A value that stands between tags. `type`: of the parameter; "": not one type. What is no JSON is a string."""
    stripped = text.strip()
    stripped = _WORDS.get(stripped, stripped)
    value = _loaded(stripped)
    if value is _NOTHING or (type not in ("", "null") and isinstance(value, str)):
        return json.dumps(text, ensure_ascii=False)
    return stripped


def json_of_literal(text: str) -> str:
    """A value of Python's syntax, or JSON's. What is neither is a string."""
    stripped = text.strip()
    try:
        return json.dumps(ast.literal_eval(stripped), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return stripped if _loaded(stripped) is not _NOTHING else json.dumps(stripped, ensure_ascii=False)


_NOTHING = object()


def _loaded(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _NOTHING


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")
