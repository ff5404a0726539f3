"""Steps in parts: cut where tokens balance, the same tokens and bits as in one piece, and no part left waiting by a failure."""

import os

import numpy as np
import pytest
import torch

from gpu.plan import SamplingParams
from gpu.runner.step_parts import Team, split
from tests.gpu.engine_stub import Driver, make_config, make_runner
from tests.gpu.tiny_models import save_model


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr("gpu.runner.core_lock.FIRST_BYTE", os.getpid() << 32)  # cores that no engine of this machine uses
    monkeypatch.setattr("gpu.runner.step_parts.FEWEST_TOKENS", 1)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("num_engines", [1, 2])
def test_few_tokens_stay_together(folder, monkeypatch, num_engines):
    monkeypatch.setattr(
        "gpu.runner.step_parts.FEWEST_TOKENS" if num_engines == 1 else "gpu.runner.step_parts.FEWEST_TOKENS_BESIDE_OTHERS", 8
    )
    runner = make_threaded(folder, 3, dtype="float16")
    runner.config.parallel.data_parallel_size = num_engines
    driver = Driver(runner)
    driver.add(0, [5] * 60)
    sizes = []
    work = driver.runner.team.map
    driver.runner.team.map = lambda compute, parts, threads: sizes.append((len(parts), threads)) or work(compute, parts, threads)
    for count in (15, 16, 24, 1):
        driver.run({0: count})
    assert sizes == [(1, 3), (1, 3), (3, 3), (1, 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_model("llama", path)
    return path


def make_threaded(folder, num_threads, **more):
    config = make_config(folder, **more)
    config.parallel.num_threads = num_threads
    return make_runner(config)


def run(runner):
    """Tokens and the bits of all logprobs of five requests."""
    driver = Driver(runner)
    generator = np.random.default_rng(3)
    prompts = [generator.integers(3, 300, generator.integers(20, 70)).tolist() for _ in range(5)]
    for row, prompt in enumerate(prompts):
        driver.add(
            row, prompt, SamplingParams(temperature=0.8 * (row % 2), seed=row, max_tokens=1000, logprobs=1, prompt_logprobs=0)
        )
    driver.generate(8, chunk=24)
    bits = [entry.logprobs.tobytes() for output in driver.outputs for entry in (*output.prompt_logprobs, *output.logprobs)]
    return driver.tokens, b"".join(bits)


@pytest.mark.parametrize("fewest", [1, 1000], ids=["in parts", "in one piece"])
@pytest.mark.parametrize("numerics", [{"dtype": "float16"}, {"dtype": "float16", "quantization": "int8"}])
def test_the_same_bits_by_any_number_of_threads(folder, monkeypatch, numerics, fewest):
    monkeypatch.setattr("gpu.runner.step_parts.FEWEST_TOKENS", fewest)
    expected = run(make_threaded(folder, 1, **numerics))
    for num_threads in (2, 3):
        assert run(make_threaded(folder, num_threads, **numerics)) == expected


def test_a_request_may_read_what_one_before_it_writes_in_the_same_step(folder):
    prompt = np.random.default_rng(1).integers(3, 300, 64).tolist()
    outputs = []
    for num_threads in (1, 2, 3):
        driver = Driver(make_threaded(folder, num_threads, dtype="float16"))
        driver.add(0, prompt)
        driver.blocks[0] = [driver.free.pop() for _ in range(4)]
        for row in (1, 2):  # their first 48 tokens stand in blocks that row 0 fills in this very step
            driver.add(row, prompt, computed=48, blocks=driver.blocks[0][:3])
        driver.run({0: 64, 1: 16, 2: 16})
        driver.generate(6)
        outputs.append(driver.tokens)
        assert driver.tokens[0] == driver.tokens[1] == driver.tokens[2]
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_step_is_cut_into_as_many_parts_as_are_asked_for(folder, monkeypatch):
    """How many pay is for `count_parts` to say, once."""
    driver = Driver(make_threaded(folder, 2, dtype="float16"))
    driver.add(0, [5] * 20)
    seen = []
    monkeypatch.setattr("gpu.runner.runner.split", lambda step, *more: seen.append(step) or split(step, *more))
    driver.run({0: 12})
    monkeypatch.setattr("gpu.runner.step_parts.FEWEST_TOKENS", 1000)
    assert [part.tokens for part in split(seen[0], 3, False)] == [slice(0, 4), slice(4, 8), slice(8, 12)]


def test_parts_cover_the_step_and_balance(folder):
    runner = make_threaded(folder, 2, dtype="float16")
    seen = []

    def spy(step, num_parts, shares_kv):
        parts = split(step, num_parts, shares_kv)
        seen.append(
            ([part.tokens for part in parts], [len(part.last_tokens) for part in parts], parts[0].attention.pace is not None)
        )
        return parts

    driver = Driver(runner)
    for row in range(4):
        driver.add(row, [5] * 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu.runner.runner.split", spy)
        driver.run({0: 20, 1: 20, 2: 20, 3: 10})
        driver.run({0: 1, 1: 1, 2: 1, 3: 10})
        driver.run({row: 1 for row in range(4)})
        driver.run({2: 1})
    assert seen == [
        ([slice(0, 35), slice(35, 70)], [1, 2], True),  # request 1 is cut in two: its second part waits for its first
        ([slice(0, 6), slice(6, 13)], [3, 1], True),
        ([slice(0, 2), slice(2, 4)], [2, 2], False),
        ([slice(0, 1)], [1], False),
    ]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failing_part_releases_the_others(folder, failing):
    driver = Driver(make_threaded(folder, 3, dtype="float16"))
    driver.add(0, [5] * 40)
    forward = driver.runner.model.forward

    def fail(token_ids, positions, kv, step):
        if positions[0] >= 13 * failing and positions[0] < 13 * (failing + 1):
            raise RuntimeError("this part fails")
        return forward(token_ids, positions, kv, step)

    driver.runner.model.forward = fail
    with pytest.raises(RuntimeError, match="this part fails"):
        driver.run({0: 39})


def test_a_team_of_one_has_no_threads():
    assert Team(1).map(lambda part: torch.ones(1), [type("P", (), {"attention": None})()], 1)[0] == 1
