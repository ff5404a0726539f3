"""A conversation of Anthropic's Messages API as the chat completion that asks for the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from api.errors import BadRequest, InvalidRequest
from api.request.messages_schemas import Content, Conversation, MessagesRequest, Tool, ToolChoice, Turn
from api.request.schemas import ChatCompletionRequest, ContentPart

LEAST_THINKING = 1024  # tokens, of a thinking budget
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def as_chat(body: Conversation) -> ChatCompletionRequest:
    """Raises BadRequest, InvalidRequest."""
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": list(_messages(body)),
        "stream": body.stream,
        "priority": body.priority,
        "cache_salt": body.cache_salt,
        "user": body.user,
        **_template_fields(body),
        **_tools(body.tools, body.tool_choice),
    }
    if fields["messages"] and _is_begun(body.messages[-1]):
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    if isinstance(body, MessagesRequest):
        fields["thinking_token_budget"] = _thinking_budget(body)
        sampling = {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
        fields |= sampling | {name: getattr(body, name) for name in ("temperature", "top_k", "top_p")}
        if body.metadata is not None:
            fields["user"] = body.metadata.user_id
    try:
        return ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequest.of_body(error) from None


def _template_fields(body: Conversation) -> dict[str, Any]:
    """Thinking, effort and the form of the output."""
    fields: dict[str, Any] = {}
    kwargs = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        thinks = body.thinking.type != "disabled"
        kwargs.setdefault("enable_thinking", thinks)
        fields["include_reasoning"] = thinks
    if kwargs:
        fields["chat_template_kwargs"] = kwargs
    if (config := body.output_config) is not None:
        fields["reasoning_effort"] = config.effort
        if config.format is not None:
            schema = {"name": "output", "schema": config.format.schema_, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _thinking_budget(body: MessagesRequest) -> int | None:
    thinking = body.thinking
    if thinking is None or thinking.type != "enabled":
        return None
    budget = thinking.budget_tokens
    if budget is None or not LEAST_THINKING <= budget < body.max_tokens:
        message = f"thinking.budget_tokens must be at least {LEAST_THINKING} and less than max_tokens."
        raise BadRequest(message, param="thinking.budget_tokens")
    return budget


def _tools(tools: list[Tool] | None, choice: ToolChoice | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if tools:
        fields["tools"] = [_tool(tool, place) for place, tool in enumerate(tools)]
    if choice is not None:
        if choice.type == "tool" and not choice.name:
            raise BadRequest("tool_choice of type 'tool' needs the name of a tool.", param="tool_choice.name")
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = named if choice.type == "tool" else _CHOICES[choice.type]
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _tool(tool: Tool, place: int) -> dict[str, Any]:
    param = f"tools.{place}"
    if tool.type not in (None, "custom"):
        raise BadRequest(f"{param}: tools of type {tool.type[:80]!r} are not supported: this server runs no tools.", param=param)
    if tool.input_schema is None:
        raise BadRequest(f"{param}.input_schema is required.", param=param)
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _is_begun(last: Turn) -> bool:
    """The answer goes on with the last message."""
    return last.role == "assistant" and not (isinstance(last.content, list) and any(b.type == "tool_use" for b in last.content))


def _messages(body: Conversation) -> Iterator[dict[str, Any]]:
    if body.system:
        yield {"role": "system", "content": _texts(body.system, "system")}
    for place, turn in enumerate(body.messages):
        param = f"messages.{place}"
        if turn.role == "assistant":
            yield _assistant(turn.content, param)
        elif turn.role == "user":
            yield from _user(turn.content, param)
        else:
            yield {"role": "system", "content": _texts(turn.content, param)}


def _user(content: Content, param: str) -> Iterator[dict[str, Any]]:
    """The results of tools, each a message, then what else the user says."""
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    results = [block for block in content if block.type == "tool_result"]
    for block in results:
        fields = block.model_extra or {}
        call_id = fields.get("tool_use_id")
        if not isinstance(call_id, str):
            raise BadRequest(f"{param}: a tool_result needs tool_use_id.", param=param)
        result = fields.get("content") or ""
        yield {"role": "tool", "tool_call_id": call_id, "content": _texts(_blocks(result, param), param)}
    others = [block for block in content if block.type != "tool_result"]
    if others or not results:
        yield {"role": "user", "content": _texts(others, param)}


def _assistant(content: Content, param: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    message: dict[str, Any] = {"role": "assistant"}
    said: list[ContentPart] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        fields = block.model_extra or {}
        if block.type == "thinking" and isinstance(fields.get("thinking"), str):
            thoughts.append(fields["thinking"])
        elif block.type == "tool_use":
            calls.append(_call(fields, param))
        elif block.type != "redacted_thinking":
            said.append(block)
    message["content"] = _texts(said, param) if said else None
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(fields: dict[str, Any], param: str) -> dict[str, Any]:
    name, call_id, arguments = fields.get("name"), fields.get("id"), fields.get("input")
    if not isinstance(name, str) or not isinstance(call_id, str) or not isinstance(arguments, dict):
        raise BadRequest(f"{param}: a tool_use needs id, name and input.", param=param)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _blocks(value: Any, param: str) -> Content:
    """The content of a tool's result, which no schema has checked."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(each, dict) and isinstance(each.get("type"), str) for each in value):
        raise BadRequest(f"{param}: content must be a string or a list of blocks.", param=param)
    return [ContentPart.model_validate(each) for each in value]


def _texts(content: Content, param: str) -> str | list[dict[str, Any]]:
    """Content of text alone, as a chat's message has it. Raises BadRequest for any other."""
    if isinstance(content, str):
        return content
    for block in content:
        text = (block.model_extra or {}).get("text")
        if block.type != "text" or not isinstance(text, str):
            said = "needs its text" if block.type == "text" else "is not supported here: this server takes text only"
            raise BadRequest(f"{param}: a content block of type {block.type[:80]!r} {said}.", param=param)
    return [{"type": "text", "text": (block.model_extra or {})["text"]} for block in content]
