"""Attention against its definition in float64: mixed batches, grouped heads, windows; the same bits however it is batched."""

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.attention import paged_attention
from kernels.cpu.crew import Crew

BLOCK = 16


def make_case(contexts, query_lens, num_heads, num_kv_heads, head_dim, dtype=torch.float32, block=BLOCK, seed=0):
    """Requests with random KV scattered over shuffled blocks; every slot that belongs to none holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block) for length in contexts]
    num_blocks = sum(needed) + 1
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    tables = torch.zeros(len(contexts) + 2, max(needed), dtype=torch.int32)
    key_cache = torch.full((num_blocks, num_kv_heads, head_dim, block), torch.nan, dtype=dtype)
    value_cache = torch.full((num_blocks, num_kv_heads, block, head_dim), torch.nan, dtype=dtype)
    rows = torch.arange(len(contexts), dtype=torch.int32).flip(0) + 1
    for i, length in enumerate(contexts):
        blocks = [order.pop() for _ in range(needed[i])]
        tables[rows[i], : needed[i]] = torch.tensor(blocks, dtype=torch.int32)
        key, value = torch.randn(2, length, num_kv_heads, head_dim, generator=generator).to(dtype)
        slots = torch.tensor([blocks[p // block] * block + p % block for p in range(length)])
        reference.kv_write(key, value, key_cache, value_cache, slots)
    starts = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32)
    query = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(dtype)
    return query, key_cache, value_cache, tables, rows, starts, torch.tensor(contexts, dtype=torch.int32)


def dense_attention(query, key_cache, value_cache, tables, rows, starts, contexts, scale, window, soft_cap=0.0):
    """Token by token in float64, from the definition."""
    out = torch.empty(query.shape, dtype=torch.float64)
    group = query.shape[1] // key_cache.shape[1]
    block = key_cache.shape[3]
    for i, row in enumerate(rows.tolist()):
        for token in range(starts[i], starts[i + 1]):
            position = contexts[i] - starts[i + 1] + token
            first = max(0, position - window + 1) if window else 0
            seen = [(tables[row, p // block], p % block) for p in range(first, position + 1)]
            for head in range(query.shape[1]):
                keys = torch.stack([key_cache[b, head // group, :, o] for b, o in seen]).double()
                values = torch.stack([value_cache[b, head // group, o] for b, o in seen]).double()
                scores = keys @ query[token, head].double() * scale
                if soft_cap:
                    scores = soft_cap * (scores / soft_cap).tanh()
                out[token, head] = scores.softmax(0) @ values
    return out


@pytest.mark.parametrize("window", [0, 1, 7, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 16), (8, 2, 20)])
def test_mixed_batch_against_the_definition(heads, kv_heads, head_dim, window):
    # decodes, a whole prompt, chunks with cached prefix that end inside and at the end of a block
    case = make_case([1, 17, 33, 64, 90], [1, 1, 33, 20, 50], heads, kv_heads, head_dim)
    expected = dense_attention(*case, head_dim**-0.5, window)
    for function in (paged_attention, reference.paged_attention):
        case_without_nan = [
            torch.nan_to_num(x) if x.is_floating_point() and function is reference.paged_attention else x for x in case
        ]
        out = function(*case_without_nan, head_dim**-0.5, window)
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


def test_soft_cap():
    case = [torch.nan_to_num(x) if x.is_floating_point() else x for x in make_case([17, 40], [1, 20], 4, 2, 16)]
    expected = dense_attention(*case, 1.0, 0, 2.0)
    assert (expected - dense_attention(*case, 1.0, 0)).abs().max() > 0.1
    for function in (paged_attention, reference.paged_attention):
        torch.testing.assert_close(function(*case, 1.0, 0, 2.0).double(), expected, atol=2e-6, rtol=1e-5)


def test_bfloat16_cache_is_accumulated_in_float32():
    case = make_case([5, 130], [1, 60], 8, 2, 64, torch.bfloat16)
    out = paged_attention(*case, 0.125, 0)
    assert out.dtype == torch.bfloat16
    expected = dense_attention(*case, 0.125, 0)
    torch.testing.assert_close(out.double(), expected, atol=3e-3, rtol=2**-7)  # queries, weights, out: rounded to 2**-9 each


@pytest.mark.parametrize("window", [0, 1, 7, 40])
@pytest.mark.parametrize("block", [16, 2, 5])  # 5 does not go in pairs
def test_bfloat16_cache_with_wide_queries(block, window):
    query, *rest = make_case([1, 17, 33, 64, 90], [1, 1, 33, 20, 50], 9, 3, 64, torch.bfloat16, block)
    case = (query.float(), *rest)
    expected = dense_attention(*case, 0.125, window)
    torch.testing.assert_close(paged_attention(*case, 0.125, window).double(), expected, atol=3e-3, rtol=2**-7)


@pytest.mark.parametrize("block", [8, 32])
def test_other_block_sizes(block):
    case = make_case([70, 9], [30, 9], 4, 2, 16, block=block)
    torch.testing.assert_close(paged_attention(*case, 0.25, 0).double(), dense_attention(*case, 0.25, 0), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_token_is_the_same_bits_in_every_batch_and_chunking(dtype):
    query, keys, values, tables, rows, starts, contexts = make_case([200, 77], [200, 77], 9, 3, 64, dtype)
    query = query.float()
    whole = paged_attention(query, keys, values, tables, rows, starts, contexts, 0.125, 0)
    for begin in range(0, 200, 33):
        end = min(begin + 33, 200)
        chunk = paged_attention(
            query[begin:end], keys, values, tables, rows[:1],
            torch.tensor([0, end - begin], dtype=torch.int32), torch.tensor([end], dtype=torch.int32), 0.125, 0,
        )  # fmt: skip
        assert torch.equal(chunk, whole[begin:end])
    alone = paged_attention(
        query[199:200], keys, values, tables, rows[:1],
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([200], dtype=torch.int32), 0.125, 0,
    )  # fmt: skip
    assert torch.equal(alone, whole[199:200])


@pytest.mark.parametrize("context_lens", [[50, 120, 3, 64], [200]])
def test_threads_change_nothing(context_lens):
    """Several requests, whose tiles threads take, and one token of one request, whose heads they take."""
    case = make_case(context_lens, [1, 100, 3, 1] if len(context_lens) > 1 else [1], 9, 3, 64)
    one = paged_attention(*case, 0.125, 0)
    for size in (2, 3):
        with Crew(size).gather(size):
            for _ in range(20):
                assert torch.equal(paged_attention(*case, 0.125, 0), one)
