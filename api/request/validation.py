"""Rules between fields of one body; and what this server knows of but does not do, refused with a clear word before any work."""

from __future__ import annotations

from api.errors import BadRequest
from api.request.limits import RequestLimits
from api.request.prompts import num_prompts
from api.request.sampling_params import stop_strings
from api.request.schemas import ChatCompletionRequest, CompletionRequest, SamplingFields, TemplateFields
from api.request.tools import check_tools


def check_chat(request: ChatCompletionRequest, limits: RequestLimits) -> None:
    limits.check_choices(1, request.n or 1)
    _check_common(request, limits)
    check_template_fields(request)
    top = request.top_logprobs
    if top is not None and top < 0 and top != -1:
        raise BadRequest("`top_logprobs` must be a positive value or -1.", param="top_logprobs")
    if top and not request.logprobs:
        raise BadRequest("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")


def check_completion(request: CompletionRequest, limits: RequestLimits) -> None:
    limits.check_choices(num_prompts(request.prompt), request.n or 1)
    _check_common(request, limits)
    if request.logprobs is not None and request.logprobs < 0 and request.logprobs != -1:
        raise BadRequest("`logprobs` must be a positive value or -1.", param="logprobs")
    if request.suffix:
        raise BadRequest("suffix is not supported.", param="suffix")
    if request.prompt_embeds is not None:
        raise BadRequest("prompt_embeds is not supported.", param="prompt_embeds")


def check_template_fields(request: TemplateFields) -> None:
    if not request.messages:
        raise BadRequest("messages must contain at least one message.", param="messages")
    if request.continue_final_message and request.add_generation_prompt:
        message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        raise BadRequest(message, param="continue_final_message")
    for field in ("mm_processor_kwargs", "media_io_kwargs"):
        if getattr(request, field) is not None:
            raise BadRequest(f"{field} is not supported: this server takes text only.", param=field)
    check_tools(request)


def _check_common(request: SamplingFields, limits: RequestLimits) -> None:
    limits.check_stop_strings(stop_strings(request))
    limits.check_bad_words(len(set(request.bad_words or ())))
    if request.stream_options is not None and not request.stream:
        raise BadRequest("Stream options can only be defined when `stream=True`.", param="stream_options")
    if request.stream_interval is not None and request.stream_interval < 1:
        raise BadRequest(f"stream_interval must be at least 1, got {request.stream_interval}.", param="stream_interval")
    wanted = request.prompt_logprobs
    if wanted is not None:
        if request.stream and (wanted > 0 or wanted == -1):
            raise BadRequest("`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")
        if wanted < 0 and wanted != -1:
            raise BadRequest("`prompt_logprobs` must be a positive value or -1.", param="prompt_logprobs")
    _check_salt(request.cache_salt)
    if request.use_beam_search:
        raise BadRequest("Beam search is not supported.", param="use_beam_search")
    for field in ("logprob_token_ids", "repetition_detection"):
        if getattr(request, field):
            raise BadRequest(f"{field} is not supported.", param=field)


def _check_salt(salt: str | None) -> None:
    if salt is None:
        return
    if not 1 <= len(salt) <= 128 or any(character in salt for character in "@/\\\0"):
        raise BadRequest("cache_salt must have 1 to 128 characters and none of @, /, \\ and NUL.", param="cache_salt")
