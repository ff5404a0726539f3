"""Plain-torch twins of the kernels, for any device: what they are tested against, and what runs where there is no kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F


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
    """As `attention.paged_attention`; gathers one request's KV after the other."""
    out = torch.empty_like(query)
    starts, lengths = query_start.tolist(), context_lens.tolist()
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = key_cache.shape[1], key_cache.shape[3]
    group = num_heads // num_kv_heads
    for i, row in enumerate(rows.tolist()):
        begin, end, length = starts[i], starts[i + 1], lengths[i]
        blocks = block_tables[row, : -(-length // block_size)].long()
        keys = key_cache[blocks].permute(1, 0, 3, 2).reshape(num_kv_heads, -1, head_dim)[:, :length]
        values = value_cache[blocks].permute(1, 0, 2, 3).reshape(num_kv_heads, -1, head_dim)[:, :length]
        key_positions = torch.arange(length, device=query.device)
        positions = torch.arange(length - (end - begin), length, device=query.device).unsqueeze(1)
        seen = key_positions <= positions
        if window > 0:
            seen &= key_positions > positions - window
        scores = torch.einsum("qhd,hkd->hqk", query[begin:end].float(), keys.repeat_interleave(group, 0).float()) * scale
        if soft_cap > 0.0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        out[begin:end] = torch.einsum("hqk,hkd->qhd", weights, values.repeat_interleave(group, 0).float())
    return out


def kv_write(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    block_size = key_cache.shape[3]
    written = slots >= 0
    blocks, offsets = slots[written] // block_size, slots[written] % block_size
    key_cache[blocks, :, :, offsets] = key[written]
    value_cache[blocks, :, offsets] = value[written]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    residual += x
    return rms_norm(residual, weight, epsilon)


def rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    cos, sin = cos_sin[positions].to(x.dtype).unsqueeze(1).chunk(2, dim=-1)
    a, b = x.chunk(2, dim=-1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    x.copy_(turned)


def rope_kv_write(
    heads: torch.Tensor,
    num_kv_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    rope(heads[:, :-num_kv_heads], positions, cos_sin)
    key, value = heads[:, -2 * num_kv_heads :].chunk(2, dim=1)
    kv_write(key.to(key_cache.dtype), value.to(value_cache.dtype), key_cache, value_cache, slots)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def apply_penalties(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    num_prompt_tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    prompt_lens, lens = num_prompt_tokens.tolist(), num_tokens.tolist()
    for i, row in enumerate(rows.tolist()):
        tokens = token_ids[row, : lens[i]].long()
        counts = torch.bincount(tokens[prompt_lens[i] :], minlength=logits.shape[1])
        seen = tokens.unique()
        logit = logits[i, seen]
        logits[i, seen] = torch.where(logit > 0, logit / repetition[i], logit * repetition[i])
        logits[i] -= frequency[i] * counts
        logits[i] -= presence[i] * (counts > 0)


def apply_token_mask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    tokens = torch.arange(logits.shape[1], device=logits.device)
    is_allowed = (masks[:, tokens // 32] >> (tokens % 32)) & 1 == 1
    logits[rows] = logits[rows].masked_fill(~is_allowed, -torch.inf)


def apply_top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    vocab = logits.shape[1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    last = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab).long() - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(1, last.unsqueeze(1)), -torch.inf)
    probabilities = ordered.softmax(dim=-1, dtype=torch.float64)
    before = probabilities.cumsum(dim=-1) - probabilities
    limit = torch.where(top_p < 1, top_p.double(), 2.0).unsqueeze(1)
    dropped = before >= limit
    dropped[:, 0] = False
    logits.scatter_(1, order, ordered.masked_fill(dropped, -torch.inf))


def log_float32(x: torch.Tensor) -> torch.Tensor:
    """As `cpu.math.log_float32`, operation by operation: the same bits."""
    bits = x.view(torch.int32)
    exponent = ((bits >> 23) - 126).float()
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)
    low = mantissa < 0.707106781186547524
    e = exponent - low.float()
    f = torch.where(low, mantissa + mantissa, mantissa) - 1.0
    z = f * f
    p = 7.0376836292e-2 * f + -1.1514610310e-1
    for coefficient in (
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    ):
        p = p * f + coefficient
    y = p * f * z
    y = y + e * -2.12194440e-4
    y = y - z * 0.5
    return (f + y) + e * 0.693359375


def gumbel_noise(seed: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    """Noise of `token_ids` (int64, any shape), float32. Words are 32 bits held in int64; products wrap modulo 2**64, as wanted."""
    mask = 0xFFFFFFFF
    c0, c1 = token_ids // 4, torch.zeros_like(token_ids)
    c2, c3 = torch.full_like(token_ids, position & mask), torch.full_like(token_ids, position >> 32 & mask)
    k0, k1 = seed & mask, seed >> 32 & mask
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (product1 >> 32 & mask) ^ c1 ^ k0, product1 & mask, (product0 >> 32 & mask) ^ c3 ^ k1, product0 & mask
        k0, k1 = k0 + 0x9E3779B9 & mask, k1 + 0xBB67AE85 & mask
    words = torch.stack((c0, c1, c2, c3)).gather(0, (token_ids % 4).unsqueeze(0))[0]
    uniform = ((words >> 9).float() + 0.5) * 1.1920928955078125e-07
    return -log_float32(-log_float32(uniform))


def gumbel_argmax(logits: torch.Tensor, greedy: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    scores = logits.clone()
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    for i, (row_greedy, seed, position) in enumerate(zip(greedy.tolist(), seeds.tolist(), positions.tolist(), strict=True)):
        if not row_greedy:
            scores[i] += gumbel_noise(seed, position, token_ids)
    return scores.argmax(dim=-1)


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    threshold = logits.amax(dim=-1) + torch.log(min_p)
    logits.masked_fill_(logits < threshold.unsqueeze(-1), -torch.inf)


def add_logit_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, biases: torch.Tensor) -> None:
    logits[rows, token_ids] += biases


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ranks = (logits > logits.gather(1, token_ids[:, :1])).sum(dim=1, dtype=torch.int32) + 1
    return logits.log_softmax(dim=-1).gather(1, token_ids), ranks


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    limit = 127.0 if dtype == torch.int8 else 448.0
    wide = x.float().nan_to_num(0.0, 0.0, 0.0)
    scales = wide.abs().amax(dim=1) / limit
    q = wide / torch.where(scales > 0, scales, 1.0).unsqueeze(1)
    scales.masked_fill_(~x.isfinite().all(dim=1), torch.nan)
    return (q.round() if dtype == torch.int8 else q).clamp(-limit, limit).to(dtype), scales


def linear_w8a8(
    x: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    q, scales = quantize_rows(x, weight.dtype)
    # float64 holds every sum of int8 products
    out = (q.double() @ weight.double().T).float() * scales.unsqueeze(1) * weight_scales
    return (out if bias is None else out + bias.float()).to(x.dtype)


def linear_w4a16(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    num_groups, out_features = scales.shape
    halves = packed.unflatten(1, (num_groups, -1))
    values = torch.cat((halves & 15, halves >> 4), dim=2).float()
    zero = 8.0 if zeros is None else zeros.float().T.unsqueeze(2)
    weight = ((values - zero) * scales.float().T.unsqueeze(2)).view(out_features, -1).to(x.dtype)
    out = x.float() @ weight.float().T
    return (out if bias is None else out + bias.float()).to(x.dtype)


def fused_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in experts.unique().tolist():
        tokens, places = (experts == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens].float() @ gate_up[expert].float().T).chunk(2, dim=1)
        product = ((F.silu(gate) * up).to(x.dtype).float() @ down[expert].float().T).to(x.dtype)
        out.index_add_(0, tokens, product.float() * weights[tokens, places].unsqueeze(1))
    return out.to(x.dtype)
