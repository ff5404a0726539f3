"""The scripted model's runner: its output follows from prompt and position alone, and fits what the request asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from gpu.plan import SamplingParams
from gpu.stand_in.scripted import ScriptedOutput, ScriptedRunner
from tests.gpu.engine_stub import Driver, make_config

SCRIPT = r"""
- match: digits
  answer: '12345'
- match: call (\w+)
  answer: '<tool_call>{"name": "\1"}</tool_call>'
- match: nothing
  answer: ''
- match: hello
  answer: Grüße!
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "script.yaml"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def runner(byte_model: Path, script: Path) -> ScriptedRunner:
    return make_runner(byte_model, script)


def make_runner(model: Path, script: Path) -> ScriptedRunner:
    runner = ScriptedRunner(make_config(model, load_format="scripted", script=str(script)))
    runner.load(lambda fraction: None)
    runner.allocate_kv(400, 512)
    return runner


class Asked:
    """A prompt's output, alone in the runner."""

    def __init__(self, runner: ScriptedRunner, prompt: str, num_tokens: int = 40, chunk: int = 1000, **sampling: Any) -> None:
        self.driver = Driver(runner)
        self.tokenizer: Tokenizer = runner.tokenizer
        self.end = self.tokenizer.token_to_id("<|im_end|>")
        request = SamplingParams(**{"eos_token_ids": [self.end], "max_tokens": 100, **sampling})
        self.driver.add(0, self.tokenizer.encode(prompt).ids, request)
        self.driver.generate(num_tokens, chunk, self._is_over)
        self.output = self.driver.output(0)
        self.errors = list(self.driver.outputs[-1].failed_rows.values())
        self.driver.remove(0)
        self.driver.run({})

    def _is_over(self, row: int) -> bool:
        return bool(self.driver.outputs and self.driver.outputs[-1].failed_rows)

    @property
    def text(self) -> str:
        return self.tokenizer.decode(self.output, skip_special_tokens=False)


def test_an_answer_is_followed_by_an_end_again_and_again(runner: ScriptedRunner) -> None:
    assert Asked(runner, "digits", 14).text == "12345<|im_end|>12345<|im_end|>12"
    assert Asked(runner, "digits", 12, eos_token_ids=[]).text == "123451234512"


def test_special_tokens_in_an_answer_are_those_tokens(runner: ScriptedRunner) -> None:
    asked = Asked(runner, "call f", 16)
    assert asked.text == '<tool_call>{"name": "f"}</tool_call><|im_end|>'[: len(asked.text)]
    ids = [asked.tokenizer.token_to_id(token) for token in ("<tool_call>", "</tool_call>", "<|im_end|>")]
    assert [token for token in asked.output if token in ids] == ids


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, "12345<|im_end|>1"), (5, "12345<|im_end|>1"), (6, "1234512345<|im_end|>"), (10, "1234512345<|im_end|>")],
)
def test_min_tokens_hold_the_end_back_to_the_end_of_an_answer(runner: ScriptedRunner, min_tokens: int, text: str) -> None:
    assert Asked(runner, "digits", 11, min_tokens=min_tokens).text.startswith(text)


def test_min_tokens_hold_back_stop_tokens_too(runner: ScriptedRunner) -> None:
    stop = runner.tokenizer.encode("3").ids
    assert Asked(runner, "digits", 5, min_tokens=5, stop_token_ids=stop).text == "12451"


def test_an_empty_answer_is_an_end(runner: ScriptedRunner) -> None:
    assert Asked(runner, "nothing", 2).text == "<|im_end|><|im_end|>"
    assert Asked(runner, "nothing", 2, min_tokens=1).errors == [
        "Invalid request: the script's answer is empty, and the request may not end with it"
    ]


def test_an_output_depends_on_neither_seed_nor_chunks_nor_batch_nor_preemption(runner: ScriptedRunner) -> None:
    prompt = "say hello to all of them"
    calm = Asked(runner, prompt, 20).output
    assert Asked(runner, prompt, 20, chunk=3, seed=5, temperature=2.0, logprobs=3).output == calm
    driver, sampling = Driver(runner), SamplingParams(eos_token_ids=[runner.tokenizer.token_to_id("<|im_end|>")])
    tokens = runner.tokenizer.encode(prompt).ids
    driver.add(0, tokens, sampling)
    driver.add(1, runner.tokenizer.encode("digits").ids, sampling)
    driver.generate(7)
    again = driver.tokens[0]
    driver.remove(0)
    driver.add(2, again, sampling, prompt_len=len(tokens), computed=16)
    assert driver.generate(20)[2] == calm
    assert runner.tokenizer.decode(driver.output(1)).startswith("12345")
    driver.freed += [1, 2]
    driver.tokens.clear()
    driver.run({})


def test_a_prompt_without_a_rule_fails_alone(runner: ScriptedRunner) -> None:
    assert Asked(runner, "what?", 3).errors == ["Invalid request: the script has no rule for an input that ends in 'what?'"]
    assert not Asked(runner, "digits", 3).errors


def test_logprobs_say_that_the_token_was_as_likely_as_all_others_together(runner: ScriptedRunner) -> None:
    asked = Asked(runner, "digits", 1, logprobs=2)
    (entry,) = asked.driver.outputs[0].logprobs
    first = asked.output[0]
    assert entry.token_ids.tolist() == [first, first, first + 1]
    assert entry.logprobs.tolist() == pytest.approx([-0.6931, -0.6931, -1.3863], abs=1e-4)


def test_an_answer_is_held_against_the_requests_grammar(runner: ScriptedRunner) -> None:
    assert runner.compile_grammar(LLMatcher.grammar_from_regex("[0-9]{5}")).result() == ""
    assert "cannot be held to its grammar" in runner.compile_grammar("start: /(/").result()
    for pattern in ("[0-9]{5}", "[0-9]+"):
        assert Asked(runner, "digits", 6, grammar=LLMatcher.grammar_from_regex(pattern)).text == "12345<|im_end|>"
    assert Asked(runner, "digits", 6, grammar=LLMatcher.grammar_from_regex("[0-9]{3}")).errors == [
        "Invalid request: the script's answer does not match the request's grammar from token 3 on, '45'"
    ]
    assert Asked(runner, "digits", 6, grammar=LLMatcher.grammar_from_regex("[0-9]{7}")).errors == [
        "Invalid request: the script's answer ends before the request's grammar may: '12345'"
    ]


def test_the_fingerprint_is_of_script_and_tokenizer(runner: ScriptedRunner, byte_model: Path, script: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("- answer: a")
    assert make_runner(byte_model, script).capacity() == runner.capacity()
    assert make_runner(byte_model, other).capacity().fingerprint != runner.capacity().fingerprint
    assert runner.capacity().vocab_size == runner.tokenizer.get_vocab_size()


def test_positions_of_an_output() -> None:
    output = ScriptedOutput([1, 2, 3], 9, min_tokens=4)
    assert [output.token(position) for position in range(11)] == [1, 2, 3, 1, 2, 3, 9, 1, 2, 3, 9]
    assert [ScriptedOutput([], 9).token(position) for position in range(2)] == [9, 9]
    assert ScriptedOutput([1, 2], None, 2**31 - 1).token(2**30) == 1


def test_it_does_not_load_torch() -> None:
    program = "import sys, gpu.stand_in.scripted; sys.exit(bool({'torch', 'numba'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
