"""Prompts: from the fields of a request to token ids, with the context's length checked. Pure, meant for worker threads."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from api.errors import BadRequest
from api.request.sampling_params import ModelLimits
from api.request.schemas import ChatMessage, ContentPart, TemplateFields
from api.request.tools import tools_of_template
from api.text.chat_template import ChatTemplate
from api.text.template_probe import Message, as_parts
from api.text.tokenizer import TextTokenizer

ROLES = ("system", "user", "assistant", "tool")  # that a template may leave out if it likes
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


@dataclass(frozen=True)
class Prompt:
    """`text` is None for a prompt that came as token ids, and where the answer does not need it."""

    token_ids: Sequence[int]
    text: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (array("i", self.token_ids).tobytes(), self.text)


def _received(column: bytes, text: str | None) -> Prompt:
    """A prompt out of another process: its ids stay a column, which costs nothing to make."""
    token_ids = array("i")
    token_ids.frombytes(column)
    return Prompt(token_ids, text)


@dataclass(frozen=True)
class Truncation:
    """`size`: most tokens to keep; None: all; -1: as many as leave room for one of output."""

    size: int | None = None
    side: Literal["left", "right"] = "left"


def render_chat(
    request: TemplateFields, template: ChatTemplate, defaults: dict[str, Any], guard: Callable[[Any], Any] = lambda value: value
) -> str:
    """`guard` is applied to all that the request puts into the prompt."""
    messages = [_conversation_message(message, template, place == 0) for place, message in enumerate(request.messages)]
    extra = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", request.reasoning_effort)
    return template.render(
        guard(messages),
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        documents=guard(request.documents),
        tools=guard(tools_of_template(request)),
        extra={**defaults, **guard(extra)},
    )


def tokenize_text(
    text: str, tokenizer: TextTokenizer, limits: ModelLimits, add_special_tokens: bool, truncation: Truncation | None = None
) -> Prompt:
    plain = tokenizer.unguarded(text)
    if truncation is not None and truncation.size is not None:
        text = _cut(text, limits.max_model_len * tokenizer.max_chars_per_token, truncation)
    else:
        _check_length(plain, tokenizer, limits)
    token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return checked(Prompt(token_ids, plain), limits, truncation)


def checked(prompt: Prompt, limits: ModelLimits, truncation: Truncation | None = None) -> Prompt:
    """`prompt`, truncated as asked for, when it leaves room for one token of output at least."""
    token_ids = _truncate(prompt.token_ids, limits, truncation)
    if not token_ids:
        raise BadRequest("The prompt cannot be empty.", param="prompt")
    if len(token_ids) >= limits.max_model_len:
        raise _too_long(str(len(token_ids)), limits)
    if (largest := max(token_ids)) >= limits.vocab_size:
        raise BadRequest(f"Token id {largest} is out of vocabulary", param="prompt")
    return prompt if token_ids is prompt.token_ids else Prompt(token_ids)


def num_prompts(prompt: str | list[str] | list[int] | list[list[int]] | None) -> int:
    """How many prompts `completion_prompts` makes of a text completion's field."""
    if not prompt:
        return 0
    return 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)


def completion_prompts(prompt: str | list[str] | list[int] | list[list[int]] | None) -> list[str | list[int]]:
    """The prompts of a text completion, one by one."""
    if prompt is None or prompt == []:
        raise BadRequest("prompt must be given, and must not be an empty list.", param="prompt")
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def check_truncation(size: int | None, limits: ModelLimits) -> None:
    if size is not None and size > limits.max_model_len:
        raise BadRequest(
            f"truncate_prompt_tokens={size} cannot be greater than max_model_len = {limits.max_model_len}. "
            "Please request a smaller truncation size.",
            param="truncate_prompt_tokens",
        )


def _truncate(token_ids: Sequence[int], limits: ModelLimits, truncation: Truncation | None) -> Sequence[int]:
    if truncation is None or truncation.size is None:
        return token_ids
    size = limits.max_model_len - 1 if truncation.size == -1 else truncation.size
    if len(token_ids) <= size:
        return token_ids
    return token_ids[len(token_ids) - size :] if truncation.side == "left" else token_ids[:size]


def _cut(text: str, most: int, truncation: Truncation) -> str:
    """The part of `text`, `most` characters, that a truncated prompt can come from."""
    if len(text) <= most:
        return text
    return text[len(text) - most :] if truncation.side == "left" else text[:most]


def _check_length(text: str, tokenizer: TextTokenizer, limits: ModelLimits) -> None:
    """No tokenizing of what cannot fit, however it is cut into tokens."""
    most = limits.max_model_len * tokenizer.max_chars_per_token
    if len(text) > most:
        raise BadRequest(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt contains "
            f"{len(text)} characters (more than {most} characters, which is the upper bound for "
            f"{limits.max_model_len} input tokens). Please reduce the length of the input prompt.",
            param="input_text",
        )
    if len(text) > limits.max_model_len and (fewest := tokenizer.fewest_tokens(text)) >= limits.max_model_len:
        raise _too_long(f"at least {fewest}", limits)


def _too_long(num_tokens: str, limits: ModelLimits) -> BadRequest:
    return BadRequest(
        f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt contains "
        f"{num_tokens} input tokens, which leaves no room for output tokens. Please reduce the length of the input prompt.",
        param="input_tokens",
    )


def _conversation_message(message: ChatMessage, template: ChatTemplate, is_first: bool) -> Message:
    """A message as the template takes it: as the client sent it where it can, else as text or as parts."""
    fields = message.model_dump(exclude_none=True)
    fields["role"] = role = _known_role(message.role, template, is_first)
    forms = template.forms(role, is_first)
    content = message.content
    if content is None:
        fields["content"] = None if forms.none else "" if forms.text or not forms.parts else []
    elif isinstance(content, str):
        fields["content"] = as_parts(content) if forms.parts and not forms.text else content
    else:
        texts = [_part_text(part) for part in content]
        fields["content"] = [part for text in texts for part in as_parts(text)] if forms.parts else "\n".join(texts)
    if message.tool_calls:
        fields["tool_calls"] = [_with_parsed_arguments(call) for call in message.tool_calls]
    return fields


def _known_role(role: str, template: ChatTemplate, is_first: bool) -> str:
    """The role as the template knows it: `developer` is OpenAI's newer word for `system`. Raises BadRequest for one that it would
    leave out without a word."""
    if role in ROLES:
        return role
    forms = template.forms(role, is_first)
    if forms.shown or forms.raises:
        return role
    if role == "developer" and template.forms("system", is_first).shown:
        return "system"
    raise BadRequest(f"The chat template of this model does not take messages of the role {role[:64]!r}.", param="messages")


def _part_text(part: ContentPart) -> str:
    if part.type not in TEXT_PARTS:
        message = f"Content parts of type '{part.type}' are not supported: this server takes text only."
        raise BadRequest(message, param="messages")
    extra: dict[str, Any] = part.model_extra or {}
    text = extra.get("refusal" if part.type == "refusal" else "text")
    if not isinstance(text, str):
        raise BadRequest(f"A content part of type '{part.type}' needs its text as a string.", param="messages")
    return text


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Templates render a call's arguments as an object; OpenAI's API carries them as a JSON string."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise BadRequest(f"The arguments of a tool call are not JSON: {error}", param="messages") from error
    return {**call, "function": {**function, "arguments": arguments}}


def token_strings(tokenizer: TextTokenizer, token_ids: Sequence[int]) -> list[str]:
    """The tokens as the vocabulary spells them."""
    return [tokenizer.id_to_token(token_id) or "" for token_id in token_ids]
