"""The runner over steps: the same tokens however a request is batched, chunked, cached or preempted; what it reports."""

import numpy as np
import pytest
import torch

from gpu import machine
from gpu.checkpoint.weights import open_checkpoint
from gpu.distributed import TensorParallelGroup
from gpu.errors import UnsupportedConfiguration
from gpu.plan import SamplingParams, SchedulerOutput, decode_output, decode_plan, encode
from gpu.runner.core_lock import Cores
from gpu.runner.runner import ModelRunner, num_compute_threads, num_sure_threads
from tests.gpu.engine_stub import GREEDY, Driver, make_config, make_runner
from tests.gpu.tiny_models import save_model

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, top_k=40, seed=77, max_tokens=1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_model("llama", path)
    return path


@pytest.fixture(scope="module")
def runner(folder):
    return make_runner(make_config(folder))


@pytest.fixture
def driver(runner):
    driver = Driver(runner)
    yield driver
    driver.freed += list(driver.tokens)
    if driver.freed:
        runner.execute(SchedulerOutput(0, driver.freed, [], *([np.zeros(0, np.int32)] * 4), 0))


def prompts(count, seed=5):
    generator = np.random.default_rng(seed)
    return [generator.integers(3, 300, generator.integers(5, 90)).tolist() for _ in range(count)]


@pytest.fixture(scope="module", params=[GREEDY, SAMPLED], ids=["greedy", "sampled"])
def alone(request, runner):
    """(sampling, prompts, their outputs of 24 tokens when each runs alone)."""
    outputs = []
    for prompt in prompts(16):
        driver = Driver(runner)
        driver.add(0, prompt, request.param)
        outputs.append(driver.generate(24)[0])
    return request.param, prompts(16), outputs


def test_same_tokens_in_a_batch(alone, driver):
    sampling, texts, expected = alone
    for row, prompt in enumerate(texts):
        driver.add(row + 7, prompt, sampling)
    assert list(driver.generate(24).values()) == expected


def test_same_tokens_chunked(alone, driver):
    sampling, texts, expected = alone
    for row, prompt in enumerate(texts):
        driver.add(row, prompt, sampling)
    assert list(driver.generate(24, chunk=32).values()) == expected


def test_same_tokens_after_preemption(alone, driver):
    sampling, texts, expected = alone
    for row in range(4):
        driver.add(row, texts[row], sampling)
    driver.generate(10)
    known = [list(driver.tokens[row]) for row in range(4)]
    for row in range(4):
        driver.remove(row)
    for row in range(4):  # others take the rows in between
        driver.add(row, texts[row + 4], sampling)
    driver.generate(3)
    for row in range(4):
        driver.remove(row)
    for row in range(4):
        driver.add(3 - row, known[row], sampling, prompt_len=len(texts[row]))
    outputs = driver.generate(24, chunk=20)
    assert [outputs[3 - row] for row in range(4)] == expected[:4]


def test_same_tokens_with_cached_prefix(alone, driver):
    sampling, texts, expected = alone
    prompt = next(text for text in texts if len(text) > 40)
    driver.add(0, prompt, sampling)
    driver.generate(1)
    driver.add(1, prompt, sampling, computed=32, blocks=driver.blocks[0][:2])
    assert driver.generate(24)[1] == expected[texts.index(prompt)]


def test_plans_and_outputs_cross_the_wire(runner):
    driver, prompt = Driver(runner), prompts(1)[0]
    driver.add(0, prompt, SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1))

    class Wire:
        config, rest = runner.config, runner.rest

        def execute(self, plan):
            return decode_output(encode(runner.execute(decode_plan(encode(plan)))))

    driver.runner = Wire()
    over_wire = driver.generate(5)
    straight = Driver(runner)
    straight.add(0, prompt)
    assert over_wire == straight.generate(5)


def test_prompt_logprobs_in_chunks_equal_transformers(folder, driver):
    from transformers import LlamaForCausalLM

    prompt = prompts(1, seed=9)[0]
    assert len(prompt) >= 40
    driver.add(3, prompt, SamplingParams(temperature=0.0, prompt_logprobs=2))
    driver.generate(2, chunk=16)
    entries = [entry for output in driver.outputs for entry in output.prompt_logprobs]
    assert [entry.position for entry in entries] == list(range(1, len(prompt), 16))
    with torch.inference_mode():
        logprobs = LlamaForCausalLM.from_pretrained(folder)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    ids = np.concatenate([entry.token_ids.reshape(-1, 3) for entry in entries])
    values = np.concatenate([entry.logprobs.reshape(-1, 3) for entry in entries])
    ranks = np.concatenate([entry.ranks for entry in entries])
    assert ids[:, 0].tolist() == prompt[1:]
    np.testing.assert_allclose(values, np.take_along_axis(logprobs.numpy()[:-1], ids.astype(np.int64), 1), atol=1e-4)
    best, order = logprobs[:-1].topk(2)
    assert np.array_equal(ids[:, 1:], order.numpy()) and np.allclose(values[:, 1:], best, atol=1e-4)
    own = torch.from_numpy(values[:, :1])
    assert ((logprobs[:-1] > own + 1e-3).sum(1) < torch.from_numpy(ranks)).all()
    assert ((logprobs[:-1] > own - 1e-3).sum(1) >= torch.from_numpy(ranks) - 1).all()


