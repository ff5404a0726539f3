"""Readers of one call, by the way in which it is written. Each is a generator that is sent the text's characters.

They begin behind the call's first character and end with its last. They raise Mismatch where the text is no call, or not any more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from typing import Protocol, TypeVar

from api.tools.formats import Body, JsonBody, LiteralBody, MarkedBody, NamedBody, TaggedBody
from api.tools.values import as_object, json_of_literal, json_of_marked, json_of_text

T = TypeVar("T")
Reading = Generator[None, str, T]

END = ""  # in place of a character: the text has ended
_BRACKETS = {"{": "}", "[": "]", "(": ")"}


class Mismatch(Exception):
    """The text is not what a reader wants."""


class Call(Protocol):
    """Where the parts of a call go."""

    def begin(self, name: str) -> None: ...

    def write(self, text: str) -> None:
        """The next piece of the arguments, JSON."""
        ...

    def unread(self, text: str) -> None:
        """The last characters, which these are, are to be read again."""
        ...

    def types(self, name: str) -> Mapping[str, str]: ...


def read_call(body: Body, call: Call, first: str, closing: str) -> Reading[None]:
    """`closing`: of the group."""
    match body:
        case JsonBody():
            return _json_call(body, call)
        case NamedBody():
            return _named_call(call, first)
        case TaggedBody():
            return _tagged_call(body, call, first, closing)
        case LiteralBody():
            return _literal_call(call, first)
        case MarkedBody():
            return _marked_call(body, call)


def visible() -> Reading[str]:
    """The next character that is no blank."""
    while (character := (yield)).isspace():
        pass
    return character


def _character() -> Reading[str]:
    """The next character, which must be there."""
    if (character := (yield)) == END:
        raise Mismatch
    return character


def literal(text: str) -> Reading[None]:
    for expected in text:
        if (yield) != expected:
            raise Mismatch


def either(first: str, one: str, other: str) -> Reading[str]:
    """The one of two texts that follows; `first` is its first character."""
    text = first
    while text not in (one, other):
        if not text or not (one.startswith(text) or other.startswith(text)):
            raise Mismatch
        if (character := (yield)) == END:
            raise Mismatch
        text += character
    return text


def _until(stop: str, tell: Callable[[str], None]) -> Reading[None]:
    """Up to behind `stop`; `tell` gets the characters before it, one by one."""
    tail = ""
    while tail != stop:
        character = yield
        if character == END:
            raise Mismatch
        tail += character
        while not stop.startswith(tail):
            tell(tail[0])
            tail = tail[1:]


def _text_until(stop: str) -> Reading[str]:
    parts: list[str] = []
    yield from _until(stop, parts.append)
    return "".join(parts)


def _name(first: str) -> Reading[tuple[str, str]]:
    """A name, and the character behind it."""
    parts = [first]
    while (character := (yield)) != END and (character.isalnum() or character in "_.-"):
        parts.append(character)
    return "".join(parts), character


def _json_string() -> Reading[str]:
    """The value of a string whose quote was read."""
    parts = ['"']
    while True:
        character = yield
        if character == END:
            raise Mismatch
        parts.append(character)
        if character == "\\":
            parts.append((yield from _character()))
        elif character == '"':
            break
    try:
        return str(json.loads("".join(parts), strict=False))
    except ValueError:
        raise Mismatch from None


def _json_value(call: Call, first: str, tell: Callable[[str], None]) -> Reading[None]:
    """The characters of a JSON value. That its brackets and strings are closed is all that is looked at."""
    tell(first)
    if first not in ('"', "{", "["):
        yield from _json_word(call, first, tell)
        return
    closing: list[str] = [] if first == '"' else [_BRACKETS[first]]
    in_string = first == '"'
    while True:
        character = yield
        if character == END:
            raise Mismatch
        if in_string:
            tell(character)
            if character == "\\":
                tell((yield from _character()))
            elif character == '"':
                in_string = False
        else:
            if character in ("}", "]"):
                if character != closing.pop():
                    raise Mismatch
            elif character in ("{", "["):
                closing.append(_BRACKETS[character])
            in_string = character == '"'
            tell(character)
        if not closing and not in_string:
            return


def _json_word(call: Call, first: str, tell: Callable[[str], None]) -> Reading[None]:
    """The rest of a number or a word."""
    if not first or not (first.isalnum() or first == "-"):
        raise Mismatch
    while (character := (yield)) != END and (character.isalnum() or character in "+-."):
        tell(character)
    call.unread(character)


def _json_call(body: JsonBody, call: Call) -> Reading[None]:
    begun = written = False
    early: list[str] = []  # arguments before the name
    character = yield from visible()
    while True:
        if character != '"':
            raise Mismatch
        key = yield from _json_string()
        if (yield from visible()) != ":":
            raise Mismatch
        first = yield from visible()
        if key == "name" and not begun:
            if first != '"':
                raise Mismatch
            call.begin((yield from _json_string()))
            begun = True
            call.write("".join(early))
        elif key in body.arguments and not written:
            written = True
            if first == "{":
                yield from _json_value(call, first, call.write if begun else early.append)
            else:
                parts: list[str] = []
                yield from _json_value(call, first, parts.append)
                (call.write if begun else early.append)(as_object("".join(parts)))
        else:
            yield from _json_value(call, first, _ignore)
        character = yield from visible()
        if character == "}":
            break
        if character != ",":
            raise Mismatch
        character = yield from visible()
    if not begun:
        raise Mismatch
    if not written:
        call.write("{}")


def _ignore(text: str) -> None:
    """What a call has beside its name and arguments."""


def _named_call(call: Call, first: str) -> Reading[None]:
    name, character = yield from _name(first)
    if character.isspace():
        character = yield from visible()
    if character == "[":  # [CALL_ID]x[ARGS]
        yield from _until("{", _ignore)
    elif character != "{":
        raise Mismatch
    call.begin(name)
    yield from _json_value(call, "{", call.write)


def _tagged_call(body: TaggedBody, call: Call, first: str, closing: str) -> Reading[None]:
    if body.before_name:
        yield from literal(body.before_name[1:])
        name = yield from _text_until(body.after_name)
    else:
        name, character = yield from _name(first)
        if not character.isspace() and character != closing[0]:
            raise Mismatch
        call.unread(character)
    call.begin(name.strip())
    types = call.types(name.strip())
    end = body.end or closing
    num_values = 0
    while True:
        first = yield from visible()
        mark = yield from either(first, body.before_key, end)
        if mark == end:
            break
        key = (yield from _text_until(body.after_key)).strip()
        if body.before_value:
            first = yield from visible()
            if first != body.before_value[0]:
                raise Mismatch
            yield from literal(body.before_value[1:])
        call.write(f"{', ' if num_values else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        num_values += 1
        yield from _tagged_value(body, call, types.get(key, ""))
    call.write("}" if num_values else "{}")


def _tagged_value(body: TaggedBody, call: Call, type: str) -> Reading[None]:
    if type != "string":
        text = yield from _text_until(body.after_value)
        call.write(json_of_text(_without_line_ends(text) if body.lines else text, type))
        return
    call.write('"')
    waiting = ""  # a line's end, which belongs to the value if more of it follows
    is_first = True

    def tell(character: str) -> None:
        nonlocal waiting, is_first
        if body.lines and character == "\n":
            shown, waiting = ("" if is_first else waiting), ("" if is_first else "\n")
        else:
            shown, waiting = waiting + character, ""
        is_first = False
        call.write(json.dumps(shown, ensure_ascii=False)[1:-1])

    yield from _until(body.after_value, tell)
    call.write('"')


def _without_line_ends(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


def _literal_call(call: Call, first: str) -> Reading[None]:
    name, character = yield from _name(first)
    if character != "(":
        raise Mismatch
    call.begin(name)
    num_values = 0
    character = yield from visible()
    while character != ")":
        if not character.isidentifier():
            raise Mismatch
        key, character = yield from _name(character)
        if character.isspace():
            character = yield from visible()
        if character != "=":
            raise Mismatch
        value, character = yield from _literal_value()
        call.write(f"{', ' if num_values else '{'}{json.dumps(key)}: {json_of_literal(value)}")
        num_values += 1
        if character == ",":
            character = yield from visible()
    call.write("}" if num_values else "{}")


def _literal_value() -> Reading[tuple[str, str]]:
    """The text of a value of Python's syntax, and the comma or bracket that ends it."""
    return _value_between(("'", '"'), ")")


