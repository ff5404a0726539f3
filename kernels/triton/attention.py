"""Attention of new tokens over the paged KV cache on a GPU: prefill chunks and decodes in one batch, causal, optional sliding
window and soft cap. The query heads that share a key-value head are packed into the rows of one matrix product.

Online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) over tiles of keys as in FlashAttention-2 (Dao 2023, arXiv
2307.08691); keys and values are gathered through the block table. Packing heads and finding a program's request by binary search
are as in Ringlein et al. 2025 (arXiv 2511.11581). Requests with one new token have a kernel of their own:

- Their KV is cut into segments of SEGMENT tokens at fixed positions. Each segment's softmax starts anew, and segments are folded
  into the result in ascending order.
- With few requests a program takes one segment (split KV, as in Flash-Decoding, Dao et al. 2023) and a second kernel folds; with
  many, one program takes and folds all of a request's. Both do the same operations in the same order: a decode's bits depend
  neither on how it was launched nor on what else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.variant import Variant

SEGMENT = 512  # tokens: the partial results of 4 heads of 128 are then 1 % of the bytes of the segment's keys and values
SPLIT_BELOW = 256  # programs, two a multiprocessor of an H100: with fewer a decode is split
MAX_PARTIAL_BYTES = 64 << 20


@dataclass(frozen=True)
class Tile:
    rows: int  # queries (token, head) a program; a multiple of 64 lets sm_90 and sm_100 use their largest instructions
    keys: int  # a step of the loop
    num_warps: int
    num_stages: int  # of the loop's software pipeline


# By (bytes an element, head_dim over 128), bounded by registers: rows * head_dim float32 accumulators over num_warps * 32 threads.
# A tile's blocks are loaded from the block table before its keys, and the two loads share the stages: with 5, two tiles of keys and
# values are on their way while one is computed; with fewer than 5, one at most.
CHUNK_TILES = {
    (2, False): Tile(128, 64, 8, 5),
    (2, True): Tile(64, 32, 8, 5),
    (4, False): Tile(32, 32, 4, 2),
}
DECODE_TILES = {
    (2, False): Tile(16, 64, 4, 5),
    (2, True): Tile(16, 32, 4, 5),
    (4, False): Tile(16, 32, 4, 3),
}


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """As `kernels.attention.paged_attention`; any strides of the caches, keys with contiguous head_dim are read fastest. A request
    with an empty context gets zeros. Raises ValueError for float32 with head_dim over 128."""
    num_tokens, num_heads, head_dim = query.shape
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return out
    num_requests, num_kv_heads = rows.shape[0], key_cache.shape[1]
    tensors = (query, key_cache, value_cache, block_tables, rows, query_start, context_lens)
    strides = (*query.stride()[:2], *key_cache.stride(), *value_cache.stride(), block_tables.stride(0))
    scales = (scale, soft_cap)
    kind = (query.element_size(), head_dim > 128)
    if kind not in CHUNK_TILES:  # three TF32 products of 256 dimensions do not fit the registers
        raise ValueError(f"attention in {query.dtype} with head_dim {head_dim} is not for GPUs: use a 16-bit type")
    constants = {
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "WIDTH": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_SIZE": key_cache.shape[3],
        "WINDOW": window,
        "CAPPED": soft_cap > 0.0,
        "enable_fp_fusion": False,
    }
    if num_tokens > num_requests:  # else each request has one
        tile = CHUNK_TILES[kind]
        block_rows = max(tile.rows, triton.next_power_of_2(constants["GROUP"]))
        grid = (num_tokens // (block_rows // constants["GROUP"]) + num_requests, num_kv_heads)
        _attend_chunk_kernel[grid](
            out,
            *tensors,
            num_requests,
            *scales,
            *strides,
            **constants,
            ROWS=block_rows,
            TILE=tile.keys,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    tile = DECODE_TILES[kind]
    segments = triton.cdiv(block_tables.shape[1] * key_cache.shape[3], SEGMENT)
    split = _is_split(num_requests, num_kv_heads, segments, num_heads * head_dim)
    weighted = summary = None
    if split:
        weighted = torch.empty(num_requests, num_heads, segments, head_dim, dtype=torch.float32, device=query.device)
        summary = torch.empty(num_requests, num_heads, segments, 2, dtype=torch.float32, device=query.device)
    _attend_decode_kernel[(num_requests, num_kv_heads, segments if split else 1)](
        out,
        weighted,
        summary,
        *tensors,
        segments,
        *scales,
        *strides,
        **constants,
        ROWS=max(tile.rows, triton.next_power_of_2(constants["GROUP"])),
        TILE=tile.keys,
        SEGMENT=SEGMENT,
        SPLIT=split,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if split:
        _fold_segments_kernel[(num_requests, num_heads)](
            out,
            weighted,
            summary,
            query_start,
            context_lens,
            segments,
            HEAD_DIM=head_dim,
            WIDTH=constants["WIDTH"],
            WINDOW=window,
            SEGMENT=SEGMENT,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return out


def _is_split(num_requests: int, num_kv_heads: int, segments: int, row_elements: int) -> bool:
    if segments == 1 or num_requests * num_kv_heads >= SPLIT_BELOW:
        return False
    return num_requests * segments * row_elements * 4 <= MAX_PARTIAL_BYTES


@triton.jit(do_not_specialize=["num_requests", "table_row"])
def _attend_chunk_kernel(
    out, query, key_cache, value_cache, block_tables, rows, query_start, context_lens, num_requests,
    scale, soft_cap,
    query_token, query_head,
    key_block, key_head, key_dim, key_offset,
    value_block, value_head, value_offset, value_dim,
    table_row,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A program takes up to ROWS // GROUP tokens of one request with several new ones, and the GROUP query heads of one KV head:
    row r of the matrix product is token r // GROUP, head r % GROUP. Request i's programs begin at query_start[i] // TOKENS + i,
    which leaves room for ceil(query_len / TOKENS) without anyone counting; programs too many return at once."""
    TOKENS: tl.constexpr = ROWS // GROUP
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = 0
    above = num_requests
    while above - request > 1:
        middle = (request + above) // 2
        is_after = tl.load(query_start + middle) // TOKENS + middle <= program
        request = tl.where(is_after, middle, request)
        above = tl.where(is_after, above, middle)
    first_of_request = tl.load(query_start + request)
    query_len = tl.load(query_start + request + 1) - first_of_request
    first = (program - first_of_request // TOKENS - request) * TOKENS  # of this program, counted from the request's first token
    if first >= query_len:
        return
    if query_len == 1:  # the other kernel's
        return
    row = tl.arange(0, ROWS)
    dims = tl.arange(0, WIDTH)
    token = first + row // GROUP
    taken = (token < query_len) & (row < TOKENS * GROUP)
    head = kv_head * GROUP + row % GROUP
    inside = taken[:, None] & (dims < HEAD_DIM)[None, :]
    place = (first_of_request + token).to(tl.int64)
    queries = tl.load(query + place[:, None] * query_token + head[:, None] * query_head + dims[None, :], mask=inside, other=0.0)
    context = tl.load(context_lens + request)
    first_position = context - query_len + first
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE
    weighted, _, total = _attend_tiles(
        queries, context - query_len + token, begin, tl.minimum(first_position + TOKENS, context), context,
        block_tables + tl.load(rows + request).to(tl.int64) * table_row,
        key_cache + kv_head.to(tl.int64) * key_head, value_cache + kv_head.to(tl.int64) * value_head,
        scale, soft_cap, key_block, key_dim, key_offset, value_block, value_offset, value_dim,
        HEAD_DIM, WIDTH, BLOCK_SIZE, WINDOW, CAPPED, ROWS, TILE,
    )  # fmt: skip
    result = weighted / tl.where(total > 0.0, total, 1.0)[:, None]
    num_heads = tl.num_programs(1) * GROUP
    places = (place * num_heads + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["segments", "table_row"])
def _attend_decode_kernel(
    out, weighted_out, summary_out, query, key_cache, value_cache, block_tables, rows, query_start, context_lens, segments,
    scale, soft_cap,
    query_token, query_head,
    key_block, key_head, key_dim, key_offset,
    value_block, value_head, value_offset, value_dim,
    table_row,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    SEGMENT: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A program takes the GROUP query heads of one KV head of one request that has one new token, and one segment of its context if
    SPLIT, else all. A segment's result goes to weighted_out [num_requests, num_heads, segments, head_dim] and summary_out
    [num_requests, num_heads, segments, 2] (highest score in log2 units, sum of weights)."""
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    token = tl.load(query_start + request).to(tl.int64)
    if tl.load(query_start + request + 1) != token + 1:
        return
    context = tl.load(context_lens + request)
    first_segment, end_segment = _segments_seen(context, WINDOW, SEGMENT)
    if SPLIT:
        first_segment = tl.maximum(first_segment, tl.program_id(2))
        end_segment = tl.minimum(end_segment, tl.program_id(2) + 1)
        if first_segment >= end_segment:
            return
    row = tl.arange(0, ROWS)
    dims = tl.arange(0, WIDTH)
    head = kv_head * GROUP + row
    inside = (row < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(query + token * query_token + head[:, None] * query_head + dims[None, :], mask=inside, other=0.0)
    positions = tl.zeros([ROWS], tl.int32) + (context - 1)
    num_heads = tl.num_programs(1) * GROUP
    weighted = tl.zeros([ROWS, WIDTH], tl.float32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for segment in range(first_segment, end_segment):
        begin = segment * SEGMENT
        end = tl.minimum(begin + SEGMENT, context)
        if WINDOW > 0:
            begin = tl.maximum(begin, tl.maximum(context - WINDOW, 0) // TILE * TILE)
        weighted_now, highest_now, total_now = _attend_tiles(
            queries, positions, begin, end, context,
            block_tables + tl.load(rows + request).to(tl.int64) * table_row,
            key_cache + kv_head.to(tl.int64) * key_head, value_cache + kv_head.to(tl.int64) * value_head,
            scale, soft_cap, key_block, key_dim, key_offset, value_block, value_offset, value_dim,
            HEAD_DIM, WIDTH, BLOCK_SIZE, WINDOW, CAPPED, ROWS, TILE,
        )  # fmt: skip
        if SPLIT:
            place = (request.to(tl.int64) * num_heads + head) * segments + segment
            tl.store(weighted_out + place[:, None] * HEAD_DIM + dims[None, :], weighted_now, mask=inside)
            tl.store(summary_out + place * 2, highest_now, mask=row < GROUP)
            tl.store(summary_out + place * 2 + 1, total_now, mask=row < GROUP)
        else:
            weighted, highest, total = _fold(weighted, highest, total, weighted_now, highest_now, total_now)
    if not SPLIT:
        result = weighted / tl.where(total > 0.0, total, 1.0)[:, None]
        places = (token * num_heads + head)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["segments"])
def _fold_segments_kernel(
    out, weighted_in, summary_in, query_start, context_lens, segments,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """A program folds the segments of one head of one request; tensors as in `_attend_decode_kernel`."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start + request).to(tl.int64)
    if tl.load(query_start + request + 1) != token + 1:
        return
    first_segment, end_segment = _segments_seen(tl.load(context_lens + request), WINDOW, SEGMENT)
    dims = tl.arange(0, WIDTH)
    inside = dims < HEAD_DIM
    weighted = tl.zeros([1, WIDTH], tl.float32)
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    place = (request.to(tl.int64) * tl.num_programs(1) + head) * segments + tl.arange(0, 1)
    for segment in tl.range(first_segment, end_segment, num_stages=4):
        weighted_now = tl.load(weighted_in + (place + segment)[:, None] * HEAD_DIM + dims[None, :], mask=inside[None, :], other=0.0)
        highest_now = tl.load(summary_in + (place + segment) * 2)
        total_now = tl.load(summary_in + (place + segment) * 2 + 1)
        weighted, highest, total = _fold(weighted, highest, total, weighted_now, highest_now, total_now)
    result = weighted / tl.where(total > 0.0, total, 1.0)[:, None]
    places = (token * tl.num_programs(1) + head) * HEAD_DIM + dims[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=inside[None, :])


@triton.jit
def _segments_seen(context, WINDOW: tl.constexpr, SEGMENT: tl.constexpr):
    """First segment that the last position of the context sees, and the one after its last."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0) // SEGMENT
    return first, (context + SEGMENT - 1) // SEGMENT


@triton.jit
def _fold(weighted, highest, total, weighted_now, highest_now, total_now):
    """Adds a segment that has at least one visible key: highest_now is finite."""
    highest_after = tl.maximum(highest, highest_now)
    shrink = tl.exp2(highest - highest_after)
    shrink_now = tl.exp2(highest_now - highest_after)
    weighted = weighted * shrink[:, None] + weighted_now * shrink_now[:, None]
    return weighted, highest_after, total * shrink + total_now * shrink_now


@triton.jit
def _attend_tiles(
    queries, positions, begin, end, context, table, keys_of_head, values_of_head,
    scale, soft_cap, key_block, key_dim, key_offset, value_block, value_offset, value_dim,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """queries [ROWS, WIDTH] at `positions` [ROWS] attend keys begin..end-1. Returns the sum of weights times values [ROWS, WIDTH],
    the highest score in log2 units [ROWS] and the sum of weights [ROWS], weights being 2 ** (score - highest); all float32.

    float32 queries are multiplied in three products of TF32 parts ("tf32x3"): float32's precision to some 1e-6, on matrix units."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    dims = tl.arange(0, WIDTH)
    weighted = tl.zeros([ROWS, WIDTH], tl.float32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(begin, end, TILE):
        places = start + tl.arange(0, TILE)
        known = places < context
        blocks = tl.load(table + places // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        offsets = places % BLOCK_SIZE
        # What lies beyond the context is not loaded: it may be another request's leftover NaN, and 0 * NaN is NaN.
        key_places = (blocks * key_block + offsets * key_offset)[None, :] + dims[:, None] * key_dim
        keys = tl.load(keys_of_head + key_places, mask=known[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
        scores = tl.dot(queries, keys.to(queries.dtype), input_precision="tf32x3") * scale
        if CAPPED:  # soft_cap * tanh(scores / soft_cap)
            scores = soft_cap - 2.0 * soft_cap / (tl.exp(scores * (2.0 / soft_cap)) + 1.0)
        scores *= LOG2_E
        seen = places[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen &= places[None, :] > positions[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        highest_now = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(highest_now == float("-inf"), 0.0, highest_now)  # of a row that has seen no key yet
        shrink = tl.exp2(highest - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        value_places = (blocks * value_block + offsets * value_offset)[:, None] + dims[None, :] * value_dim
        values = tl.load(values_of_head + value_places, mask=known[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        weighted *= shrink[:, None]
        weighted = tl.dot(weights.to(queries.dtype), values.to(queries.dtype), weighted, input_precision="tf32x3")
        highest = highest_now
    return weighted, highest, total


def _example(dtype: torch.dtype, head_dim: int, query_lens: int, num_requests: int, window: int = 0, soft_cap: float = 0.0) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    heads, kv_heads, max_blocks = 32, 8, 512
    query = empty(num_requests * query_lens, heads + 2 * kv_heads, head_dim, dtype=dtype)[:, :heads]
    cache = empty(2, 4096, kv_heads, 16, head_dim, dtype=dtype)
    paged_attention(
        query,
        cache[0].transpose(2, 3),
        cache[1],
        empty(num_requests, max_blocks),
        empty(num_requests),
        empty(num_requests + 1),
        empty(num_requests),
        head_dim**-0.5,
        window,
        soft_cap,
    )


_MATRIX = ("_attend_chunk_kernel", "_attend_decode_kernel")
AOT_VARIANTS = [
    *(
        Variant(
            f"bfloat16, head_dim {head_dim}, {name}",
            _example,
            {"dtype": torch.bfloat16, "head_dim": head_dim, "query_lens": query_lens, "num_requests": num_requests},
            matrix=_MATRIX,
        )
        for head_dim in (64, 128)
        for name, query_lens, num_requests in (("few requests", 64, 4), ("many requests", 1, 64))
    ),
    Variant(
        "bfloat16, head_dim 128, window and soft cap",
        _example,
        {"dtype": torch.bfloat16, "head_dim": 128, "query_lens": 64, "num_requests": 4, "window": 1024, "soft_cap": 50.0},
        matrix=_MATRIX,
    ),
    *(
        Variant(
            f"{str(dtype)[6:]}, head_dim {head_dim}",
            _example,
            {"dtype": dtype, "head_dim": head_dim, "query_lens": 64, "num_requests": 4},
            matrix=_MATRIX,
        )
        for dtype, head_dim in ((torch.bfloat16, 256), (torch.float32, 128))
    ),
]