def test_logprobs_only_for_rows_that_asked(driver):
    first, second = prompts(2)
    driver.add(0, first)
    driver.add(1, second, SamplingParams(temperature=0.0, logprobs=0))
    driver.add(2, second, SamplingParams(temperature=0.0, logprobs=-1))
    output = driver.run({0: len(first), 1: len(second), 2: len(second)})
    one, whole = output.logprobs
    assert (one.row, one.token_ids.tolist(), one.rank) == (1, [output.token_ids[1]], 1)
    assert len(whole.token_ids) == 301 and whole.token_ids[0] == whole.token_ids[1] == output.token_ids[2]
    assert np.exp(whole.logprobs[1:].astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)


def test_a_row_with_nan_fails_alone(runner, driver):
    first, second = prompts(2)
    driver.add(0, first)
    driver.add(1, second)
    driver.run({0: len(first), 1: len(second)})
    clean = Driver(runner)
    clean.free = driver.free
    clean.add(5, second)
    expected = clean.generate(4)[5]
    for key_cache, value_cache in runner.kv.layers:
        key_cache[driver.blocks[0][0]] = torch.nan
        value_cache[driver.blocks[0][0]] = torch.nan
    output = driver.run({0: 1, 1: 1})
    assert output.failed_rows == {0: "the model's logits are not finite"}
    assert output.rows.tolist() == [1]
    reused = Driver(runner)  # a block with leftover NaN, taken by another request, does no harm
    reused.free = [*range(300, 320), driver.blocks[0][0]]
    reused.add(9, second)
    assert reused.generate(4)[9] == expected


def test_a_row_that_cannot_be_sampled_fails_alone(driver):
    prompt = prompts(1)[0]
    driver.add(0, prompt, SamplingParams(temperature=0.0, allowed_token_ids=[7], bad_words_token_ids=[[7]], logit_bias={7: 1.0}))
    driver.add(1, prompt, SamplingParams(temperature=0.0, logit_bias={300: 1.0}))
    driver.add(2, [1, 2, 300])
    driver.add(3, prompt)
    output = driver.run({0: len(prompt), 1: len(prompt), 2: 3, 3: len(prompt)})
    assert sorted(output.failed_rows) == [0, 1, 2]
    assert "leave no token" in output.failed_rows[0] and "sampling parameters name" in output.failed_rows[1]
    assert "of the prompt is outside the vocabulary of 300" in output.failed_rows[2]
    assert output.rows.tolist() == [3]


def test_a_step_planned_before_a_failure_was_known_is_harmless(driver):
    first, second = prompts(2)
    driver.add(0, first, SamplingParams(temperature=0.0, allowed_token_ids=[7], bad_words_token_ids=[[7]]))
    driver.add(1, second)
    driver.run({0: len(first), 1: len(second)})
    output = driver.run({0: 1, 1: 1})
    assert output.rows.tolist() == [1]
    assert "leave no token" in output.failed_rows[0]


def test_a_row_that_fails_after_some_tokens_is_accounted_for_in_the_step_planned_ahead(driver):
    """Each scheduled row that would sample is either sampled or failed, in every step until the row is freed."""
    text = prompts(1)[0]
    driver.add(0, text, SamplingParams(temperature=0.0, allowed_token_ids=[7], bad_words_token_ids=[[7, 7, 7]]))
    driver.add(1, text)
    outputs = [driver.run({0: len(text), 1: len(text)}), driver.run({0: 1, 1: 1})]
    for output in outputs:
        assert (output.rows.tolist(), output.failed_rows) == ([0, 1], {})
    for _ in range(2):
        output = driver.run({0: 1, 1: 1})
        assert output.rows.tolist() == [1]
        assert list(output.failed_rows) == [0]
    driver.remove(0)
    driver.add(0, text)
    output = driver.run({0: len(text), 1: 1})
    assert (sorted(output.rows.tolist()), output.failed_rows) == ([0, 1], {})