def _marked_call(body: MarkedBody, call: Call) -> Reading[None]:
    yield from literal(body.before_name[1:])
    name, character = yield from _name((yield from _character()))
    if character != "{":
        raise Mismatch
    call.begin(name)
    num_values = 0
    character = yield from visible()
    while character != "}":
        if character == END:
            raise Mismatch
        key = character + (yield from _text_until(":"))
        value, character = yield from _value_between((body.quote, '"'), "}")
        name = json.dumps(key.strip(), ensure_ascii=False)
        call.write(f"{', ' if num_values else '{'}{name}: {json_of_marked(value, body.quote)}")
        num_values += 1
        if character == ",":
            character = yield from visible()
    call.write("}" if num_values else "{}")


def _value_between(quotes: tuple[str, ...], end: str) -> Reading[tuple[str, str]]:
    """The text of a value, and the comma or `end` behind it. Strings in it, between any of `quotes`, may have both."""
    parts: list[str] = []
    closing: list[str] = []
    quote = ""
    recent = ""  # characters since the last quote
    while True:
        character = yield
        if character == END:
            raise Mismatch
        if not quote and not closing and character in (",", end):
            return "".join(parts), character
        parts.append(character)
        recent += character
        if quote:
            if character == "\\" and len(quote) == 1:
                parts.append((yield from _character()))
                recent = ""
            elif recent.endswith(quote):
                quote = recent = ""
        elif (found := next((each for each in quotes if recent.endswith(each)), "")) != "":
            quote, recent = found, ""
        elif character in _BRACKETS:
            closing.append(_BRACKETS[character])
        elif closing and character == closing[-1]:
            closing.pop()
