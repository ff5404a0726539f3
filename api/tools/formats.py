"""The forms in which models write tool calls, as descriptions that the parser and the grammars follow.

A text has groups of calls. A group is an opening, calls with separators between them, and a closing; a body says how one call is
written. Blanks may stand between all of these.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JsonBody:
    """`{"name": ..., "arguments": {...}}`."""

    arguments: tuple[str, ...] = ("arguments", "parameters")  # the first one is written by grammars


@dataclass(frozen=True)
class NamedBody:
    """The name, then the arguments as a JSON object: `name[ARGS]{...}`. The separator, and others in brackets, may be missing."""

    separator: str


@dataclass(frozen=True)
class TaggedBody:
    """The name and each argument between tags: `<function=name><parameter=key>value</parameter></function>`.

    A string stands as it is, another value as JSON.
    """

    before_name: str
    after_name: str  # "": a blank, a line's end or a tag ends the name
    before_key: str
    after_key: str
    before_value: str  # "": the value follows the key
    after_value: str
    end: str  # "": the group's closing ends the call
    lines: bool = False  # the value stands between two line ends


@dataclass(frozen=True)
class LiteralBody:
    """A call of Python's syntax: `name(key="value", other=[1, True])`."""


@dataclass(frozen=True)
class MarkedBody:
    """`call:name{key:<escape>value<escape>,other:1}`: strings between marks, keys without any, all else as JSON."""

    before_name: str
    quote: str


Body = JsonBody | NamedBody | TaggedBody | LiteralBody | MarkedBody


class Listing(enum.Enum):
    """Whether the calls of a group stand in the brackets of a list, with commas between."""

    NEVER = 0
    MAYBE = 1
    ALWAYS = 2


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls. Grammars write `body`."""

    name: str
    body: Body
    opening: str = ""  # "": a call begins the text, without a mark, so only those of known tools count
    closing: str = ""  # a group without it counts as well
    prefix: str = ""  # may stand before a call without a mark
    separator: str = ""  # between the calls of a group; "": blanks alone
    listing: Listing = Listing.NEVER
    other_bodies: tuple[Body, ...] = ()  # that models write too
    one_a_group: bool = False  # models write a group for each call
    signs: tuple[str, ...] = ()  # of the format in a chat template: one of these
    short_ids: bool = False  # ids of calls are nine letters and digits: templates refuse others

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens, which the parser needs to see."""
        tags: tuple[str, ...] = ()
        for body in (self.body, *self.other_bodies):
            if isinstance(body, TaggedBody):
                tags += (body.before_key, body.after_key, body.before_value, body.after_value, body.end)
            elif isinstance(body, NamedBody):
                tags += (body.separator, "[CALL_ID]")
            elif isinstance(body, MarkedBody):
                tags += (body.quote,)
        return tuple(mark for mark in (self.opening, self.closing, self.prefix, *tags) if mark)

    def call_id(self, request_id: str, choice: int, index: int) -> str:
        """The same on every API server that goes on with the answer."""
        digest = hashlib.sha256(f"{request_id}/{choice}/{index}".encode()).hexdigest()
        return digest[:9] if self.short_ids else f"call_{digest[:24]}"


_QWEN_XML = TaggedBody("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", lines=True)
_GLM = TaggedBody("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "")
_MINIMAX = TaggedBody('<invoke name="', '">', '<parameter name="', '">', "", "</parameter>", "</invoke>")
_TAGS = ("<tool_call>", "</tool_call>")
_MISTRAL: dict[str, Any] = {"opening": "[TOOL_CALLS]", "separator": ",", "listing": Listing.MAYBE, "short_ids": True}

HERMES = ToolFormat("hermes", JsonBody(), *_TAGS, one_a_group=True, signs=("<tool_call>",))

# In the order in which chat templates are searched for their signs: the particular ones first.
FORMATS = {
    format.name: format
    for format in (
        ToolFormat("qwen3_coder", _QWEN_XML, *_TAGS, one_a_group=True, signs=("<function=",)),
        ToolFormat("glm", _GLM, *_TAGS, one_a_group=True, signs=("<arg_key>",)),
        ToolFormat("minimax", _MINIMAX, "<minimax:tool_call>", "</minimax:tool_call>", signs=("minimax:tool_call",)),
        HERMES,
        ToolFormat(
            "gemma", MarkedBody("call:", '<|"|>'), "<|tool_call>", "<tool_call|>", one_a_group=True, signs=("<|tool_call>",)
        ),
        ToolFormat(
            "functiongemma",
            MarkedBody("call:", "<escape>"),
            "<start_function_call>",
            "<end_function_call>",
            one_a_group=True,
            signs=("<start_function_call>",),
        ),
        ToolFormat("mistral", NamedBody("[ARGS]"), **_MISTRAL, other_bodies=(JsonBody(),), one_a_group=True, signs=("[ARGS]",)),
        ToolFormat("mistral_list", JsonBody(), **_MISTRAL, other_bodies=(NamedBody(""),), signs=("[TOOL_CALLS]",)),
        ToolFormat(
            "pythonic",
            LiteralBody(),
            prefix="<|python_start|>",
            closing="<|python_end|>",
            separator=",",
            listing=Listing.ALWAYS,
            signs=("<|python_start|>", "[func_name1("),
        ),
        ToolFormat(
            "llama3_json",
            JsonBody(("parameters", "arguments")),
            prefix="<|python_tag|>",
            separator=";",
            signs=("<|python_tag|>", '{"name": function name'),
        ),
    )
}


def format_of_template(source: str) -> ToolFormat | None:
    """The format that a chat template tells its model to write."""
    if "tools" not in source:
        return None
    return next((format for format in FORMATS.values() if any(sign in source for sign in format.signs)), None)
