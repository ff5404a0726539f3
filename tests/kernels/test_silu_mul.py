"""The gate against its reference."""

import torch

from kernels import reference
from kernels.silu_mul import silu_mul


def test_silu_mul():
    gate_up = torch.randn(3, 246) * 20
    torch.testing.assert_close(silu_mul(gate_up), reference.silu_mul(gate_up), atol=1e-6, rtol=2e-6)
