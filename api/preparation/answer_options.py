"""How the answer to a body is written: from its fields and the server's settings."""

from __future__ import annotations

from api.preparation.rules import RequestRules
from api.request.sampling_params import stop_strings
from api.request.schemas import SamplingFields
from engine.protocol import AnswerOptions


def answer_options(body: SamplingFields, rules: RequestRules, logprobs: int | None) -> AnswerOptions:
    """What chat and text completions have in common. `logprobs`: as in the options."""
    options, forced = body.stream_options, rules.force_include_usage
    at_end = forced or (options is not None and options.include_usage)
    as_ids = body.return_tokens_as_token_ids
    return AnswerOptions(
        stop=stop_strings(body),
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=rules.tokens_as_token_ids if as_ids is None else as_ids,
        usage_at_end=at_end,
        usage_continuous=at_end and (forced or (options is not None and options.continuous_usage_stats)),
        usage_details=rules.prompt_tokens_details,
    )
