"""Log probabilities and ranks of chosen tokens."""

import torch

from kernels import reference
from kernels.triton import logprobs
from kernels.triton.logprobs import gather_logprobs


def test_gather_logprobs_equals_reference(device, monkeypatch):
    monkeypatch.setattr(logprobs, "BLOCK", 256)
    monkeypatch.setattr(logprobs, "MAX_WIDTH", 16)
    logits = torch.randn(5, 1003, device=device) * 4
    logits[1, 40:] = -torch.inf
    logits[2] = 0.5
    for num_chosen in (1, 21):
        token_ids = torch.randint(0, 40, (5, num_chosen), device=device)
        token_ids[0, 0] = logits[0].argmax()
        found, ranks = gather_logprobs(logits, token_ids)
        expected, expected_ranks = reference.gather_logprobs(logits, token_ids)
        torch.testing.assert_close(found, expected, atol=4e-6, rtol=1e-6)
        assert torch.equal(ranks, expected_ranks)
        assert ranks[0] == 1 and ranks[2] == 1 and ranks[3:].max() > 1
