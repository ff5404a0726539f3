"""Log probabilities and ranks by a worked example."""

import torch

from kernels.logprobs import gather_logprobs


def test_gather_logprobs_worked_example():
    logits = torch.log(torch.tensor([[0.5, 0.125, 0.25, 0.125]])) + 3
    logprobs, ranks = gather_logprobs(logits, torch.tensor([[3, 0]]))
    torch.testing.assert_close(logprobs, torch.log(torch.tensor([[0.125, 0.5]])))
    assert ranks.tolist() == [3]
