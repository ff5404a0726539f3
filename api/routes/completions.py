"""POST /v1/completions: one prompt or a list of them, text or token ids, scoring included."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request
from msgspec import structs
from starlette.responses import Response

from api.app_state import service_of
from api.http.json_route import JsonRoute
from api.model_registry import ServedModel
from api.request.limits import RequestLimits
from api.request.prompts import Prompt, Truncation, check_truncation, checked, completion_prompts, tokenize_text
from api.request.sampling_params import (
    OutputBudget,
    check_budget,
    default_max_tokens,
    make_sampling_params,
    resolve_seed,
    stop_strings,
)
from api.request.schemas import CompletionRequest
from api.request.validation import check_completion
from api.response.answer import answer
from api.response.chunk_format import AnswerFormat, WholeChoice
from api.response.generation import Generation, Task
from api.response.output_processor import ChoiceOutput, TokenLogprobs
from api.response.sse import encode_json
from api.submit import admit, answer_headers, submit
from engine.config import ApiConfig
from engine.protocol import SamplingParams

router = APIRouter(route_class=JsonRoute)
LIGHT_TOKENS = 1024  # checked in 0.1 ms


@router.post("/v1/completions", summary="Continue a text")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    service = service_of(request)
    admit(service)
    check_completion(body, service.request_limits)
    model = await service.models.resolve(service.client, body.model)
    work = body, model, service.request_limits
    task = _make_task(*work) if _is_light(body) else await service.models.in_thread(_make_task, *work)
    generation = await submit(request, task, body.request_id)
    format = CompletionFormat(body, generation, service.config)
    return await answer(request, generation, format, answer_headers(generation), service.config.sse_keep_alive_interval)


def _is_light(body: CompletionRequest) -> bool:
    """One short prompt of token ids, and nothing else to tokenize: handing it to a thread would take longer than the work."""
    prompt = body.prompt
    return isinstance(prompt, list) and 0 < len(prompt) <= LIGHT_TOKENS and isinstance(prompt[0], int) and not body.bad_words


def _make_task(body: CompletionRequest, model: ServedModel, limits: RequestLimits) -> Task:
    """Everything that takes time, on a worker thread where it does."""
    scores = bool(body.echo) or body.prompt_logprobs is not None
    check_budget(OutputBudget(body.max_tokens), model.limits, may_be_zero=scores)
    check_truncation(body.truncate_prompt_tokens, model.limits)
    prompts = [_make_prompt(source, body, model) for source in completion_prompts(body.prompt)]
    return Task(
        endpoint="/v1/completions",
        model=model,
        prompts=prompts,
        sampling=_sampling(body, model, limits, prompts),
        stop=stop_strings(body),
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens is not False,
        echo=bool(body.echo),
        stream=bool(body.stream),
        priority=body.priority,
        cache_salt=body.cache_salt or "",
    )


def _make_prompt(source: str | list[int], body: CompletionRequest, model: ServedModel) -> Prompt:
    truncation = Truncation(body.truncate_prompt_tokens, body.truncation_side or "left")
    if isinstance(source, str):
        return tokenize_text(source, model.tokenizer, model.limits, body.add_special_tokens, truncation)
    return checked(Prompt(source), model.limits, truncation)


def _sampling(body: CompletionRequest, model: ServedModel, limits: RequestLimits, prompts: list[Prompt]) -> list[SamplingParams]:
    """Parameters of each prompt. They differ in max_tokens, by the context's room, and in a seed that the client did not give."""
    config = model.files.generation_config
    budget = OutputBudget(body.max_tokens)
    prompt_logprobs = body.prompt_logprobs
    if prompt_logprobs is None and body.echo:
        prompt_logprobs = body.logprobs
    budgets = [budget.resolve(len(prompt.token_ids), model.limits, default_max_tokens(config)) for prompt in prompts]
    params = make_sampling_params(body, model.tokenizer, model.limits, limits, config, min(budgets), body.logprobs, prompt_logprobs)
    return [structs.replace(params, max_tokens=max_tokens, seed=resolve_seed(body.seed)) for max_tokens in budgets]


