"""The gate of the MLP."""

import pytest
import torch

from kernels import reference
from kernels.triton.silu_mul import silu_mul

ERROR = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize(("num_tokens", "intermediate"), [(3, 5), (2, 1536), (4, 1025), (0, 8)])
def test_silu_mul(device, dtype, num_tokens, intermediate):
    gate_up = (4 * torch.randn(num_tokens, 2 * intermediate, device=device)).to(dtype)
    out = silu_mul(gate_up)
    assert out.shape == (num_tokens, intermediate) and out.dtype == dtype
    torch.testing.assert_close(out, reference.silu_mul(gate_up), atol=1e-6, rtol=ERROR[dtype])
