"""A batch of rows with all kinds of sampling parameters through the Triton kernels draws what it draws through the CPU's."""

import numpy as np
import torch

from gpu.plan import NewRequest, SamplingParams, SchedulerOutput
from gpu.runner.input_batch import Batch
from gpu.runner.sampler import Sampler
from kernels import device as kernel_device
from kernels.triton import gumbel, logprobs, min_p, penalties, top_k_top_p

VOCAB = 203
PROMPT = [1, 2, 3, 2]
ROWS = [
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(seed=5),
    SamplingParams(temperature=0.7, top_p=0.8, seed=6, logprobs=0, repetition_penalty=1.3),
    SamplingParams(top_k=7, min_p=0.05, seed=2**63 + 9, presence_penalty=0.5, frequency_penalty=0.25),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.9, seed=-1, logit_bias={4: 3.0, 9: -100.0}, logprobs=5),
    SamplingParams(seed=7, bad_words_token_ids=[[2]], logit_bias={0: 2.5}, allowed_token_ids=[0, 2, 5, 80]),
]


def sample(logits, output):
    batch = Batch(8, 64, 16, VOCAB, torch.device("cpu"))
    none = np.zeros(0, np.int32)
    new = [
        NewRequest(row, np.array(PROMPT + output, np.int32), len(PROMPT), 0, none, sampling, sampling.seed)
        for row, sampling in enumerate(ROWS)
    ]
    batch.apply(SchedulerOutput(0, [], new, none, none, none, none, 0))
    return Sampler("raw_logprobs")(logits.clone(), np.arange(len(ROWS), dtype=np.int32), batch.sampling, batch.histories)


def test_draws_are_those_of_the_cpu_kernels(device, monkeypatch):
    for operation in (gumbel, logprobs, min_p, penalties, top_k_top_p):
        monkeypatch.setattr(operation, "BLOCK", 256)
    logits = torch.randn(len(ROWS), VOCAB) * 3
    output = [7, 7, 50]
    expected = sample(logits, output)
    asked = []
    monkeypatch.setattr(kernel_device, "on_accelerator", lambda x: asked.append(x) or True)
    sampled = sample(logits.to(device), output)
    assert asked and not sampled.failed
    assert np.array_equal(sampled.token_ids, expected.token_ids)
    for found, wanted in zip(sampled.logprobs, expected.logprobs, strict=True):
        assert found.row == wanted.row and found.rank == wanted.rank and np.array_equal(found.token_ids, wanted.token_ids)
        np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=2e-6, rtol=1e-6)
