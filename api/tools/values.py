"""Values of arguments as models write them, turned into JSON."""

from __future__ import annotations

import ast
import json
import re
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


def json_of_marked(text: str, quote: str) -> str:
    """A value whose strings stand between `quote`, and whose keys stand without. What is no such value is a string."""
    if _loaded(text) is not _NOTHING:
        return text.strip()
    parts = [
        json.dumps(part, ensure_ascii=False) if place % 2 else _KEY.sub(r'\1"\2":', part)
        for place, part in enumerate(text.split(quote))
    ]
    value = _loaded("".join(parts))
    return json.dumps(text.strip() if value is _NOTHING else value, ensure_ascii=False)


_KEY = re.compile(r"([{,]\s*)([^\W\d][\w.-]*)\s*:")
_NOTHING = object()


def _loaded(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _NOTHING


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")
