"""From a request's fields to `SamplingParams`: defaults of the model, every rule on values, token ids for words.

Order of defaults: the request, then the model's generation_config.json, then OpenAI's. Rules and wording of errors are vLLM's, so
that clients which read them keep working.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from api.errors import BadRequest
from api.request.limits import RequestLimits
from api.request.schemas import SamplingFields
from api.text.tokenizer import TextTokenizer
from engine.protocol import GREEDY_EPSILON, SamplingParams, ThinkingBudget

logger = logging.getLogger("headrace.api")

MIN_TEMPERATURE = 0.01  # lower ones that still sample are raised to it: beyond, logits overflow
INT63 = 2**63 - 1
_DEFAULT_FIELDS = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})  # that a model may bring


@dataclass(frozen=True)
class ModelLimits:
    """The limits that all live engines of a model can keep."""

    max_model_len: int
    vocab_size: int
    max_logprobs: int


@dataclass(frozen=True)
class OutputBudget:
    """How many tokens a request may get: `requested` is None when the client gave no limit, `param` is the field that it used."""

    requested: int | None
    param: str = "max_tokens"

    def resolve(self, prompt_len: int, limits: ModelLimits, default: int | None) -> int:
        """Tokens to generate: the request's limit, or the model's default, or all that the context has room for; never more."""
        room = limits.max_model_len - prompt_len
        wanted = self.requested if self.requested is not None else default
        return room if wanted is None else min(wanted, room)


def check_budget(budget: OutputBudget, limits: ModelLimits, may_be_zero: bool = False) -> None:
    """The request's max_tokens, before the prompt is known. `may_be_zero`: scoring of a prompt generates nothing."""
    value = budget.requested
    if value is None or (value == 0 and may_be_zero):
        return
    if value < 1:
        raise BadRequest(f"{budget.param} must be at least 1, got {value}.", param=budget.param)
    if value > limits.max_model_len:
        limit = f"max_model_len={limits.max_model_len}"
        message = f"{budget.param}={value} cannot be greater than {limit}. Please request fewer output tokens."
        raise BadRequest(message, param=budget.param)


