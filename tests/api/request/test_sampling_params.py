"""From request fields to SamplingParams: defaults, limits, words to token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from api.errors import BadRequest
from api.request.limits import RequestLimits
from api.request.sampling_params import (
    ModelLimits,
    OutputBudget,
    check_budget,
    check_logprobs,
    make_sampling_params,
    usable_defaults,
)
from api.request.schemas import CompletionRequest
from api.text.tokenizer import TextTokenizer
from gpu.checkpoint.tokenizer_files import load_tokenizer_files
from gpu.plan import SamplingParams

LIMITS = ModelLimits(max_model_len=100, vocab_size=49152, max_logprobs=20)


def make(tokenizer: TextTokenizer, generation_config: dict[str, Any] | None = None, **fields: Any) -> SamplingParams:
    body = CompletionRequest(prompt="x", **fields)
    return make_sampling_params(
        body, tokenizer, LIMITS, RequestLimits(), generation_config or {}, 16, body.logprobs, body.prompt_logprobs
    )


def test_openais_defaults_where_nothing_is_said(tokenizer: TextTokenizer) -> None:
    params = make(tokenizer)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert params.eos_token_ids == [2]


def test_the_request_wins_over_the_models_generation_config(tokenizer: TextTokenizer) -> None:
    config = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1}
    params = make(tokenizer, config, top_k=5, temperature=0.8)
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.8, 0.9, 5, 1.1)


@pytest.mark.parametrize(
    ("name", "borders"),
    [
        ("temperature", (0, 0.0, 2, 2.0)),
        ("top_p", (1e-9, 1, 1.0)),
        ("top_k", (-1, 0, 2**31 - 1)),
        ("min_p", (0, 1.0)),
        ("repetition_penalty", (1e-9, 1e6)),
        ("max_new_tokens", (1, 2**31 - 1)),
    ],
)
def test_no_default_that_a_models_files_may_bring_is_refused(
    name: str, borders: tuple[float, ...], tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    """The engine ignores others where it reads the files; what it lets pass must not end in a 400 that blames the client."""
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}')
    for value in borders:
        (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
        config = load_tokenizer_files(tmp_path).generation_config
        assert config == {name: value}
        assert usable_defaults("a model", config) == config
        make(tokenizer, config)


def test_greedy_needs_no_filters(tokenizer: TextTokenizer) -> None:
    params = make(tokenizer, temperature=0, top_p=0.5, top_k=3, min_p=0.2)
    assert params.greedy
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)


def test_a_tiny_temperature_is_raised(tokenizer: TextTokenizer) -> None:
    assert make(tokenizer, temperature=0.001).temperature == 0.01


def test_a_seed_is_drawn_when_none_is_given(tokenizer: TextTokenizer) -> None:
    drawn = {make(tokenizer).seed for _ in range(8)} | {make(tokenizer, seed=-1).seed for _ in range(8)}
    assert len(drawn) == 16
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert make(tokenizer, seed=7).seed == 7
    assert make(tokenizer, seed=-5).seed == -5


def test_top_k_beyond_the_vocabulary_and_minus_one(tokenizer: TextTokenizer) -> None:
    assert make(tokenizer, top_k=10**30).top_k == LIMITS.vocab_size
    assert make(tokenizer, top_k=-1).top_k == 0


def test_logit_bias_is_clamped(tokenizer: TextTokenizer) -> None:
    assert make(tokenizer, logit_bias={"5": 1e9, "6": -500, "7": 1.5}).logit_bias == {5: 100.0, 6: -100.0, 7: 1.5}


def test_bad_words_are_banned_with_and_without_a_space_before(tokenizer: TextTokenizer) -> None:
    sequences = make(tokenizer, bad_words=["cat"]).bad_words_token_ids
    assert [tokenizer.decode(sequence) for sequence in sequences] == ["cat", " cat"]


def test_lists_of_ids_are_sets(tokenizer: TextTokenizer) -> None:
    params = make(tokenizer, stop_token_ids=[9, 3, 9], allowed_token_ids=[8, 1, 8])
    assert (params.stop_token_ids, params.allowed_token_ids) == ([3, 9], [1, 8])


@pytest.mark.parametrize(
    ("requested", "default", "prompt_len", "expected"),
    [(None, None, 30, 70), (None, 16, 30, 16), (50, 16, 30, 50), (90, None, 30, 70), (1, None, 99, 1)],
)
def test_max_tokens_fit_the_context(requested: int | None, default: int | None, prompt_len: int, expected: int) -> None:
    assert OutputBudget(requested).resolve(prompt_len, LIMITS, default) == expected


def test_zero_tokens_only_for_scoring() -> None:
    check_budget(OutputBudget(0), LIMITS, may_be_zero=True)
    with pytest.raises(BadRequest, match="max_tokens must be at least 1, got 0"):
        check_budget(OutputBudget(0), LIMITS)


def test_logprobs_of_the_whole_vocabulary_must_be_allowed() -> None:
    check_logprobs("logprobs", -1, ModelLimits(100, 500, -1))
    with pytest.raises(BadRequest, match="Requested sample logprobs of 49152, which is greater than max allowed: 20"):
        check_logprobs("logprobs", -1, LIMITS)
