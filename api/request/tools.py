"""What a chat request says of tools: which it offers, how its answer's calls are found, and what its output is held to."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from api.errors import BadRequest
from api.request.schemas import ChatCompletionRequest, FunctionTool, NamedToolChoice, TemplateFields
from api.request.structured_output import checked_grammar, output_grammar
from api.request.tool_grammar import Choice, Offered, calls_or_answer, tool_grammar
from api.text.tokenizer import TextTokenizer
from api.tools.formats import HERMES, ToolFormat

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")  # Anthropic's limit; OpenAI's is 64
OFF = "none"  # of --tool-call-parser: no tools
AUTO = "auto"  # what the chat template tells


@dataclass(frozen=True)
class ToolUse:
    """`format`: in which calls are looked for; None: no calls. `types`: of the tools' parameters."""

    format: ToolFormat | None = None
    types: dict[str, dict[str, str]] = field(default_factory=dict)
    one_call: bool = False
    grammar: str = ""


def check_tools(request: TemplateFields) -> None:
    """The rules that need no model. Raises BadRequest."""
    tools, choice = request.tools, request.tool_choice
    if tools is not None and not tools:
        raise BadRequest("`tools` must not be an empty list: omit it.", param="tools")
    for place, tool in enumerate(tools or ()):
        if not _NAME.fullmatch(tool.function.name):
            message = "A function's name must have 1 to 128 characters, of a-z, A-Z, 0-9, _ and -"
            raise BadRequest(f"{message}, got {tool.function.name[:80]!r}.", param=f"tools.{place}.function.name")
    if choice is None or choice == "none":
        return
    if isinstance(choice, str) and choice not in ("auto", "required"):
        message = f"tool_choice must be 'none', 'auto', 'required' or name a function, got {choice[:80]!r}."
        raise BadRequest(message, param="tool_choice")
    if tools is None:
        raise BadRequest("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in {tool.function.name for tool in tools}:
        message = f"tool_choice names the function {choice.function.name[:80]!r}, which is not one of `tools`."
        raise BadRequest(message, param="tool_choice")


def check_tools_are_served(request: TemplateFields, setting: str) -> None:
    """`setting`: --tool-call-parser."""
    if request.tools and setting == OFF:
        raise BadRequest("Tool calling is turned off on this server (--tool-call-parser none): omit `tools`.", param="tools")


def tools_of_template(request: TemplateFields) -> list[dict[str, Any]] | None:
    """The tools as chat templates take them."""
    if not request.tools:
        return None
    return [tool.model_dump(exclude_unset=True, exclude={"function": {"strict"}}) for tool in request.tools]


def tool_use(request: ChatCompletionRequest, detected: ToolFormat | None, tokenizer: TextTokenizer) -> ToolUse:
    """`request` is checked. `detected`: the format that the model writes; None: not known. Raises BadRequest."""
    tools = request.tools
    if not tools or request.tool_choice == "none":
        return ToolUse(grammar=output_grammar(request))
    named = request.tool_choice.function.name if isinstance(request.tool_choice, NamedToolChoice) else ""
    choice = Choice.REQUIRED if named or request.tool_choice == "required" else Choice.AUTO
    if detected is None and choice is Choice.AUTO:
        message = (
            "The chat template of this model tells nothing of tool calls. Use tool_choice 'required' or a named function, or start "
            "the server with --tool-call-parser and --chat-template."
        )
        raise BadRequest(message, param="tools")
    format = detected or HERMES
    one_call = bool(named) or request.parallel_tool_calls is False
    types = {tool.function.name: _parameter_types(tool.function.parameters) for tool in tools}
    offered = [_offered(tool, place) for place, tool in enumerate(tools) if not named or tool.function.name == named]
    output = output_grammar(request)
    if choice is Choice.REQUIRED and output:
        param = "response_format" if request.response_format is not None else "structured_outputs"
        raise BadRequest(f"{param} cannot be used when tool_choice makes the output a tool call.", param=param)
    if choice is Choice.AUTO and not output and not any(tool.strict for tool in offered):
        return ToolUse(format, types, one_call)
    grammar = tool_grammar(format, offered, Choice.REQUIRED if output else choice, one_call, tokenizer.added_ids)
    if output:
        grammar = calls_or_answer(grammar, output)
    return ToolUse(format, types, one_call, checked_grammar(grammar, "tools"))


def _offered(tool: FunctionTool, place: int) -> Offered:
    param = f"tools.{place}.function.parameters"
    parameters = dict(tool.function.parameters or {})
    if parameters.setdefault("type", "object") != "object":
        raise BadRequest(f"{param}: the type of a function's parameters must be 'object'.", param=param)
    return Offered.of(tool.function.name, parameters, bool(tool.function.strict), param)


def _parameter_types(parameters: dict[str, Any] | None) -> dict[str, str]:
    properties = (parameters or {}).get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: _type(schema) for name, schema in properties.items()}


def _type(schema: Any) -> str:
    """The one type of a parameter, as far as its schema says it in a word."""
    if not isinstance(schema, dict):
        return ""
    type = schema.get("type")
    if isinstance(type, str):
        return type
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return "string" if isinstance(values, list) and values and all(isinstance(value, str) for value in values) else ""