@pytest.mark.parametrize(
    "extreme",
    [{"top_k": 2**40}, {"min_tokens": 2**70, "eos_token_ids": [2]}, {"logprobs": -7}, {"logit_bias": {2**70: 1.0}}],
    ids=str,
)
def test_parameters_beyond_the_columns_fail_one_row(driver, extreme):
    text = prompts(1)[0]
    driver.add(0, text, SamplingParams(**extreme))
    driver.add(1, text, SamplingParams(temperature=0.7, logit_bias={5: 1.0}))
    output = driver.run({0: len(text), 1: len(text)})
    assert output.rows.tolist()[-1] == 1
    driver.remove(0)
    assert driver.run({1: 1}).rows.tolist() == [1]


def test_an_empty_step_only_applies_differences(runner):
    output = runner.execute(SchedulerOutput(8, [], [], *([np.zeros(0, np.int32)] * 4), 0))
    assert (output.step, len(output.rows), output.failed_rows) == (8, 0, {})


def test_capacity(folder):
    config = make_config(folder, budget=100)
    runner = ModelRunner(config, open_checkpoint(str(folder)), torch.device("cpu"), TensorParallelGroup())
    runner.load(lambda fraction: None)
    capacity = runner.capacity()
    assert (capacity.max_model_len, capacity.vocab_size) == (512, 300)
    assert (capacity.dtype, capacity.device) == ("float32", "cpu")
    assert capacity.block_bytes == 2 * 3 * 16 * 2 * 8 * 4  # keys and values, layers, tokens, heads, dimensions, bytes
    assert 100 << 20 < capacity.available_kv_bytes <= 4 << 30
    config.cache.kv_cache_memory_bytes = 12345
    assert runner.capacity().available_kv_bytes == 12345
    config.cache.kv_cache_memory_bytes = machine.total_memory() + 1
    with pytest.raises(UnsupportedConfiguration, match="is more than this machine has"):
        runner.capacity()
    config.cache.kv_cache_memory_bytes = None
    other = make_runner(make_config(folder, dtype="bfloat16"))
    assert other.capacity().block_bytes == capacity.block_bytes // 2
    assert other.capacity().fingerprint != capacity.fingerprint == runner.capacity().fingerprint


def test_replicas_divide_the_memory_for_kv(folder, monkeypatch):
    config = make_config(folder)
    runner = make_runner(config)
    for available, together in ((1 << 40, 4 << 30), (2 << 30, int(0.92 * (2 << 30)))):
        monkeypatch.setattr("gpu.runner.profile.available_memory", lambda available=available: available)
        for replicas in (1, 2, 3):
            config.parallel.data_parallel_size = replicas
            share = replicas * runner.capacity().available_kv_bytes
            assert together - (64 << 20) < share <= together  # less what a step needs


@pytest.mark.parametrize(
    ("cores", "replicas", "ranks", "threads"),
    [
        (1, 0, 1, 1),
        (2, 0, 1, 2),
        (2, 0, 2, 1),
        (8, 0, 1, 7),
        (8, 1, 3, 2),
        (4, 0, 8, 1),
        (2, 2, 1, 2),
        (8, 4, 1, 2),
        (5, 2, 1, 2),
        (4, 8, 1, 1),
    ],
)
def test_default_threads_are_a_part_of_the_cores(monkeypatch, cores, replicas, ranks, threads):
    config = make_config("")
    config.parallel.num_threads = 0
    config.parallel.data_parallel_size, config.parallel.tensor_parallel_size = replicas, ranks
    monkeypatch.setattr("gpu.machine.available_cores", lambda: cores)
    assert num_compute_threads(config) == threads


@pytest.mark.parametrize(("cores", "replicas", "sure"), [(2, 1, 2), (2, 2, 1), (16, 2, 8), (8, 1, 7), (4, 8, 1)])
def test_an_engine_is_sure_of_the_cores_that_no_other_one_needs(monkeypatch, cores, replicas, sure):
    config = make_config("")
    config.parallel.num_threads, config.parallel.data_parallel_size = 0, replicas
    monkeypatch.setattr("gpu.machine.available_cores", lambda: cores)
    assert num_sure_threads(config) == sure


def test_a_step_tells_with_how_many_threads_it_was_computed(folder, tmp_path, monkeypatch):
    locks = tmp_path / "locks"
    locks.touch()
    config = make_config(folder)
    config.parallel.num_threads = 2
    runner = make_runner(config)
    runner.cores, other = Cores(2, locks), Cores(2, locks)
    driver = Driver(runner)
    driver.add(0, list(range(3, 60)), GREEDY)
    driver.generate(2)
    with other.claim(1):
        driver.generate(3)
    assert {output.num_threads for output in driver.outputs[:2]} == {2} and driver.outputs[-1].num_threads == 1
