"""The items of a response's input: checked, told apart, and made into the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from api.errors import BadRequest
from api.request.response_schemas import is_reference
from api.request.response_tools import joined_name
from api.request.schemas import ChatMessage

Item = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}  # by type of item


def item_id(type: str, request_id: str, place: str) -> str:
    """The id of an item that this server made. `request_id`: the internal id of its response's request, which has no underscore."""
    return f"{ID_PREFIXES[type]}_{request_id}_{place}"


def response_of_item(id: str) -> str | None:
    """The internal id that such an id names. None: it is not of that form."""
    parts = id.split("_")
    return parts[1] if len(parts) == 3 and parts[0] in ID_PREFIXES.values() else None


def input_items(given: str | Sequence[Item], referred: Mapping[str, Item]) -> list[Item]:
    """The items of a body's `input`, in the form in which they are kept. `referred`: stored items by id. Raises BadRequest."""
    if isinstance(given, str):
        return [_message("user", [{"type": "input_text", "text": given}])]
    if not given:
        raise BadRequest("input must be a text or a list of at least one item.", param="input")
    return [_checked(item, f"input.{place}", referred) for place, item in enumerate(given)]


def _message(role: str, content: list[Item]) -> Item:
    return {"type": "message", "role": role, "content": content, "status": "completed"}


def _checked(item: Item, param: str, referred: Mapping[str, Item]) -> Item:
    if is_reference(item):
        id = item.get("id")
        if not isinstance(id, str) or id not in referred:
            raise BadRequest(f"{param}: no stored item has the id {str(id)[:200]!r}.", param=f"{param}.id")
        return referred[id]
    kind = item.get("type", "message")
    match kind:
        case "message":
            checked = _checked_message(item, param)
        case "function_call":
            texts = {name: _text(item, name, param) for name in ("call_id", "name", "arguments")}
            checked = {"type": kind, **texts, "status": "completed"}
            if item.get("namespace") is not None:
                checked["namespace"] = _text(item, "namespace", param)
        case "function_call_output":
            output = item.get("output")
            if not isinstance(output, str):
                output = _parts(output, "user", f"{param}.output")
            checked = {"type": kind, "call_id": _text(item, "call_id", param), "output": output, "status": "completed"}
        case "reasoning":
            checked = _checked_reasoning(item, param)
        case _:
            supported = "message, function_call, function_call_output, reasoning and item_reference"
            message = f"{param}: items of type {str(kind)[:64]!r} are not supported: this server takes {supported}."
            raise BadRequest(message, param=f"{param}.type")
    if item.get("id") is not None:
        checked["id"] = _text(item, "id", param)
    return checked


def _checked_message(item: Item, param: str) -> Item:
    role = item.get("role")
    if role not in ROLES:
        message = f"{param}.role must be one of {', '.join(ROLES)}, got {str(role)[:64]!r}."
        raise BadRequest(message, param=f"{param}.role")
    content = item.get("content")
    if isinstance(content, str):
        part: Item = {"type": "input_text", "text": content}
        if role == "assistant":
            part = {"type": "output_text", "text": content, "annotations": []}
        return _message(role, [part])
    return _message(role, _parts(content, role, f"{param}.content"))


def _parts(content: Any, role: str, param: str) -> list[Item]:
    """Parts of text, in OpenAI's form."""
    if not isinstance(content, list):
        raise BadRequest(f"{param} must be a text or a list of parts.", param=param)
    return [_part(part, role, f"{param}.{place}") for place, part in enumerate(content)]


def _part(part: Any, role: str, param: str) -> Item:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in TEXT_PARTS:
        message = f"{param}: content parts of type {str(kind)[:64]!r} are not supported: this server takes text only."
        raise BadRequest(message, param=f"{param}.type")
    if kind == "refusal":
        return {"type": kind, "refusal": _text(part, "refusal", param)}
    text = _text(part, "text", param)
    return {"type": "output_text", "text": text, "annotations": []} if role == "assistant" else {"type": "input_text", "text": text}


def _checked_reasoning(item: Item, param: str) -> Item:
    """Encrypted content of another server's says nothing here."""
    texts: dict[str, list[Item]] = {}
    for field, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        given = item.get(field)
        if given is None:
            given = []
        if not isinstance(given, list):
            raise BadRequest(f"{param}.{field} must be a list of parts.", param=f"{param}.{field}")
        texts[field] = [{"type": kind, "text": _text(part, "text", f"{param}.{field}.{place}")} for place, part in enumerate(given)]
    return {"type": "reasoning", **texts, "status": "completed"}


def _text(item: Any, name: str, param: str) -> str:
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, str):
        raise BadRequest(f"{param}.{name} must be a text.", param=f"{param}.{name}")
    return value


def messages_of(items: Sequence[Item]) -> list[ChatMessage]:
    """A call belongs to the assistant's message before it, and reasoning to the one behind it."""
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for item in items:
        last = messages[-1] if messages else {}
        match item["type"]:
            case "message":
                texts = [part.get("text") or part.get("refusal") or "" for part in item["content"]]
                content: Any = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
                messages.append({"role": item["role"], "content": content})
            case "function_call":
                if last.get("role") != "assistant":
                    messages.append({"role": "assistant", "content": None})
                name = joined_name(item.get("namespace"), item["name"])
                function = {"name": name, "arguments": item["arguments"]}
                messages[-1].setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
            case "function_call_output":
                output = item["output"]
                if not isinstance(output, str):
                    output = "\n".join(part.get("text") or part.get("refusal") or "" for part in output)
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
            case "reasoning":
                reasoning += "".join(part["text"] for part in item["content"])
                continue
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1] |= {"reasoning": reasoning, "reasoning_content": reasoning}
        reasoning = ""
    return [ChatMessage(**message) for message in messages]
