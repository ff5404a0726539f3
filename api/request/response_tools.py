"""The tools of a response's body: functions, alone and in namespaces. The client runs all of them.

To the model a function in a namespace is one more function, whose name has the namespace before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from api.errors import BadRequest
from api.request.schemas import FunctionDefinition, FunctionTool, NamedFunction, NamedToolChoice

Tool = dict[str, Any]


def joined_name(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def function_tools(tools: Sequence[Tool]) -> list[FunctionTool] | None:
    """None for an empty list, which OpenAI's API takes for no tools. Raises BadRequest."""
    return [_function(*each) for each in _functions(tools)] or None


def _functions(tools: Sequence[Tool]) -> list[tuple[Tool, str, str | None]]:
    """Each function with its place in the body and its namespace. Raises BadRequest."""
    found: list[tuple[Tool, str, str | None]] = []
    for place, tool in enumerate(tools):
        param, inner = f"tools.{place}", tool.get("tools")
        if tool.get("type") != "namespace":
            found.append((tool, param, None))
        elif not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
            raise BadRequest(f"{param}.tools must be a list of functions.", param=f"{param}.tools")
        else:
            found += [(each, f"{param}.tools.{number}", _text(tool, "name", param)) for number, each in enumerate(inner)]
    return found


def _function(tool: Tool, param: str, namespace: str | None) -> FunctionTool:
    kind, parameters, description = (tool.get(field) for field in ("type", "parameters", "description"))
    if kind != "function":
        message = f"{param}: tools of type {str(kind)[:64]!r} are not supported: this server takes functions, and runs no tools."
        raise BadRequest(message, param=f"{param}.type")
    given: dict[str, Any] = {"name": joined_name(namespace, _text(tool, "name", param))}
    if parameters is not None and not isinstance(parameters, dict):
        raise BadRequest(f"{param}.parameters must be an object.", param=f"{param}.parameters")
    if description is not None:
        given["description"] = _text(tool, "description", param)
    if not isinstance(tool.get("strict"), bool | None):
        raise BadRequest(f"{param}.strict must be true or false.", param=f"{param}.strict")
    given |= {name: tool[name] for name in ("parameters", "strict") if tool.get(name) is not None}
    return FunctionTool(type="function", function=FunctionDefinition(**given))


def _text(tool: Tool, name: str, param: str) -> str:
    value = tool.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{param}.{name} must be a text.", param=f"{param}.{name}")
    return value


def function_choice(choice: str | dict[str, Any] | None, has_tools: bool) -> str | NamedToolChoice | None:
    """Raises BadRequest."""
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            message = f"tool_choice of type {str(choice.get('type'))[:64]!r} is not supported: name a function."
            raise BadRequest(message, param="tool_choice.type")
        name = joined_name(choice.get("namespace"), _text(choice, "name", "tool_choice"))
        return NamedToolChoice(function=NamedFunction(name=name))
    return None if choice == "auto" and not has_tools else choice


def shown_tool(tool: Tool) -> Tool:
    """As the answer repeats it. `tool` is checked."""
    if tool["type"] == "namespace":
        given = {name: tool.get(name) for name in ("name", "description")}
        return {"type": "namespace", **given, "tools": [shown_tool(each) for each in tool["tools"]]}
    given = {name: tool.get(name) for name in ("name", "description", "parameters")}
    return {"type": "function", **given, "strict": bool(tool.get("strict"))}


def namespaces(tools: Sequence[Tool]) -> Mapping[str, tuple[str, str]]:
    """Namespace and name of each function in one, by the name that the model knows. `tools` are checked."""
    return {
        joined_name(tool["name"], each["name"]): (tool["name"], each["name"])
        for tool in tools
        if tool["type"] == "namespace"
        for each in tool["tools"]
    }
