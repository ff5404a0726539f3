"""From the body of a text completion to its `Task`. Runs on a thread or in a reader process; a light one in place."""

from __future__ import annotations

from msgspec.structs import replace

from api.errors import BadRequest
from api.model_files import ServedModel
from api.preparation.answer_options import answer_options
from api.preparation.rules import RequestRules
from api.preparation.task import Task
from api.request.limits import RequestLimits
from api.request.prompts import Prompt, Truncation, check_truncation, checked, completion_prompts, tokenize_text
from api.request.sampling_params import (
    OutputBudget,
    check_budget,
    default_max_tokens,
    make_sampling_params,
    resolve_seed,
)
from api.request.schemas import CompletionRequest
from api.request.structured_output import output_grammar
from api.request.validation import check_completion
from engine.protocol import SamplingParams

LIGHT_ITEMS = 1024  # of lists and maps, which are checked in 0.1 ms


def is_light(body: CompletionRequest) -> bool:
    """One short prompt of token ids, and nothing to tokenize or compile: handing it to a thread would take longer than the work."""
    prompt = body.prompt
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], int):
        return False
    if body.bad_words or body.response_format or body.structured_outputs:
        return False
    others = (body.logit_bias, body.allowed_token_ids, body.stop_token_ids)
    return len(prompt) + sum(len(each) for each in others if each) <= LIGHT_ITEMS


def prepare_completion(body: CompletionRequest, model: ServedModel, rules: RequestRules) -> Task:
    """Raises BadRequest."""
    check_completion(body, rules.limits)
    scores = bool(body.echo) or body.prompt_logprobs is not None
    check_budget(OutputBudget(body.max_tokens), model.limits, may_be_zero=scores)
    check_truncation(body.truncate_prompt_tokens, model.limits)
    prompts = [_make_prompt(source, body, model) for source in completion_prompts(body.prompt)]
    return Task(
        endpoint="/v1/completions",
        model=model,
        prompts=prompts,
        sampling=_sampling(body, model, rules.limits, prompts),
        answer=replace(answer_options(body, rules, body.logprobs), echo=bool(body.echo)),
        stream=bool(body.stream),
        priority=body.priority,
        tier=body.service_tier or "",
        cache_salt=body.cache_salt or "",
    )


def _make_prompt(source: str | list[int], body: CompletionRequest, model: ServedModel) -> Prompt:
    truncation = Truncation(body.truncate_prompt_tokens, body.truncation_side or "left")
    if not isinstance(source, str):
        return checked(Prompt(source), model.limits, truncation)
    prompt = tokenize_text(source, model.tokenizer, model.limits, body.add_special_tokens, truncation)
    return prompt if body.echo else Prompt(prompt.token_ids)


def _sampling(body: CompletionRequest, model: ServedModel, limits: RequestLimits, prompts: list[Prompt]) -> list[SamplingParams]:
    """Parameters of each prompt. They differ in max_tokens, by the context's room, and in a seed that the client did not give."""
    config = model.files.generation_config
    budget = OutputBudget(body.max_tokens)
    prompt_logprobs = body.prompt_logprobs
    if prompt_logprobs is None and body.echo:
        prompt_logprobs = body.logprobs
    budgets = [budget.resolve(len(prompt.token_ids), model.limits, default_max_tokens(config)) for prompt in prompts]
    params = make_sampling_params(
        body,
        model.tokenizer,
        model.limits,
        limits,
        config,
        min(budgets),
        body.logprobs,
        prompt_logprobs,
        output_grammar(body),
    )
    _check_repetition(params, len(prompts), limits)
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    limits.check_logprobs(params, num_prompt_tokens * params.n, sum(budgets) * params.n, model.limits.vocab_size)
    if body.echo or body.return_token_ids:
        limits.check_shown_prompts(num_prompt_tokens, params.n)
    return [replace(params, max_tokens=max_tokens, seed=resolve_seed(body.seed)) for max_tokens in budgets]


def _check_repetition(params: SamplingParams, num_prompts: int, limits: RequestLimits) -> None:
    """Lists of the request go to the engine once a prompt: a short body must not become a gigabyte there."""
    words = sum(len(word) for word in params.bad_words_token_ids)
    num_entries = len(params.logit_bias) + len(params.allowed_token_ids) + len(params.stop_token_ids) + words
    if num_entries * num_prompts > limits.max_repeated_entries:
        raise BadRequest(
            f"logit_bias, allowed_token_ids, stop_token_ids and bad_words have {num_entries} entries in each of {num_prompts} "
            f"prompts, more than {limits.max_repeated_entries} in all. Please send fewer prompts in one request.",
            param="prompt",
        )
    if len(params.grammar) * num_prompts > limits.max_repeated_characters:
        raise BadRequest(
            f"The output's grammar has {len(params.grammar):,} characters in each of {num_prompts} prompts, more than "
            f"{limits.max_repeated_characters:,} in all. Please send fewer prompts in one request.",
            param="prompt",
        )
