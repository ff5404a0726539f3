"""JSON schemas of all kinds that structured output supports, made from a seed."""

from __future__ import annotations

import string
from random import Random
from typing import Any

FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "hostname")
PATTERNS = ("^[A-Z]{2}[0-9]{3}$", "^(red|green|blue)$", "^\\d+(\\.\\d{1,2})?$", "^#[0-9a-f]{6}$", "a+b?c")


def random_schema(random: Random) -> dict[str, Any]:
    """An object with some properties, two of which may refer to a definition."""
    definition = _schema(random, 1)
    schema = _object(random, 3)
    for name in random.sample(sorted(schema["properties"]), k=min(2, len(schema["properties"]), random.randint(0, 2))):
        schema["properties"][name] = {"$ref": "#/$defs/shared"}
    return {**schema, "$defs": {"shared": definition}}


def _schema(random: Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _string, _number, _integer, _boolean, _null, _enum, _const]
    if depth > 0:
        kinds += [_array, _array, _object, _object, _any_of]
    return random.choice(kinds)(random, depth - 1)


def _object(random: Random, depth: int) -> dict[str, Any]:
    names = ["".join(random.choices(string.ascii_lowercase + "_", k=random.randint(1, 8))) for _ in range(random.randint(1, 4))]
    properties = {name: _schema(random, depth) for name in names}
    schema = {"type": "object", "properties": properties, "required": [name for name in properties if random.random() < 0.7]}
    return schema | ({"additionalProperties": False} if random.random() < 0.8 else {})


def _array(random: Random, depth: int) -> dict[str, Any]:
    least = random.randint(0, 2)
    return {"type": "array", "items": _schema(random, depth), "minItems": least, "maxItems": least + random.randint(0, 2)}


def _any_of(random: Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(random, depth) for _ in range(random.randint(2, 3))]}


def _string(random: Random, depth: int) -> dict[str, Any]:
    limits: list[dict[str, Any]] = [
        {"maxLength": random.randint(1, 12)},
        {"minLength": 3, "maxLength": 3 + random.randint(0, 6)},
        {"pattern": random.choice(PATTERNS), "maxLength": 20},
        {"format": random.choice(FORMATS)},
    ]
    return {"type": "string", **random.choice(limits)}


def _integer(random: Random, depth: int) -> dict[str, Any]:
    least = random.randint(-1000, 1000)
    limits: list[dict[str, Any]] = [
        {"minimum": least, "maximum": least + random.randint(0, 500)},
        {"exclusiveMinimum": least, "exclusiveMaximum": least + 7},
        {"minimum": 0, "maximum": 300, "multipleOf": random.choice([2, 5, 10])},
    ]
    return {"type": "integer", **random.choice(limits)}


def _number(random: Random, depth: int) -> dict[str, Any]:
    least = round(random.uniform(-50, 50), 2)
    return {"type": "number", "minimum": least, "maximum": least + 12.5}


def _boolean(random: Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(random: Random, depth: int) -> dict[str, Any]:
    return {"type": "null"}


def _enum(random: Random, depth: int) -> dict[str, Any]:
    return {"enum": random.sample(["a", "b b", '\u00e9"', 1, 2.5, None, True, [1, {"x": []}], {"k": "v"}], k=random.randint(1, 4))}


def _const(random: Random, depth: int) -> dict[str, Any]:
    return {"const": random.choice(["fixed", 7, None, ["x"], {"y": 1}])}
