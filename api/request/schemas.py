"""Bodies of requests, as OpenAI's API and vLLM's extensions define them. Unknown fields are accepted and ignored.

Types are checked here; what depends on values, on other fields or on the model is checked in `validation`, `prompts` and
`sampling_params` beside it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticKnownError


def _refuse_quotes(value: Any) -> Any:
    """`"2"` and `true` are no numbers, whereas `2.0` is one."""
    if isinstance(value, str | bool):
        raise PydanticKnownError("int_type")
    return value


def _refuse_quoted_items(value: Any) -> Any:
    if isinstance(value, list) and not {str, bool}.isdisjoint(map(type, value)):
        raise PydanticKnownError("int_type")
    return value


T = TypeVar("T")
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
Integer = Annotated[int, BeforeValidator(_refuse_quotes)]
Number = Annotated[float, Field(strict=True)]
Int64 = Annotated[Integer, Field(ge=INT64_MIN, le=INT64_MAX)]
Many = Annotated[list[T], Field(fail_fast=True)]  # one error of a list is told: one an item could be gigabytes
TokenIds = Annotated[Many[Annotated[int, Field(ge=0, le=INT64_MAX)]], BeforeValidator(_refuse_quoted_items)]
AnyIntegers = Annotated[Many[int], BeforeValidator(_refuse_quoted_items)]  # token ids that are checked later


class ApiModel(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class StreamOptions(ApiModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class ItemReferences(ApiModel):
    """Ids of stored items that a body's input refers to."""

    ids: list[str] = []


class ResponseFormat(ApiModel):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None
    structures: Many[dict[str, Any]] | None = None
    triggers: Many[str] | None = None


class StructuredOutputs(ApiModel):
    """vLLM's; one of the first six at most."""

    json_: str | dict[str, Any] | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class RequestFields(ApiModel):
    """What bodies of all generating endpoints may say."""

    model: str | None = None
    stream: bool | None = False
    priority: Int64 = 0
    timeout: Number | None = None
    queue_timeout: Number | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    user: str | None = None
    resumable: bool | Number | None = None  # outlives its connection: for the server's time, or so many seconds


class SamplingFields(RequestFields):
    """The common fields of chat and text completions."""

    n: Integer | None = 1
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    seed: Int64 | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    stop: str | Many[str] | None = None
    stop_token_ids: AnyIntegers | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Integer = 0
    max_tokens: Integer | None = None
    allowed_token_ids: AnyIntegers | None = None
    bad_words: Many[str] | None = None
    prompt_logprobs: Integer | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1, le=INT64_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None

    stream_options: StreamOptions | None = None
    stream_interval: Integer | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = False

    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    # Known, and refused with a clear word when they ask for anything (api.request.validation).
    use_beam_search: bool = False
    logprob_token_ids: AnyIntegers | None = None
    repetition_detection: dict[str, Any] | None = None
    thinking_token_budget: Integer | None = None


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str


class ChatMessage(BaseModel):
    """A message of the conversation; what a template may read besides these fields is kept."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Many[ContentPart] | None = None
    name: str | None = None
    tool_calls: Many[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(BaseModel):
    """A tool that the model may call. What a template may read besides these fields is kept."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(ApiModel):
    name: str


class NamedToolChoice(ApiModel):
    type: Literal["function"] = "function"
    function: NamedFunction


class TemplateFields(ApiModel):
    """How messages become a prompt: shared by chat completions and /tokenize."""

    messages: Many[ChatMessage]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Many[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tools: Many[FunctionTool] | None = None
    tool_choice: str | NamedToolChoice | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None


class ChatCompletionRequest(SamplingFields, TemplateFields):
    logprobs: bool | None = False
    top_logprobs: Integer | None = 0
    max_completion_tokens: Integer | None = None
    return_prompt_text: bool | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True


class CompletionRequest(SamplingFields):
    prompt: str | Many[str] | TokenIds | Many[TokenIds] | None = None
    max_tokens: Integer | None = 16
    logprobs: Integer | None = None
    add_special_tokens: bool = True
    suffix: str | None = None
    prompt_embeds: Any = None


class TokenizeCompletionRequest(ApiModel):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(TemplateFields):
    model: str | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(ApiModel):
    model: str | None = None
    tokens: TokenIds


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(BaseModel):
    """Every answer that is an error, and the last event but `[DONE]` of a stream that breaks off."""

    error: ErrorDetail


HEAD_CHARACTERS = 256  # more than any text among a body's plain values may have


def body_head(body: BaseModel) -> BaseModel:
    """`body` without what may be large: its plain values, stream options and references. The fields that make up the prompt are
    None."""

    def kept(value: Any) -> Any:
        if isinstance(value, str):
            return value[:HEAD_CHARACTERS]
        return value if isinstance(value, int | float | StreamOptions | ItemReferences) else None

    return type(body).model_construct(**{name: kept(value) for name, value in body})