class CompletionFormat(AnswerFormat):
    """Chunks and whole answers of text completions."""

    text_item = b'{"index":%d,"text":', b',"logprobs":null,"finish_reason":null}'

    def __init__(self, body: CompletionRequest, generation: Generation, config: ApiConfig) -> None:
        super().__init__(body, generation, config, "cmpl", "text_completion")
        self._body = body
        self._begun = [False] * self._task.num_choices
        self.text_only = body.logprobs is None and not body.return_token_ids

    # Streamed

    def opening(self) -> Iterable[bytes]:
        return ()

    def chunks(self, output: ChoiceOutput) -> Iterable[bytes]:
        """Text and what belongs to it in one chunk, the end in one of its own, which strict clients need. A choice's first chunk
        brings the echo, with the first tokens."""
        first = not self._begun[output.index]
        self._begun[output.index] = True
        chunks = []
        if self.text_only and not (first and self._body.echo):
            if output.text:
                chunks.append(self._text_chunk(output))
        elif output.text or output.token_ids or first:
            chunks.append(self._chunk(output.index, encode_json(self._choice(output, first))))
        if output.finish_reason is not None:
            chunks.append(self._last_chunk(output.index, encode_json(_last_choice(output))))
        return chunks

    def _choice(self, output: ChoiceOutput, first: bool) -> dict[str, Any]:
        body, prompt = self._body, output.index // self._task.n
        text, entries = output.text, output.logprobs
        if first and body.echo:
            text = self._generation.echo_text(prompt) + text
            entries = [*self._prompt_entries(prompt), *entries]
        choice: dict[str, Any] = {"index": output.index, "text": text, "logprobs": None, "finish_reason": None}
        if body.logprobs is not None:
            choice["logprobs"] = self._logprobs.completion(entries, body.logprobs)
        if body.return_token_ids:
            choice["token_ids"] = output.token_ids
            if first:
                choice["prompt_token_ids"] = self._task.prompts[prompt].token_ids
        return choice

    # Whole

    def whole(self, choices: list[WholeChoice]) -> bytes:
        return encode_json(
            {
                "id": self._id,
                "object": "text_completion",
                "created": self._generation.created,
                "model": self._task.model.name,
                "choices": [self._whole_choice(index, choice) for index, choice in enumerate(choices)],
                "service_tier": None,
                "system_fingerprint": self._fingerprint,
                "usage": self._whole_usage(),
            }
        )

    def _whole_choice(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        assert choice.finish_reason is not None
        body, place = self._body, index // self._task.n
        text, entries = choice.text, choice.logprobs
        if body.echo:
            text = self._generation.echo_text(place) + text
            entries = [*self._prompt_entries(place), *entries]
        wants_prompt = body.prompt_logprobs is not None
        return {
            "index": index,
            "text": text,
            "logprobs": None if body.logprobs is None else self._logprobs.completion(entries, body.logprobs),
            "finish_reason": str(choice.finish_reason),
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if body.return_token_ids else None,
            "prompt_logprobs": self._generation.prompt_logprobs[place].vllm(self._task.model.tokenizer) if wants_prompt else None,
            "prompt_token_ids": self._task.prompts[place].token_ids if body.return_token_ids else None,
        }

    def _prompt_entries(self, prompt: int) -> list[TokenLogprobs]:
        if self._body.logprobs is None:
            return []
        return list(self._generation.prompt_logprobs[prompt].entries(self._task.model.tokenizer))


def _last_choice(output: ChoiceOutput) -> dict[str, Any]:
    return {
        "index": output.index,
        "text": "",
        "logprobs": None,
        "finish_reason": str(output.finish_reason),
        "stop_reason": output.stop_reason,
    }
