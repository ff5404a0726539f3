"""Finds by a probe how a chat template treats the messages of a role, because its syntax does not tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str]

PROBE = "headrace-probe"
_STRUCTURE = ("'type'", '"type"')  # in a prompt: a list of parts was written as a whole
_CALL = {"id": "call", "type": "function", "function": {"name": "f", "arguments": {}}}


@dataclass(frozen=True)
class RoleForms:
    """The forms of content whose text the template shows. `raises`: it refused the role in its own words."""

    text: bool
    parts: bool
    none: bool
    raises: bool

    @property
    def shown(self) -> bool:
        return self.text or self.parts


def as_parts(text: str) -> list[Message]:
    return [{"type": "text", "text": text}]


def probe(role: str, is_first: bool, render: Render) -> RoleForms:
    """`is_first`: the message opens the conversation. Where the template takes parts as well as text, both must look the same."""
    raises, text, parts = True, False, False
    none = False
    for before, after in _surroundings(is_first):

        def rendered(content: Any, before: Sequence[Message] = before, after: Sequence[Message] = after) -> str | None:
            try:
                return render([*before, {"role": role, "content": content, "tool_call_id": "call"}, *after])
            except Exception:  # of whatever kind: the template does not take it
                return None

        with_text, with_parts = rendered(PROBE), rendered(as_parts(PROBE))
        raises = raises and with_text is None and with_parts is None
        takes_text = with_text is not None and PROBE in with_text
        takes_parts = with_parts is not None and PROBE in with_parts and not any(sign in with_parts for sign in _STRUCTURE)
        if takes_text and takes_parts:
            takes_parts = with_text == with_parts
        if takes_text or takes_parts:
            text, parts = takes_text, takes_parts
            with_none = rendered(None)
            none = with_none is not None and "None" not in with_none
            break
    return RoleForms(text, parts, none, raises)


def _surroundings(is_first: bool) -> Iterator[tuple[list[Message], list[Message]]]:
    """The messages before and after a probe, in conversations that most templates take."""
    for content in ("x", as_parts("x")):
        system, user, assistant = ({"role": role, "content": content} for role in ("system", "user", "assistant"))
        if is_first:
            yield [], []
            yield [], [user]
        else:
            yield [user], []
            yield [user, {**assistant, "tool_calls": [_CALL]}], []
            yield [user, assistant], []
            yield [system, user], []
