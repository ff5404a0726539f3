"""Rows that a grammar holds: alone and in a batch, chunked, preempted, sampled and greedy; what fails, fails alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from llguidance import LLMatcher

from gpu.plan import SamplingParams, SchedulerOutput
from gpu.runner.compiled_grammars import MOST_COMPILED
from gpu.runner.grammars import Grammars
from gpu.runner.runner import ModelRunner
from tests.byte_tokenizer import END, byte_tokenizer
from tests.gpu.engine_stub import GREEDY, Driver, make_config, make_runner
from tests.gpu.tiny_models import save_model

PROMPT = list(range(40, 60))
DIGITS = LLMatcher.grammar_from_regex(r"[0-9]{5}")
OBJECT = LLMatcher.grammar_from_json_schema({"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}})


def held_to(grammar: str, **sampling: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 1000, "grammar": grammar, **sampling})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """A tiny model whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("llama")
    save_model("llama", folder)
    runner = make_runner(make_config(folder))
    runner.grammars = Grammars(300, lambda: byte_tokenizer(300))
    return runner


@pytest.fixture
def driver(runner: ModelRunner) -> Iterator[Driver]:
    driver = Driver(runner)
    yield driver
    driver.freed += list(driver.tokens)
    runner.execute(SchedulerOutput(0, driver.freed, [], *([np.zeros(0, np.int32)] * 4), 0))
    assert not runner.grammars.num_rows


def text(output: list[int]) -> str:
    return bytes(token for token in output if token < 256).decode()


def alone(runner: ModelRunner, sampling: SamplingParams, num_tokens: int = 8) -> list[int]:
    driver = Driver(runner)
    driver.add(0, PROMPT, sampling)
    output = driver.generate(num_tokens)[0]
    driver.remove(0)
    runner.execute(SchedulerOutput(0, driver.freed, [], *([np.zeros(0, np.int32)] * 4), 0))
    return output


@pytest.mark.parametrize("sampling", [held_to(DIGITS), held_to(DIGITS, temperature=0.0), held_to(DIGITS, min_p=0.3, top_k=4)])
def test_the_output_matches_and_then_ends(runner: ModelRunner, sampling: SamplingParams) -> None:
    output = alone(runner, sampling)
    assert text(output[:5]).isdigit()
    assert output[5:] == [END] * 3, "what comes behind an end is thrown away"


def test_rows_without_a_grammar_do_not_notice(runner: ModelRunner, driver: Driver) -> None:
    samplings = {0: GREEDY, 1: held_to(DIGITS), 2: held_to(OBJECT), 5: held_to(""), 7: held_to(DIGITS, seed=4)}
    expected = {row: alone(runner, sampling) for row, sampling in samplings.items()}
    for row, sampling in samplings.items():
        driver.add(row, PROMPT, sampling)
    assert driver.generate(8, chunk=7) == expected
    assert expected[1] != expected[7]


def test_a_row_goes_on_after_a_preemption(runner: ModelRunner, driver: Driver) -> None:
    """Or at another engine: the grammar stands where the output has brought it."""
    expected = alone(runner, held_to(OBJECT), 12)
    assert text(expected).startswith("{")
    for cut in range(1, 12):
        driver.add(3, [*PROMPT, *expected[:cut]], held_to(OBJECT), prompt_len=len(PROMPT))
        assert driver.generate(12)[3] == expected
        driver.remove(3)


def test_raw_logprobs_are_those_before_the_grammar(runner: ModelRunner, driver: Driver) -> None:
    driver.add(0, PROMPT, held_to(DIGITS, temperature=0.0, logprobs=2))
    driver.add(1, PROMPT, SamplingParams(temperature=0.0, logprobs=2))
    held, free = driver.run({0: len(PROMPT), 1: len(PROMPT)}).logprobs
    assert held.token_ids[1:].tolist() == free.token_ids[1:].tolist()
    assert text([int(held.token_ids[0])]).isdigit() and held.rank > 1
    assert held.logprobs[1:].tolist() == free.logprobs[1:].tolist()


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (LLMatcher.grammar_from_regex("(a"), "regex parse error"),
        ("start: <|none|>", "unknown special token"),
        (LLMatcher.grammar_from_regex("[^\\s\\S]"), "NoExtension"),
    ],
)
def test_what_cannot_be_held_fails_alone(runner: ModelRunner, driver: Driver, grammar: str, why: str) -> None:
    driver.add(0, PROMPT, held_to(DIGITS))
    driver.add(1, PROMPT, held_to(grammar))
    output = driver.run({0: len(PROMPT), 1: len(PROMPT)})
    assert output.rows.tolist() == [0]
    assert output.failed_rows.keys() == {1} and output.failed_rows[1].startswith("Invalid request: ")
    assert why in output.failed_rows[1]
    driver.remove(1)
    assert text(driver.generate(5)[0]) == text(alone(runner, held_to(DIGITS), 5))


def test_an_output_that_does_not_match_fails(driver: Driver) -> None:
    """Of an engine with other rules, say: nothing can follow it."""
    driver.add(0, [*PROMPT, ord("x")], held_to(DIGITS), prompt_len=len(PROMPT))
    output = driver.run({0: len(PROMPT) + 1})
    assert "cannot be held to its grammar" in output.failed_rows[0]


def test_grammars_are_compiled_once_and_kept_in_number() -> None:
    made = []
    grammars = Grammars(300, lambda: made.append(1) or byte_tokenizer(300))  # type: ignore[func-returns-value]
    for number in range(MOST_COMPILED + 5):
        assert grammars.compile(LLMatcher.grammar_from_regex("a" * (number + 1))).result() == ""
    assert "unclosed group" in grammars.compile(LLMatcher.grammar_from_regex("(a")).result()
    assert len(made) == 1 and grammars.num_compiled == MOST_COMPILED


def test_without_a_tokenizer_the_reason_is_told() -> None:
    def none() -> None:
        raise ValueError("there is no tokenizer.json")

    grammars = Grammars(300, none)  # type: ignore[arg-type]
    assert "there is no tokenizer.json" in grammars.compile(DIGITS).result()
