"""Ranks as spawned processes over gloo: the same tokens as one rank, and the same bits on every rank."""

from __future__ import annotations

import multiprocessing
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu.distributed import TensorParallelGroup, init_group
from gpu.plan import SamplingParams
from gpu.worker import leave_group
from tests.gpu.engine_stub import GREEDY, Driver, make_config, make_runner
from tests.gpu.tiny_models import save_model

SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=1000)
FULL = SamplingParams(temperature=0.0, logprobs=-1, prompt_logprobs=0, max_tokens=1000)


Case = tuple[str, list[list[int]], int]  # model directory, prompts, output tokens each
Result = tuple[list[list[int]], bytes, int]  # output tokens by row, the bits of all logprobs reported, weight bytes


def run_case(folder: str, prompts: list[list[int]], num_tokens: int, group: TensorParallelGroup) -> Result:
    runner = make_runner(make_config(folder), group, num_blocks=200)
    driver = Driver(runner, num_blocks=200)
    for row, prompt in enumerate(prompts):
        driver.add(row, prompt, (GREEDY, SEEDED, FULL)[row % 3])
    outputs = driver.generate(num_tokens, chunk=32)
    bits = [entry.logprobs.tobytes() for output in driver.outputs for entry in (*output.logprobs, *output.prompt_logprobs)]
    return [outputs[row] for row in range(len(prompts))], b"".join(bits), runner.model.weight_bytes


def run_rank(rank: int, size: int, store: str, answers: Connection, cases: list[Case]) -> None:
    try:
        group = init_group(rank, size, f"file://{store}", torch.device("cpu"))
        answers.send([run_case(*case, group) for case in cases])
        leave_group()
    except BaseException:
        answers.send(traceback.format_exc())


def run_ranks(size: int, tmp_path: Path, cases: list[Case]) -> list[list[Result]]:
    """Results by rank, then by case. The processes serve all cases, because starting them takes most of the time."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=run_rank, args=(rank, size, str(tmp_path / f"store-{size}"), sender, cases))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        answers = [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.join(20)
            if process.exitcode is None:
                process.kill()
                process.join()
    for answer in answers:
        assert not isinstance(answer, str), answer
    return answers


def test_two_ranks_equal_one(tmp_path):
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, 300, length).tolist() for length in (70, 9, 40)]
    cases: list[Case] = [(str(tmp_path / name), prompts, 12) for name in ("llama-tied-bias", "qwen3")]
    for folder, _, _ in cases:
        save_model(Path(folder).name, Path(folder))
    ranks = run_ranks(2, tmp_path, cases)
    for case, first, second in zip(cases, *ranks, strict=True):
        tokens, bits, weight_bytes = run_case(*case, TensorParallelGroup())
        assert first[0] == second[0] == tokens
        assert first[1] == second[1], "every rank has the same logits, bit for bit"
        np.testing.assert_allclose(np.frombuffer(first[1], np.float32), np.frombuffer(bits, np.float32), atol=1e-4)
        assert weight_bytes / 2 < first[2] < 0.6 * weight_bytes, "norms are on both ranks, everything else on one"


def test_three_ranks_of_smollm2_whose_vocabulary_and_heads_they_share(tmp_path, smollm2_hf):
    from transformers import AutoTokenizer

    texts = ["The capital of France is", "def fibonacci(n):", "Once upon a time, in a village by the sea,"]
    case: Case = (str(smollm2_hf), AutoTokenizer.from_pretrained(smollm2_hf)(texts)["input_ids"], 4)
    tokens, _, _ = run_case(*case, TensorParallelGroup())
    ranks = run_ranks(3, tmp_path, [case])
    assert [result[0] for (result,) in ranks] == [tokens] * 3
    assert ranks[0][0][1] == ranks[1][0][1] == ranks[2][0][1]


def test_shards_cover_everything_once_also_where_they_are_uneven():
    for total, size in [(49152, 3), (10, 4), (7, 8), (5, 1)]:
        shards = [TensorParallelGroup(rank, size).shard(total) for rank in range(size)]
        assert [i for shard in shards for i in range(total)[shard]] == list(range(total))


def test_a_rank_outside_its_group_is_refused():
    with pytest.raises(ValueError, match="rank 2 of 2"):
        TensorParallelGroup(2, 2)


def test_the_backend_is_the_devices_own(monkeypatch):
    backends: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a machine with GPUs may still serve from its CPU
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **how: backends.append(backend))
    for device in (torch.device("cpu"), torch.device("cuda", 1)):
        init_group(1, 2, "file:///nowhere", device)
    assert backends == ["gloo", "nccl"]
