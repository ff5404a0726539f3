"""Mixture of experts: the sort by expert, and the whole against its twin, with experts that no token or every token chose."""

import pytest
import torch

from kernels import reference
from kernels.triton import moe
from kernels.triton.moe import Tile, align_pairs, fused_experts

ERROR = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture
def small_tiles(monkeypatch):
    for key in moe.TILES:
        monkeypatch.setitem(moe.TILES, key, Tile(16, 16, 16, 4, 2))
    monkeypatch.setattr(moe, "ALIGN_BLOCK", 32)
    monkeypatch.setattr(moe, "SUM_BLOCK", 32)


@pytest.mark.parametrize("num_experts", [1, 5])
def test_align_pairs(device, small_tiles, num_experts):
    experts = torch.randint(0, num_experts, (29, 3), device=device)
    experts[experts == 3] = 2  # nobody's expert
    pairs, tile_experts = align_pairs(experts, num_experts, 16)
    expected = []
    for expert in range(num_experts):
        mine = (experts.flatten() == expert).nonzero()[:, 0].tolist()
        expected += [(expert, mine[i : i + 16] + [87] * (i + 16 - len(mine))) for i in range(0, len(mine), 16)]
    used = len(expected)
    assert tile_experts.tolist() == [expert for expert, _ in expected] + [-1] * (len(tile_experts) - used)
    assert pairs.view(-1, 16)[:used].tolist() == [mine for _, mine in expected]


def make_case(num_tokens, num_experts, top_k, hidden, intermediate, dtype, device):
    def random(*shape):
        return torch.randn(*shape, device=device)

    scores = random(num_tokens, num_experts)
    scores[:, 1] += 3  # a favourite
    weights, experts = scores.softmax(1).topk(top_k)
    x = random(num_tokens, hidden).to(dtype)
    gate_up = (random(num_experts, 2 * intermediate, hidden) * hidden**-0.5).to(dtype)
    down = (random(num_experts, hidden, intermediate) * intermediate**-0.5).to(dtype)
    return x, gate_up, down, experts.to(torch.int32), weights


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden", "intermediate"), [(1, 4, 2, 32, 32), (23, 3, 2, 50, 27), (9, 16, 3, 33, 16)]
)
def test_equals_reference(device, dtype, small_tiles, num_tokens, num_experts, top_k, hidden, intermediate):
    case = make_case(num_tokens, num_experts, top_k, hidden, intermediate, dtype, device)
    out = fused_experts(*case)
    assert out.dtype == dtype
    torch.testing.assert_close(out, reference.fused_experts(*case), atol=ERROR[dtype], rtol=ERROR[dtype])
    assert torch.equal(fused_experts(case[0][:1], *case[1:3], *(x[:1] for x in case[3:])), out[:1])


@pytest.mark.parametrize("num_tokens", [5, 60, 140])
def test_tiles_of_the_table(device, dtype, num_tokens):
    case = make_case(num_tokens, 2, 1, 64, 32, dtype, device)
    torch.testing.assert_close(fused_experts(*case), reference.fused_experts(*case), atol=ERROR[dtype], rtol=ERROR[dtype])
