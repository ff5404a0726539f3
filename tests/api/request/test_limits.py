"""How much one request may ask for."""

from __future__ import annotations

import pytest

from api.errors import BadRequest
from api.request.limits import RequestLimits
from engine.config import ApiConfig
from engine.protocol import SamplingParams

LIMITS = RequestLimits(max_n=8, max_prompts=4, max_choices=16, max_stop_strings=2, max_bad_words=3)


def test_default_limits_are_those_of_the_settings() -> None:
    assert RequestLimits.of(ApiConfig()) == RequestLimits()


@pytest.mark.parametrize(("num_prompts", "n"), [(1, 8), (4, 4), (0, 1), (2, 8)])
def test_requests_within_the_limits_pass(num_prompts: int, n: int) -> None:
    LIMITS.check_choices(num_prompts, n)
    LIMITS.check_stop_strings(["a", "b"])
    LIMITS.check_bad_words(3)


@pytest.mark.parametrize(
    ("num_prompts", "n", "message", "param"),
    [
        (1, 9, "n must be at most 8, got 9", "n"),
        (5, 1, "prompt list length 5 exceeds the maximum allowed count of 4", "prompt"),
        (3, 6, r"3 prompt\(s\) with n=6 make 18 choices; .* at most 16", "n"),
    ],
)
def test_too_many_choices_are_refused(num_prompts: int, n: int, message: str, param: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        LIMITS.check_choices(num_prompts, n)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt_logprobs", "logprobs", "num_prompt", "num_output", "param"),
    [
        (-1, None, 10, 10**9, "prompt_logprobs"),  # 10 * (1 + 100)
        (None, -1, 10**9, 10, "logprobs"),
        (0, None, 1001, 10**9, "prompt_logprobs"),
        (None, 4, 10**9, 201, "logprobs"),
        (1, 1, 300, 201, "prompt_logprobs"),
    ],
)
def test_too_many_logprobs_are_refused(
    prompt_logprobs: int | None, logprobs: int | None, num_prompt: int, num_output: int, param: str
) -> None:
    limits = RequestLimits(max_request_logprobs=1000)
    sampling = SamplingParams(prompt_logprobs=prompt_logprobs, logprobs=logprobs)
    with pytest.raises(
        BadRequest, match=r"too many logprobs: .* at most 1,000 in one request \(--max-request-logprobs\)"
    ) as caught:
        limits.check_logprobs(sampling, num_prompt, num_output, vocab_size=100)
    assert caught.value.param == param
    limits.check_logprobs(sampling, num_prompt // 2, num_output // 2, vocab_size=100)
    limits.check_logprobs(SamplingParams(), num_prompt, num_output, vocab_size=100)


def test_prompts_shown_too_often_are_refused() -> None:
    LIMITS.check_shown_prompts(2**20, 4)
    with pytest.raises(BadRequest, match="1,048,577 prompt tokens in each of n=4 choices are more than 4,194,304") as caught:
        LIMITS.check_shown_prompts(2**20 + 1, 4)
    assert caught.value.param == "n"


def test_too_many_words_are_refused() -> None:
    with pytest.raises(BadRequest, match="stop must contain at most 2 strings, got 3"):
        LIMITS.check_stop_strings(["a"] * 3)
    with pytest.raises(BadRequest, match="stop must have at most 16384 characters, got 16385"):
        LIMITS.check_stop_strings(["a", "b" * 16384])
    with pytest.raises(BadRequest, match=r"Too many bad words: 4. The max number is 3"):
        LIMITS.check_bad_words(4)
    with pytest.raises(BadRequest, match=r"Too many bad words after tokenization: 6. The max number is 3"):
        LIMITS.check_bad_words(6, tokenized=True)