def make_sampling_params(
    request: SamplingFields,
    tokenizer: TextTokenizer,
    limits: ModelLimits,
    request_limits: RequestLimits,
    generation_config: dict[str, Any],
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: str = "",
    thinking: ThinkingBudget | None = None,
) -> SamplingParams:
    """All of `request` that the engine needs, checked. `max_tokens` is resolved; logprobs come in the endpoint's own fields;
    `grammar` is that of the output, `thinking` of its reasoning."""
    values = _Values(request, generation_config)
    _check_numbers(values, request.min_tokens, max_tokens)
    for field, count in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
        check_logprobs(field, count, limits)
    _check_stop(request)
    greedy = values.temperature < GREEDY_EPSILON
    sampling = SamplingParams(
        n=values.n,
        temperature=0.0 if greedy else max(values.temperature, MIN_TEMPERATURE),
        top_p=1.0 if greedy else values.top_p,
        top_k=0 if greedy else min(max(values.top_k, 0), limits.vocab_size),
        min_p=0.0 if greedy else values.min_p,
        seed=resolve_seed(request.seed),
        presence_penalty=values.presence_penalty,
        frequency_penalty=values.frequency_penalty,
        repetition_penalty=values.repetition_penalty,
        logit_bias=_logit_bias(request.logit_bias, limits.vocab_size),
        allowed_token_ids=_allowed_token_ids(request.allowed_token_ids, limits.vocab_size),
        grammar=grammar,
        thinking=thinking,
        bad_words_token_ids=_bad_words(request.bad_words or [], tokenizer, request_limits),
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        eos_token_ids=tokenizer.eos_token_ids,
        stop_token_ids=_stop_token_ids(request.stop_token_ids, limits.vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    _check_something_may_be_sampled(sampling, limits.vocab_size)
    return sampling


def resolve_seed(seed: int | None) -> int:
    """The client's, or one that is drawn where it gave none (None or -1)."""
    return random.getrandbits(63) if seed is None or seed == -1 else seed


def stop_strings(request: SamplingFields) -> list[str]:
    if request.stop is None:
        return []
    return [request.stop] if isinstance(request.stop, str) else list(request.stop)


def default_max_tokens(generation_config: dict[str, Any]) -> int | None:
    value = generation_config.get("max_new_tokens")
    return value if type(value) is int and value > 0 else None


def check_logprobs(field: str, count: int | None, limits: ModelLimits) -> None:
    if count is None:
        return
    if count < 0 and count != -1:
        raise BadRequest(f"{field} must be non-negative or -1, got {count}.", param=field)
    most = limits.vocab_size if limits.max_logprobs == -1 else limits.max_logprobs
    wanted = limits.vocab_size if count == -1 else count
    if wanted > most:
        kind = "prompt" if field == "prompt_logprobs" else "sample"
        raise BadRequest(f"Requested {kind} logprobs of {wanted}, which is greater than max allowed: {most}", param=field)


def usable_defaults(model: str, generation_config: dict[str, Any]) -> dict[str, Any]:
    """Those of a model's defaults that a request could ask for; the others are logged and left out."""
    usable = dict(generation_config)
    for field in _DEFAULT_FIELDS & generation_config.keys():
        try:
            asked = SamplingFields.model_validate({field: generation_config[field]})
            _check_numbers(_Values(asked, {}), 0, 0)
            usable[field] = getattr(asked, field)
        except (ValidationError, BadRequest) as error:
            logger.warning("the default for %s of model %s is ignored: %s", field, model, error)
            del usable[field]
    return usable


class _Values:
    """The numbers of a request with defaults filled in."""

    def __init__(self, request: SamplingFields, generation_config: dict[str, Any]) -> None:
        def value(field: str, fallback: float) -> Any:
            own = getattr(request, field)
            if own is not None:
                return own
            default = generation_config.get(field)
            return fallback if default is None else default

        self.n: int = 1 if request.n is None else request.n
        self.temperature: float = value("temperature", 1.0)
        self.top_p: float = value("top_p", 1.0)
        self.top_k: int = value("top_k", 0)
        self.min_p: float = value("min_p", 0.0)
        self.repetition_penalty: float = value("repetition_penalty", 1.0)
        self.presence_penalty: float = 0.0 if request.presence_penalty is None else request.presence_penalty
        self.frequency_penalty: float = 0.0 if request.frequency_penalty is None else request.frequency_penalty


def _check_numbers(values: _Values, min_tokens: int, max_tokens: int) -> None:
    def demand(holds: bool, param: str, rule: str, value: float) -> None:
        if not holds:
            raise BadRequest(f"{param} must be {rule}, got {value}.", param=param)

    n, temperature, penalty = values.n, values.temperature, values.repetition_penalty
    demand(n >= 1, "n", "at least 1", n)
    demand(-2.0 <= values.presence_penalty <= 2.0, "presence_penalty", "in [-2, 2]", values.presence_penalty)
    demand(-2.0 <= values.frequency_penalty <= 2.0, "frequency_penalty", "in [-2, 2]", values.frequency_penalty)
    demand(math.isfinite(penalty), "repetition_penalty", "a finite number", penalty)
    demand(penalty > 0.0, "repetition_penalty", "greater than zero", penalty)
    demand(math.isfinite(temperature), "temperature", "a finite number", temperature)
    demand(temperature >= 0.0, "temperature", "non-negative", temperature)
    demand(temperature <= 2.0, "temperature", "in [0, 2]", temperature)
    demand(0.0 < values.top_p <= 1.0, "top_p", "in (0, 1]", values.top_p)
    demand(values.top_k >= -1, "top_k", "0 (disable), or at least 1", values.top_k)
    demand(0.0 <= values.min_p <= 1.0, "min_p", "in [0, 1]", values.min_p)
    demand(min_tokens >= 0, "min_tokens", "greater than or equal to 0", min_tokens)
    demand(min_tokens <= max_tokens, "min_tokens", f"less than or equal to max_tokens={max_tokens}", min_tokens)
    if temperature < GREEDY_EPSILON:
        demand(n == 1, "n", "1 when using greedy sampling", n)


def _check_stop(request: SamplingFields) -> None:
    if not all(stop_strings(request)):
        raise BadRequest("stop cannot contain an empty string.", param="stop")


def _in_vocabulary(token_ids: Iterable[int], field: str, vocab_size: int) -> None:
    outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if outside:
        shown = f"{outside[:10]}" + (" and more" if len(outside) > 10 else "")
        message = f"token_id(s) {shown} in {field} contain out-of-vocab token ids. Vocabulary size: {vocab_size}"
        raise BadRequest(message, param=field)


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    if not bias:
        return {}
    converted: dict[int, float] = {}
    invalid: list[str] = []
    for key, value in bias.items():
        try:
            converted[int(key)] = value
        except ValueError:
            invalid.append(key)
    if invalid:
        message = f"logit_bias contains key(s) that cannot be converted to integer token IDs: {invalid[:10]!r}"
        raise BadRequest(message, param="logit_bias")
    _in_vocabulary(converted, "logit_bias", vocab_size)
    if any(math.isnan(value) for value in converted.values()):
        raise BadRequest("logit_bias values must be numbers.", param="logit_bias")
    return {token_id: max(-100.0, min(100.0, value)) for token_id, value in converted.items()}


def _allowed_token_ids(token_ids: list[int] | None, vocab_size: int) -> list[int]:
    if token_ids is None:
        return []
    if not token_ids:
        raise BadRequest("allowed_token_ids is not None and empty!", param="allowed_token_ids")
    _in_vocabulary(token_ids, "allowed_token_ids", vocab_size)
    return sorted(set(token_ids))


def _check_something_may_be_sampled(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuses where allowed_token_ids, bad words and min_tokens leave no token for the first place. Bad words of several tokens may
    still leave none later: then the engine ends that request alone."""
    allowed, banned = sampling.allowed_token_ids, {word[0] for word in sampling.bad_words_token_ids if len(word) == 1}
    if not _leaves_some(allowed, banned, vocab_size):
        message = "bad_words forbids every token that allowed_token_ids allows: there is none to sample."
        raise BadRequest(message, param="bad_words")
    if not _leaves_some(allowed, banned | sampling.held_back_token_ids, vocab_size):
        message = f"min_tokens={sampling.min_tokens} cannot be reached: every allowed token would end the output."
        raise BadRequest(message, param="min_tokens")


def _leaves_some(allowed: list[int], banned: set[int], vocab_size: int) -> bool:
    """Whether any of the allowed tokens is left, or of all tokens if none are named."""
    return not banned.issuperset(allowed) if allowed else len(banned) < vocab_size


def _stop_token_ids(token_ids: list[int] | None, vocab_size: int) -> list[int]:
    _in_vocabulary(token_ids or [], "stop_token_ids", vocab_size)
    return sorted(set(token_ids or []))


def _bad_words(words: list[str], tokenizer: TextTokenizer, limits: RequestLimits) -> list[list[int]]:
    """Token sequences of each word, as it stands and behind a space, which tokenizers tell apart."""
    if not all(words):
        raise BadRequest(f"bad_words cannot contain an empty string. Got bad_words={words}", param="bad_words")
    sequences: list[list[int]] = []
    for word in dict.fromkeys(words):
        for place, spelling in enumerate((word.lstrip(), " " + word.lstrip())):
            token_ids = tokenizer.encode(spelling, add_special_tokens=False)
            if not token_ids:
                if place == 0:
                    raise BadRequest("bad_words entries must tokenize to at least one token.", param="bad_words")
                continue
            if token_ids not in sequences:
                sequences.append(token_ids)
    limits.check_bad_words(len(sequences), tokenized=True)
    return sequences
