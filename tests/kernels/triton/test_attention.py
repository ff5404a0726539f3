"""Paged attention against its plain-torch twin: mixed batches through shuffled block tables, grouped heads, windows, soft caps."""

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.triton import attention
from kernels.triton.attention import Tile, paged_attention
from kernels.triton.kv_write import kv_write
from tests.kernels.test_attention import make_case

ERROR = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def on_device(case, device):
    """The case with the keys laid out as a GPU's cache has them: head_dim contiguous."""
    query, key_cache, *rest = (x.to(device) for x in case)
    return query, key_cache.transpose(2, 3).contiguous().transpose(2, 3), *rest


def expected(case, scale, window, soft_cap):
    """In float32; the reference multiplies what it masks by zero, so the case's NaN, in slots of no request, become 0."""
    wide = [torch.nan_to_num(x.float()) if x.is_floating_point() else x for x in case]
    return reference.paged_attention(*wide, scale, window, soft_cap)


@pytest.fixture
def small_tiles(monkeypatch):
    """Several programs a request and several tiles a program, at sizes that the interpreter computes quickly."""
    for kind in attention.CHUNK_TILES:
        monkeypatch.setitem(attention.CHUNK_TILES, kind, Tile(32, 16, 4, 2))
        monkeypatch.setitem(attention.DECODE_TILES, kind, Tile(16, 16, 4, 2))
    monkeypatch.setattr(attention, "SEGMENT", 32)


@pytest.mark.parametrize("window", [0, 1, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 64), (8, 1, 20)])
def test_mixed_batch(device, dtype, small_tiles, heads, kv_heads, head_dim, window):
    # decodes, a whole prompt, chunks with a cached prefix that end inside and at the end of a block
    case = on_device(make_case([1, 37, 32, 65], [1, 1, 32, 20], heads, kv_heads, head_dim, dtype), device)
    out = paged_attention(*case, head_dim**-0.5, window)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected(case, head_dim**-0.5, window, 0.0), atol=ERROR[dtype], rtol=ERROR[dtype])


def test_tiles_of_the_table(device, dtype):
    case = on_device(make_case([70, 600, 40], [70, 1, 7], 4, 1, 64, dtype), device)
    out = paged_attention(*case, 0.125, 0)
    torch.testing.assert_close(out.float(), expected(case, 0.125, 0, 0.0), atol=ERROR[dtype], rtol=ERROR[dtype])


@pytest.mark.parametrize(("block", "window"), [(8, 0), (32, 30)])
def test_block_sizes_and_soft_cap(device, dtype, small_tiles, block, window):
    case = on_device(make_case([70, 9, 45], [30, 9, 1], 4, 2, 16, dtype, block), device)
    capped = expected(case, 1.0, window, 2.0)
    assert (capped - expected(case, 1.0, window, 0.0)).abs().max() > 0.1
    torch.testing.assert_close(paged_attention(*case, 1.0, window, 2.0).float(), capped, atol=ERROR[dtype], rtol=ERROR[dtype])


@pytest.mark.parametrize("window", [0, 50])
def test_a_decode_has_the_same_bits_split_whole_and_in_any_batch(device, dtype, small_tiles, monkeypatch, window):
    case = on_device(make_case([1, 150, 33, 64], [1, 1, 1, 20], 6, 2, 32, dtype), device)
    split = paged_attention(*case, 0.2, window)
    query, keys, values, tables, rows, starts, contexts = case
    alone = paged_attention(query[1:2], keys, values, tables, rows[1:2], starts[:2], contexts[1:2], 0.2, window)
    monkeypatch.setattr(attention, "SPLIT_BELOW", 0)
    whole = paged_attention(*case, 0.2, window)
    assert torch.equal(split, whole)
    assert torch.equal(split[1:2], alone)
    torch.testing.assert_close(whole.float(), expected(case, 0.2, window, 0.0), atol=ERROR[dtype], rtol=ERROR[dtype])


@pytest.mark.parametrize("split_below", [0, 256])
def test_padding_of_a_captured_graph_disturbs_nobody(device, dtype, small_tiles, monkeypatch, split_below):
    monkeypatch.setattr(attention, "SPLIT_BELOW", split_below)
    case = on_device(make_case([40, 5], [1, 1], 4, 2, 16, dtype), device)
    query, keys, values, tables, rows, _, contexts = case
    padded = paged_attention(
        torch.cat((query, query)), keys, values, tables, rows.repeat(2), torch.arange(5, dtype=torch.int32, device=device),
        torch.cat((contexts, torch.zeros_like(contexts))), 0.25, 0,
    )  # fmt: skip
    torch.testing.assert_close(padded[:2].float(), expected(case, 0.25, 0, 0.0), atol=ERROR[dtype], rtol=ERROR[dtype])
    assert not padded[2:].any()


def test_float32_of_wide_heads_is_refused(device):
    with pytest.raises(ValueError, match="head_dim 144"):
        paged_attention(*on_device(make_case([3], [1], 1, 1, 144), device), 1.0, 0)


def test_places_beyond_32_bits(device):
    """A cache of 2**31 elements and more, of which two blocks at the end are touched: the rest of its memory is never mapped."""
    kv_heads, block, head_dim = 8, 16, 128
    num_blocks = 2**31 // (kv_heads * block * head_dim) + 2
    shape = (num_blocks, kv_heads, block, head_dim)
    if device.type == "cpu":
        cache = torch.from_numpy(np.zeros(shape, np.int8))
    else:
        cache = torch.zeros(shape, dtype=torch.int8, device=device)
    keys, values = cache.transpose(2, 3), cache
    new = torch.randint(-3, 4, (20, kv_heads, head_dim), dtype=torch.int8, device=device)
    slots = torch.arange(num_blocks * block - 20, num_blocks * block, device=device)
    kv_write(new, new, keys, values, slots)
    assert torch.equal(cache[-1], new[4:].transpose(0, 1))
    table = torch.tensor([[num_blocks - 1]], dtype=torch.int32, device=device)
    starts, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1], [16]))
    case = torch.randn(1, kv_heads, head_dim, device=device), keys, values, table, starts[:1], starts, lengths
    torch.testing.assert_close(paged_attention(*case, 0.1, 0), expected(case, 0.1, 0, 0.0), atol=3e-6, rtol=3e-6)


def test_a_narrower_cache(device, small_tiles):
    query, keys, values, *rest = on_device(make_case([20, 30], [5, 1], 4, 2, 16), device)
    case = query, keys.half(), values.half(), *rest
    torch.testing.assert_close(paged_attention(*case, 0.25, 0), expected(case, 0.25, 0, 0.0), atol=3e-6, rtol=3e-6)


def test_slices_of_a_fused_projection(device, dtype, small_tiles):
    query, *rest = on_device(make_case([20, 30], [5, 1], 4, 2, 16, dtype), device)
    fused = torch.zeros(6, 8, 16, dtype=dtype, device=device)
    fused[:, :4] = query
    assert torch.equal(paged_attention(fused[:, :4], *rest, 0.25, 0), paged_attention(query, *rest, 0.25, 0))
