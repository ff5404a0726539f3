"""4-bit weights: packing, and products by their definition."""

import torch

from kernels.w4a16 import linear_w4a16, pack_int4, unpack_int4


def test_packing_puts_halves_of_a_group_into_nibbles():
    values = torch.arange(8).reshape(1, 8)
    packed = pack_int4(values, 4)
    assert packed.tolist() == [[0 + 2 * 16, 1 + 3 * 16, 4 + 6 * 16, 5 + 7 * 16]]
    assert torch.equal(unpack_int4(packed, 4), values)


def test_packing_is_undone():
    values = torch.randint(0, 16, (5, 192))
    for group_size in (32, 64, 192):
        assert torch.equal(unpack_int4(pack_int4(values, group_size), group_size), values)


def test_linear_with_4_bit_weights():
    values = torch.randint(0, 16, (6, 64))
    scales, zeros = torch.rand(2, 6), torch.rand(2, 6) * 15
    weight = torch.cat([(values[:, 32 * g : 32 * g + 32] - zeros[g, :, None]) * scales[g, :, None] for g in range(2)], dim=1)
    x, bias = torch.randn(3, 64), torch.randn(6)
    torch.testing.assert_close(linear_w4a16(x, pack_int4(values, 32), scales, zeros, bias), x @ weight.T + bias)
    symmetric = torch.cat([(values[:, 32 * g : 32 * g + 32] - 8) * scales[g, :, None] for g in range(2)], dim=1)
    torch.testing.assert_close(linear_w4a16(x, pack_int4(values, 32), scales), x @ symmetric.T)
