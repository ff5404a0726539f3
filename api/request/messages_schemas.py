"""Bodies of Anthropic's Messages API (https://docs.anthropic.com/en/api/messages). Unknown fields are accepted and ignored.

Blocks and tools are checked where they become a chat's (`api.request.messages_chat`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from api.request.schemas import ApiModel, ContentPart, Integer, Many, Number, RequestFields

Content = str | Many[ContentPart]


class Turn(ApiModel):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


class Tool(ApiModel):
    name: str
    type: str | None = None  # of tools that run at Anthropic's; "custom": the client's
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(ApiModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(ApiModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer | None = None


class OutputFormat(ApiModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ApiModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(ApiModel):
    user_id: str | None = None


class Conversation(RequestFields):
    """What makes up the prompt."""

    model: str
    messages: Many[Turn]
    system: Content | None = None
    tools: Many[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's


class MessagesRequest(Conversation):
    max_tokens: Annotated[Integer, Field(ge=1)]
    stop_sequences: Many[str] | None = None
    temperature: Number | None = None
    top_k: Integer | None = None
    top_p: Number | None = None
    metadata: Metadata | None = None


class CountTokensRequest(Conversation):
    """The tokens of a conversation are counted, and nothing else is done."""


class MessagesErrorDetail(ApiModel):
    type: str
    message: str


class MessagesErrorAnswer(ApiModel):
    """Every answer of these routes that is an error, and the last event of a stream that breaks off."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str
