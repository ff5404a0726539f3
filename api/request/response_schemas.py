"""The body of POST /v1/responses, as OpenAI's API and vLLM's extensions define it. Unknown fields are accepted and ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from api.request.schemas import (
    AnyIntegers,
    ApiModel,
    Int64,
    Integer,
    ItemReferences,
    Many,
    Number,
    RequestFields,
    StructuredOutputs,
)

ID_PREFIX = "resp_"  # of a response's id, before that of the request
MOST_REFERENCES = 256  # of one body


class TextFormat(ApiModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(ApiModel):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(ApiModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(RequestFields):
    input: str | Many[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    background: bool | None = False
    tools: Many[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    max_tool_calls: Integer | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Many[str] | None = None
    max_output_tokens: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_logprobs: Integer | None = 0
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = "auto"
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    request_id: Annotated[str, AfterValidator(lambda given: given.removeprefix(ID_PREFIX))] | None = None

    # vLLM's.
    top_k: Integer | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    seed: Int64 | None = None
    stop: str | Many[str] | None = None
    stop_token_ids: AnyIntegers | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Integer = 0
    logit_bias: dict[str, Number] | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Integer | None = None

    # Known, and refused with a clear word when they ask for anything (api.request.response_chat).
    prompt: Any = None
    conversation: Any = None
    context_management: Any = None
    moderation: Any = None
    previous_input_messages: Any = None
    enable_response_messages: bool = False

    references: SkipJsonSchema[Annotated[ItemReferences, BeforeValidator(lambda given: ItemReferences())]] = (
        ItemReferences()
    )  # found

    @model_validator(mode="after")
    def _find_references(self) -> ResponsesRequest:
        """What the input refers to must be known while the input itself is in another process."""
        items = self.input if isinstance(self.input, list) else []
        found = [item.get("id") for item in items if is_reference(item)]
        self.references = ItemReferences(ids=[each for each in found if isinstance(each, str)][: MOST_REFERENCES + 1])
        return self


def is_reference(item: dict[str, Any]) -> bool:
    """A reference's type may be left out."""
    kind: object = item.get("type", "item_reference" if item.keys() == {"id"} else "message")
    return kind == "item_reference"
