"""From the body of a response to that of the chat completion which makes it, and what the answer repeats of the body. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from api.errors import BadRequest
from api.request.response_items import Item, messages_of
from api.request.response_schemas import MOST_REFERENCES, ResponsesRequest, TextFormat
from api.request.response_tools import function_choice, function_tools, shown_tool
from api.request.schemas import (
    ChatCompletionRequest,
    ChatMessage,
    ResponseFormat,
)

LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # of the second there is none
REFUSED = ("prompt", "conversation", "context_management", "moderation", "previous_input_messages", "enable_response_messages")
MOST_METADATA = (16, 64, 512)  # pairs, characters of a key, of a value
MOST_TOP_LOGPROBS = 20
SAME = (  # fields of both bodies
    *("model", "stream", "priority", "request_id", "cache_salt", "user", "temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "min_tokens", "logit_bias", "skip_special_tokens", "structured_outputs"),
    *("chat_template_kwargs", "thinking_token_budget", "parallel_tool_calls"),
)
_CHAT_NAMES = {  # in messages and `param` of errors, and what the client of a response calls them
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
_CHAT_NAME = re.compile(rf"\b({'|'.join(_CHAT_NAMES)})\b")


def check_response(body: ResponsesRequest) -> None:
    """What can be said without the model. Raises BadRequest."""
    for field in REFUSED:
        if getattr(body, field):
            raise BadRequest(f"{field} is not supported.", param=field)
    if body.background and body.store is False:
        raise BadRequest("background needs store: a response that is not stored cannot be retrieved.", param="background")
    if len(body.references.ids) > MOST_REFERENCES:
        raise BadRequest(f"input may refer to at most {MOST_REFERENCES} items.", param="input")
    for place, name in enumerate(body.include or ()):
        if name not in INCLUDED:
            message = f"include: {name[:64]!r} is not supported. This server includes {LOGPROBS}."
            raise BadRequest(message, param=f"include.{place}")
    if not 0 <= (body.top_logprobs or 0) <= MOST_TOP_LOGPROBS:
        raise BadRequest(f"top_logprobs must be between 0 and {MOST_TOP_LOGPROBS}, got {body.top_logprobs}.", param="top_logprobs")
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        raise BadRequest(f"max_tool_calls must be at least 1, got {body.max_tool_calls}.", param="max_tool_calls")
    _check_metadata(body.metadata or {})


def _check_metadata(metadata: dict[str, str]) -> None:
    pairs, key_len, value_len = MOST_METADATA
    if len(metadata) > pairs:
        raise BadRequest(f"metadata may have at most {pairs} pairs, got {len(metadata)}.", param="metadata")
    for key, value in metadata.items():
        if len(key) > key_len or len(value) > value_len:
            message = f"metadata: a key has at most {key_len} characters, and a value {value_len}."
            raise BadRequest(message, param=f"metadata.{key[:key_len]}")


def chat_request(body: ResponsesRequest, items: Sequence[Item]) -> ChatCompletionRequest:
    """`items`: the whole conversation, checked. Raises BadRequest."""
    messages = messages_of(items)
    if not messages:
        raise BadRequest("input must have a message, a function's call or its output.", param="input")
    if body.instructions:
        messages.insert(0, ChatMessage(role="system", content=body.instructions))
    wants_logprobs = LOGPROBS in (body.include or ())
    tools = function_tools(body.tools or ())
    made: dict[str, Any] = {
        "messages": messages,
        "tools": tools,
        "tool_choice": function_choice(body.tool_choice, bool(tools)),
        "response_format": _response_format(body.text.format) if body.text is not None and body.text.format is not None else None,
        "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
        "max_completion_tokens": body.max_output_tokens,
        "service_tier": body.service_tier,
        "logprobs": wants_logprobs,
        "top_logprobs": body.top_logprobs or 0 if wants_logprobs else 0,
    }
    return ChatCompletionRequest.model_construct(**{**_defaults(), **{name: getattr(body, name) for name in SAME}, **made})


@cache
def _defaults() -> dict[str, Any]:
    fields = ChatCompletionRequest.model_fields.items()
    return {name: field.get_default(call_default_factory=True) for name, field in fields if not field.is_required()}


def _response_format(format: TextFormat) -> ResponseFormat:
    if format.type != "json_schema":
        return ResponseFormat(type=format.type)
    for field, value in (("name", format.name), ("schema", format.schema_)):
        if value is None:
            raise BadRequest(f"text.format of type json_schema needs `{field}`.", param=f"text.format.{field}")
    return ResponseFormat(type="json_schema", json_schema={"name": format.name, "schema": format.schema_, "strict": format.strict})


def in_own_words(error: BadRequest) -> BadRequest:
    """An error about the chat completion, in the words of the body that became it."""

    def own(text: str) -> str:
        text = re.sub(r"\btools\.(\d+)\.function\b", r"tools.\1", text)
        return _CHAT_NAME.sub(lambda found: _CHAT_NAMES[found[0]], text)

    param = "input" if error.param == "messages" else own(error.param or "")
    return BadRequest(own(error.message), param or None, error.headers)


def shown_fields(body: ResponsesRequest) -> dict[str, Any]:
    """What each answer repeats of the body, in the form of OpenAI's response object."""
    reasoning, text, choice = body.reasoning, body.text, body.tool_choice
    format: dict[str, Any] = {"type": "text"}
    if text is not None and text.format is not None:
        format = text.format.model_dump(by_alias=True, exclude_unset=True)
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": reasoning.summary if reasoning else None},
        "safety_identifier": body.safety_identifier,
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": format, "verbosity": (text.verbosity if text is not None else None) or "medium"},
        "tool_choice": "auto" if choice is None else choice,
        "tools": [shown_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
