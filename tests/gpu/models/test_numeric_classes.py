"""SmolLM2 in 16, 8 and 4 bits on the CPU: near transformers on the same rounded weights, near float32 in perplexity, and the same
bits of a row alone, in a batch and in chunks."""

import os
import pydoc_data.topics

import numpy as np
import pytest
import torch

from gpu.plan import SamplingParams
from tests.gpu.engine_stub import Driver, make_config, make_runner

WINDOW = 400  # tokens of a text scored together
SCORED = SamplingParams(temperature=0.0, max_tokens=1000, logprobs=0, prompt_logprobs=0)
INT8 = {"dtype": "float16", "quantization": "int8"}
GGUF = {"dtype": "float16", "quantization": "gguf"}
FLOAT16 = {"dtype": "float16"}
BFLOAT16 = {"dtype": "bfloat16"}


@pytest.fixture(scope="module")
def text(smollm2_hf):
    """Token ids of the Python reference as it comes with the interpreter."""
    from transformers import AutoTokenizer

    topics = pydoc_data.topics.topics
    return AutoTokenizer.from_pretrained(smollm2_hf)("\n".join(topics[name] for name in sorted(topics)))["input_ids"]


def score(runner, windows):
    """The logprobs of all tokens of each window but its first, one after the other."""
    driver = Driver(runner)
    for window in windows:
        driver.add(0, window, SCORED)
        driver.run({0: len(window)})
        driver.free += driver.blocks[0]
        driver.remove(0)
    return np.concatenate([entry.logprobs for output in driver.outputs for entry in output.prompt_logprobs])


def make_class(model, kv_cache_dtype="auto", **numerics):
    config = make_config(model, **numerics)
    config.cache.kv_cache_dtype = kv_cache_dtype
    return make_runner(config)


@pytest.fixture(scope="module")
def runner_of(smollm2_gguf):
    """The runner of a class, loaded once for all tests."""
    runners = {}

    def of(numerics):
        name = tuple(numerics.values())
        if name not in runners:
            runners[name] = make_class(smollm2_gguf, **numerics)
        return runners[name]

    return of


def windows_of(text, num_tokens):
    return [text[i : i + WINDOW] for i in range(0, num_tokens, WINDOW)]


def perplexity(logprobs):
    return float(np.exp(-logprobs.astype(np.float64).mean()))


@pytest.fixture(scope="module")
def windows(text):
    return windows_of(text, 1200)


@pytest.fixture(scope="module")
def float32(smollm2_gguf, windows):
    return score(make_class(smollm2_gguf, dtype="float32"), windows)


def test_float16_equals_transformers_on_the_rounded_weights(smollm2_gguf, smollm2_hf, windows):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(smollm2_hf, dtype=torch.float32)
    for parameter in theirs.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.half().float()
    some = windows[:2]
    with torch.inference_mode():
        expected = [
            theirs(torch.tensor([window])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(window)[1:, None])[:, 0]
            for window in some
        ]
    ours = score(make_class(smollm2_gguf, "float32", **FLOAT16), some)
    np.testing.assert_allclose(ours, torch.cat(expected).numpy(), atol=1e-3)


@pytest.mark.parametrize(("numerics", "loss"), [(FLOAT16, 1e-3), (BFLOAT16, 2e-3)], ids=["float16", "bfloat16"])
def test_perplexity_of_16_bits(smollm2_gguf, runner_of, windows, float32, numerics, loss):
    wide = score(make_class(smollm2_gguf, "float32", **numerics), windows)
    assert perplexity(wide) == pytest.approx(perplexity(float32), rel=loss)
    assert perplexity(score(runner_of(numerics), windows)) == pytest.approx(perplexity(wide), rel=1e-3)


@pytest.mark.parametrize("numerics", [INT8, GGUF], ids=["int8", "gguf"])
def test_perplexity_of_small_integers(runner_of, windows, float32, numerics):
    logprobs = score(runner_of(numerics), windows)
    assert perplexity(logprobs) < 1.01 * perplexity(float32)


@pytest.mark.parametrize("numerics", [FLOAT16, BFLOAT16, INT8, GGUF], ids=["float16", "bfloat16", "int8", "gguf"])
def test_compiled_layers_compute_the_same_bits(runner_of, windows, numerics, monkeypatch):
    runner = runner_of(numerics)
    compiled = score(runner, windows[:1])
    assert runner.model.compiled is not None
    monkeypatch.setattr(runner.model, "compiled", None)
    assert score(runner, windows[:1]).tobytes() == compiled.tobytes()


@pytest.mark.parametrize("numerics", [FLOAT16, BFLOAT16, INT8, GGUF], ids=["float16", "bfloat16", "int8", "gguf"])
def test_threads_that_share_a_step_compute_the_same_bits(smollm2_gguf, runner_of, text, monkeypatch, numerics):
    """Prompts and decodes of one and of five requests, products and attention shared by three threads."""
    monkeypatch.setattr("gpu.runner.core_lock.FIRST_BYTE", os.getpid() << 32)  # cores that no engine of this machine uses
    monkeypatch.setattr("gpu.runner.step_parts.FEWEST_TOKENS", 10_000)
    config = make_config(smollm2_gguf, **numerics)
    config.parallel.num_threads = 3
    together = make_runner(config)

    def logprobs(runner, rows):
        driver = Driver(runner)
        for row in range(rows):
            driver.add(row, text[50 * row : 50 * row + 20 + 5 * row], SCORED)
        driver.generate(4)
        entries = [entry for output in driver.outputs for entry in (*output.prompt_logprobs, *output.logprobs)]
        return b"".join(entry.logprobs.tobytes() for entry in entries)

    for rows in (1, 5):
        assert logprobs(together, rows) == logprobs(runner_of(numerics), rows)


@pytest.mark.parametrize("numerics", [FLOAT16, BFLOAT16, INT8, GGUF], ids=["float16", "bfloat16", "int8", "gguf"])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_chunks(runner_of, text, numerics):
    runner = runner_of(numerics)
    prompts = [text[100 * i : 100 * i + 20 + 5 * i] for i in range(16)]

    def logprobs(rows, chunk):
        driver = Driver(runner)
        for row in rows:
            driver.add(row, prompts[row], SCORED)
        driver.generate(5, chunk=chunk)
        prompt, sampled = {row: [] for row in rows}, {row: [] for row in rows}
        for output in driver.outputs:
            for entry in output.prompt_logprobs:
                prompt[entry.row].append(entry.logprobs)
            for entry in output.logprobs:
                sampled[entry.row].append(entry.logprobs)
        return {row: np.concatenate(prompt[row] + sampled[row]).tobytes() for row in rows}

    together = logprobs(range(16), 10_000)
    assert logprobs(range(16), 16) == together
    for row in (0, 3, 15):
        assert logprobs([row], 10_000)[row] == together[row]
