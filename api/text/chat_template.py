"""Chat templates: Jinja as Hugging Face's tokenizers render it, in a sandbox.

The dialect is described in https://huggingface.co/docs/transformers/chat_templating_writing: blocks trimmed, `raise_exception`,
`strftime_now`, a `tojson` that escapes no HTML, `{% generation %}` blocks (transparent here), `{% break %}` and `{% continue %}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from api.errors import BadRequest, sanitize_message
from api.text.template_probe import Message, RoleForms, probe

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
MAX_KNOWN_ROLES = 64  # roles are what requests say
_MARK = "<|headrace:continue|>"  # put behind the message to be continued, and cut away with all that the template adds after it


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's part for training; serving renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own type)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template. `variables`: what it may read besides the request's own (special tokens by name, defaults)."""

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        environment = _make_environment()
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # of Jinja, or of the Python code that it makes, such as too many blocks in each other
            reason = sanitize_message(str(error))
            raise BadRequest(f"The chat template is not valid: {reason}", param="chat_template") from error
        self._variables = dict(variables or {})
        self._forms: dict[tuple[str, bool], RoleForms] = {}

    def forms(self, role: str, is_first: bool) -> RoleForms:
        """The forms of a role's messages that the template accepts; `is_first`: at the beginning of a conversation."""
        known = self._forms.get((role, is_first))
        if known is None:
            known = probe(role, is_first, lambda messages: self.render(messages, add_generation_prompt=False))
            if len(self._forms) < MAX_KNOWN_ROLES:
                self._forms[role, is_first] = known
        return known

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: list[dict[str, Any]] | None = None,
        tools: list[dict[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. An error inside the template counts as the request's fault: BadRequest."""
        if extra and (reserved := RESERVED & extra.keys()):
            raise BadRequest(f"chat_template_kwargs must not contain {sorted(reserved)}.", param="chat_template_kwargs")
        conversation = _marked(messages) if continue_final_message else list(messages)
        variables = {
            **self._variables,
            **(extra or {}),
            "messages": conversation,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            prompt = self._template.render(variables)
        except jinja2.TemplateError as error:
            raise BadRequest(sanitize_message(str(error)) or type(error).__name__, param="messages") from error
        except Exception as error:
            reason = sanitize_message(str(error))
            raise BadRequest(f"The chat template cannot render these messages: {reason}", param="messages") from error
        return _cut_at_mark(prompt) if continue_final_message else prompt


def _marked(messages: Sequence[Message]) -> list[Message]:
    *before, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*before, {**last, "content": content + _MARK + " "}]
    if isinstance(content, list):
        for place in range(len(content) - 1, -1, -1):
            if "text" in content[place]:
                parts = [*content]
                parts[place] = {**content[place], "text": content[place]["text"] + _MARK + " "}
                return [*before, {**last, "content": parts}]
    raise BadRequest("continue_final_message is set but the final message has no text to continue.", param="messages")


def _cut_at_mark(prompt: str) -> str:
    place = prompt.rfind(_MARK)
    if place < 0:
        raise BadRequest(
            "continue_final_message is set but the final message does not appear in the chat after applying the chat template.",
            param="continue_final_message",
        )
    trims = not prompt.startswith(_MARK + " ", place)  # the template does, so the message that goes on is to end trimmed too
    return prompt[:place].rstrip() if trims else prompt[:place]
