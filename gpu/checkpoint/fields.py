"""Values out of a model's files, checked for type and range where they are read. Torch-free.

`Fields` reads each number, text and list of a JSON file, or of a GGUF file's metadata, by a `Rule`. So the error about a wrong one
names file, field and value.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from gpu.errors import CheckpointError

ValueT = TypeVar("ValueT")
_MOST_SHOWN = 60  # characters of a wrong value in a message

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rule(Generic[ValueT]):
    """Which values are right, and how messages describe them: "an integer from 1 to 8"."""

    description: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], ValueT] = lambda value: value  # of what is accepted


def integer(least: int, most: int) -> Rule[int]:
    """An integer from `least` to `most`. Neither true nor 2.0 is one."""
    return Rule(f"an integer from {least:,} to {most:,}", lambda value: type(value) is int and least <= value <= most)


def number(least: float, most: float, above: bool = False) -> Rule[float]:
    """Finite, from `least` to `most`; `above`: without `least` itself."""

    def accepts(value: Any) -> bool:
        return type(value) in (int, float) and least <= value <= most and not (above and value == least)

    return Rule(f"a number above {least:g} and up to {most:g}" if above else f"a number from {least:g} to {most:g}", accepts, float)


def list_of(rule: Rule[ValueT]) -> Rule[list[ValueT]]:
    return Rule(f"a list, each item {rule.description}", lambda value: type(value) is list and all(map(rule.accepts, value)))


FLAG: Rule[bool] = Rule("true or false", lambda value: type(value) is bool)
TEXT: Rule[str] = Rule("text", lambda value: type(value) is str)
OBJECT: Rule[Mapping[str, Any]] = Rule("an object", lambda value: type(value) is dict)
NUMBER: Rule[float] = Rule("a number", lambda value: type(value) in (int, float) and math.isfinite(value), float)


@dataclass(frozen=True)
class Fields:
    """The fields of one file, or of an object inside it. A field that is absent or null has no value.

    A value against its rule raises CheckpointError; where `lenient`, it is told by a warning and counts as absent.
    """

    source: str  # how messages call the file
    values: Mapping[str, Any]
    path: str = ""  # of an object inside: its name and a dot
    lenient: bool = False

    def get(self, name: str, rule: Rule[ValueT]) -> ValueT | None:
        value = self.values.get(name)
        if value is None:
            return None
        if rule.accepts(value):
            return rule.convert(value)
        self.wrong(name, rule.description)
        return None

    def need(self, name: str, rule: Rule[ValueT]) -> ValueT:
        """Raises CheckpointError where the field is absent, lenient or not."""
        value = replace(self, lenient=False).get(name, rule)
        if value is None:
            raise CheckpointError(f"{self.source} has no {self.path}{name}; it must be {rule.description}")
        return value

    def inside(self, name: str) -> Fields:
        """The object `name`, empty where it is absent."""
        return replace(self, values=self.get(name, OBJECT) or {}, path=f"{self.path}{name}.")

    def wrong(self, name: str, rule: str) -> None:
        """Tells that the field has a value that is not `rule`: raises CheckpointError, or warns where lenient."""
        message = f"{self.source}: {self.path}{name} is {shown(self.values.get(name))}, but must be {rule}"
        if not self.lenient:
            raise CheckpointError(message)
        logger.warning("%s; the wrong value is ignored", message)


def shown(value: Any) -> str:
    """A value as messages quote it, in JSON; of a long one the beginning."""
    some = value[:_MOST_SHOWN] if isinstance(value, str | list) else value
    text = json.dumps(some, default=repr)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
