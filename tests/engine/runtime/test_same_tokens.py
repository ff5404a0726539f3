"""A request's tokens do not depend on what runs beside it, how its prompt is cut, or where it runs: greedy, with a seed, and held
to a grammar.

"The same" allows a difference only where the calm run itself was undecided: its two best candidates closer than 1e-3.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from engine.llm import LLM, Completion
from gpu.plan import SamplingParams

PROMPTS = [
    "The headrace leads the water onto the wheel, and",
    "In 1969, the first people on the moon",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Frankreich ist",
    "The quick brown fox jumps over the lazy dog. " * 6 + "Then",
    "Q: What is the boiling point of water?\nA:",
    "Once upon a time, in a village by the sea,",
    "人工知能の歴史は",
    "List three uses of a brick:\n1.",
    "SELECT name, COUNT(*) FROM users",
    "To be, or not to be, that is",
    "The three laws of thermodynamics say",
    "import numpy as np\n\n",
    "My favourite recipe begins with",
    "Dear Sir or Madam,\n\nI am writing to",
    "The population of Iceland is",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=1234, max_tokens=12, ignore_eos=True)
HELD = SamplingParams(temperature=0.9, seed=77, max_tokens=12, grammar=LLMatcher.grammar_from_regex("([a-z]{1,5} ){80}"))
KINDS = {"greedy": (PROMPTS, GREEDY), "sampled": (PROMPTS, SAMPLED), "held to a grammar": (PROMPTS[:4], HELD)}
# as the file is quantized, which is the default on a CPU; tests/gpu/models/test_fidelity.py does the like in float32
COMMON: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_model_len": 512, "num_gpu_blocks_override": 400}
FLOAT32: dict[str, Any] = {**COMMON, "dtype": "float32"}  # ranks add up in another order, which rounding to 8 bits would magnify


@pytest.fixture(scope="module")
def calm(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_gguf), **COMMON) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(calm: LLM) -> dict[str, list[Completion]]:
    """Every prompt by itself, with an empty cache."""
    runs: dict[str, list[Completion]] = {name: [] for name in KINDS}
    for name, (prompts, sampling) in KINDS.items():
        for prompt in prompts:
            assert calm.core.scheduler.reset_prefix_cache()
            runs[name] += calm.generate(prompt, sampling)
    return runs


def undecided(calm_run: Completion, position: int) -> bool:
    """The best two candidates of the calm greedy run were closer than 1e-3 there."""
    entry = calm_run.choices[0].logprobs[position]
    chosen, top = entry.logprobs[0], entry.logprobs[1:]
    others = top[entry.token_ids[1:] != entry.token_ids[0]]
    return bool(len(others) and abs(float(chosen - others.max())) < 1e-3)


def assert_same(runs: list[Completion], calm_runs: list[Completion], greedy: bool) -> None:
    for run, expected in zip(runs, calm_runs, strict=True):
        got, want = np.array(run.choices[0].token_ids), np.array(expected.choices[0].token_ids)
        differing = np.flatnonzero(got != want)
        if len(differing) and not (greedy and undecided(expected, int(differing[0]))):
            pytest.fail(f"token {differing[0]} differs: {got.tolist()} instead of {want.tolist()}")
        assert run.choices[0].finish_reason == "length" and len(got) == 12


def run_all(llm: LLM) -> dict[str, list[Completion]]:
    return {name: llm.generate(prompts, sampling) for name, (prompts, sampling) in KINDS.items()}


def compare(runs: dict[str, list[Completion]], alone: dict[str, list[Completion]]) -> None:
    for name in KINDS:
        assert_same(runs[name], alone[name], name == "greedy")


def test_tokens_are_the_same_in_a_batch_of_16_and_with_a_warm_prefix_cache(calm: LLM, alone: dict[str, list[Completion]]) -> None:
    assert calm.core.scheduler.reset_prefix_cache()
    compare(run_all(calm), alone)
    before = calm.core.stats().prefix_cache_hits
    compare(run_all(calm), alone)
    assert calm.core.stats().prefix_cache_hits > before


def test_tokens_are_the_same_in_chunks_of_32(smollm2_gguf: Path, alone: dict[str, list[Completion]]) -> None:
    with LLM(str(smollm2_gguf), **COMMON, max_num_batched_tokens=32) as llm:
        compare(run_all(llm), alone)
        assert llm.core.stats().scheduled_tokens / llm.core.stats().steps <= 32


def test_tokens_are_the_same_after_preemption(smollm2_gguf: Path, alone: dict[str, list[Completion]]) -> None:
    tight = {**COMMON, "num_gpu_blocks_override": 13, "max_model_len": 128}
    with LLM(str(smollm2_gguf), **tight) as llm:
        compare(run_all(llm), alone)
        assert llm.core.stats().preemptions > 0


def test_tokens_are_the_same_from_a_worker_process(smollm2_gguf: Path, alone: dict[str, list[Completion]]) -> None:
    with LLM(str(smollm2_gguf), **COMMON, distributed_executor_backend="mp") as llm:
        compare(run_all(llm), alone)


@pytest.mark.soak
def test_tokens_are_the_same_on_three_ranks(smollm2_gguf: Path) -> None:
    """With fewer cores than ranks, they wait for each other in every layer. The suite compares two ranks of a small model here, and
    three ranks of this one below the engine (tests/gpu/models/test_tensor_parallel.py)."""
    with LLM(str(smollm2_gguf), **FLOAT32) as llm:
        calm_run = run_all(llm)
    with LLM(str(smollm2_gguf), **FLOAT32, tensor_parallel_size=3) as llm:
        compare(run_all(llm), calm_run)


def test_tokens_of_a_small_llama_are_the_same_on_two_ranks(tiny_llama: Path) -> None:
    one, two = ([], [])
    for size, into in ((1, one), (2, two)):
        with LLM(str(tiny_llama), **FLOAT32, tensor_parallel_size=size) as llm:
            for prompt in PROMPTS[:4]:
                into += llm.generate(prompt, GREEDY)
            into += llm.generate(PROMPTS[:4], SAMPLED)
            into += llm.generate(PROMPTS[:4], HELD)
    assert_same(two[:4], one[:4], greedy=True)
    assert_same(two[4:], one[4:], greedy=False)
