"""Examples of every operation of `kernels` on any device: its plain-torch twin, torch's own function for it, and the bytes and
FLOPs that it needs at least.

Bytes count each tensor once, as if caches were perfect; FLOPs are those of matrix products and attention alone, whose rest is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from gpu.models.linear import make_linear
from gpu.numerics import Numerics
from kernels import reference
from kernels.attention import paged_attention
from kernels.gumbel import gumbel_argmax
from kernels.kv_write import kv_write
from kernels.logit_bias import add_logit_bias
from kernels.logprobs import gather_logprobs
from kernels.min_p import apply_min_p
from kernels.moe import fused_experts
from kernels.penalties import apply_penalties
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import rope
from kernels.rope_kv_write import rope_kv_write
from kernels.silu_mul import silu_mul
from kernels.token_mask import apply_token_mask
from kernels.top_k_top_p import apply_top_k_top_p
from kernels.w4a16 import linear_w4a16
from kernels.w8a8 import linear_w8a8

BLOCK = 16
MAX_POSITIONS = 8192
# Largest difference from the twin, by its root mean square plus its own size; of 16-bit types one or two units in the last place.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
EXACT = dict.fromkeys(TOLERANCE, 0.0)
ROTATION_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # the twin rounds angles and products too
FLOAT8_TOLERANCE = dict.fromkeys(TOLERANCE, 3e-2)  # a sum of products of 4 bits, some of them rounded to the other neighbour
FEW = 2  # tokens a row at the edge of the nucleus that another order of summation may keep or drop


@dataclass(frozen=True)
class Sizes:
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    group: int = 128  # weights with one scale
    num_experts: int = 8
    top_k: int = 2


LLAMA_8B = Sizes(4096, 14336, 32, 8, 128, 128256)
SMOLLM2_135M = Sizes(576, 1536, 9, 3, 64, 49152, group=32)
ODD = Sizes(480, 1000, 6, 2, 80, 50257, group=96, num_experts=5, top_k=3)
TINY = Sizes(64, 48, 4, 2, 16, 300, group=32, num_experts=3)


@dataclass
class Trial:
    """One prepared call. `changed`: indices of the arguments that it changes."""

    function: Callable[..., Any]
    twin: Callable[..., Any]
    arguments: tuple[Any, ...]
    num_bytes: int
    flops: int = 0
    multiplies: torch.dtype | None = None  # the type of the products
    changed: tuple[int, ...] = ()
    once: bool = False  # called again with what it has changed, it would do less work
    differs: Callable[[list[torch.Tensor], list[torch.Tensor]], float] | None = None  # instead of `largest_difference`
    torch_has: tuple[str, Callable[[], object]] | None = None

    def run(self) -> None:
        self.function(*self.arguments)

    def restore(self) -> Callable[[], object] | None:
        """A function that restores the arguments which a run changes. None: runs may follow each other without."""
        if not self.once:
            return None
        kept = [(self.arguments[i], self.arguments[i].clone()) for i in self.changed]
        return lambda: [x.copy_(old) for x, old in kept]

    def difference(self) -> float:
        """The largest difference between the results of the call and of its twin."""
        found, expected = (self._results(function) for function in (self.function, self.twin))
        return (self.differs or largest_difference)(found, expected)

    def _results(self, function: Callable[..., Any]) -> list[torch.Tensor]:
        arguments = [x.clone(memory_format=torch.preserve_format) if i in self.changed else x for i, x in enumerate(self.arguments)]
        returned = function(*arguments)
        returned = [] if returned is None else [returned] if isinstance(returned, torch.Tensor) else list(returned)
        return returned + [arguments[i] for i in self.changed]


@dataclass
class Case:
    operation: str
    name: str
    dtype: torch.dtype
    make: Callable[[torch.device], Trial]
    tolerances: dict[torch.dtype, float] = field(default_factory=lambda: TOLERANCE)

    @property
    def tolerance(self) -> float:
        return self.tolerances[self.dtype]


def largest_difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Over the root mean square of what is expected plus its own magnitude; infinite where only one is finite."""
    worst = 0.0
    for x, y in zip(found, expected, strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            raise AssertionError(f"{tuple(x.shape)} of {x.dtype} instead of {tuple(y.shape)} of {y.dtype}")
        if not y.numel() or torch.equal(x, y):
            continue
        x, y = x.double(), y.double()
        finite = y.isfinite()
        if not torch.equal(x[~finite], y[~finite]) or not x[finite].isfinite().all():
            return float("inf")
        x, y = x[finite], y[finite]
        worst = max(worst, float(((x - y).abs() / (y.square().mean().sqrt() + y.abs() + 1e-30)).max()))
    return worst


def _kept_differ(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """0 if both filters keep the same tokens, except FEW in a row, with the same logits; else 1."""
    (x,), (y,) = found, expected
    kept = x.isfinite() & y.isfinite()
    differing = (x.isfinite() != y.isfinite()).sum(1)
    return float(not torch.equal(x[kept], y[kept]) or int(differing.max()) > FEW)


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def _int32(values: Any, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=device)


def _num_bytes(*tensors: torch.Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _caches(num_blocks: int, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches in the layout of `gpu.models.kv_cache`."""
    shape = (num_blocks, sizes.num_kv_heads, BLOCK, sizes.head_dim)
    values = _random(*shape, dtype=dtype, device=device)
    keys = _random(*shape, dtype=dtype, device=device).transpose(2, 3)
    return keys.contiguous() if device.type == "cpu" else keys, values


def _attention(
    device: torch.device, sizes: Sizes, dtype: torch.dtype, cache_dtype: torch.dtype, contexts: list[int], query_lens: list[int],
    window: int = 0, soft_cap: float = 0.0,
) -> Trial:  # fmt: skip
    """Attention of requests whose blocks are scattered over the cache."""
    needed = [-(-length // BLOCK) for length in contexts]
    order = (1 + torch.randperm(sum(needed))).to(torch.int32)
    tables = torch.zeros(len(contexts), max(needed), dtype=torch.int32)
    for i, blocks in enumerate(order.split(needed)):
        tables[i, : needed[i]] = blocks
    caches = _caches(1 + sum(needed), sizes, cache_dtype, device)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    query = _random(sum(query_lens), sizes.num_heads, sizes.head_dim, dtype=dtype, device=device)
    rows = _int32(range(len(contexts)), device)
    metadata = (tables.to(device), rows, _int32(starts, device), _int32(contexts, device))
    scale = sizes.head_dim**-0.5
    pairs = sum((2 * context - length + 1) * length // 2 for context, length in zip(contexts, query_lens, strict=True))
    kv_bytes = sum(contexts) * 2 * sizes.num_kv_heads * sizes.head_dim * cache_dtype.itemsize
    same = len(set(contexts)) == len(set(query_lens)) == 1 and not window and not soft_cap and cache_dtype is dtype
    return Trial(
        paged_attention,
        reference.paged_attention,
        (query, *caches, *metadata, scale, window, soft_cap),
        kv_bytes + 2 * _num_bytes(query),
        4 * pairs * sizes.num_heads * sizes.head_dim,
        dtype,
        torch_has=("SDPA, contiguous KV", _sdpa(device, sizes, dtype, len(contexts), query_lens[0], contexts[0])) if same else None,
    )


def _sdpa(
    device: torch.device, sizes: Sizes, dtype: torch.dtype, batch: int, query_len: int, context: int
) -> Callable[[], torch.Tensor]:
    query = _random(batch, sizes.num_heads, query_len, sizes.head_dim, dtype=dtype, device=device)
    key, value = (_random(batch, sizes.num_kv_heads, context, sizes.head_dim, dtype=dtype, device=device) for _ in range(2))
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=query_len > 1, enable_gqa=True)


def _angles(sizes: Sizes, device: torch.device) -> torch.Tensor:
    frequencies = 10_000.0 ** -(torch.arange(sizes.head_dim // 2) / (sizes.head_dim // 2))
    angles = torch.arange(MAX_POSITIONS).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device)


def _places(num_tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions, and slots scattered over a cache of num_tokens slots and one block. Every seventh token has no slot."""
    slots = torch.randperm(num_tokens) + BLOCK
    slots[6::7] = -1
    return torch.randint(0, MAX_POSITIONS, (num_tokens,)).to(device), slots.to(device)


def _rope_kv_write(device: torch.device, sizes: Sizes, dtype: torch.dtype, cache_dtype: torch.dtype, num_tokens: int) -> Trial:
    total = sizes.num_heads + 2 * sizes.num_kv_heads
    heads = _random(num_tokens, total, sizes.head_dim, dtype=dtype, device=device)
    positions, slots = _places(num_tokens, device)
    caches = _caches(2 + num_tokens // BLOCK, sizes, cache_dtype, device)
    arguments = (heads, sizes.num_kv_heads, positions, _angles(sizes, device), *caches, slots)
    written = 2 * num_tokens * sizes.num_kv_heads * sizes.head_dim * cache_dtype.itemsize
    queries = heads[:, : sizes.num_heads]

    def differs(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
        """Compares queries and caches only: some devices also turn the keys in place."""
        return largest_difference(*([x[0][:, : sizes.num_heads], *x[1:]] for x in (found, expected)))

    return Trial(
        rope_kv_write, reference.rope_kv_write, arguments, _num_bytes(heads, queries) + written + num_tokens * sizes.head_dim * 4,
        changed=(0, 4, 5), differs=differs,
    )  # fmt: skip


def _kv_write(device: torch.device, sizes: Sizes, dtype: torch.dtype, num_tokens: int) -> Trial:
    total = sizes.num_heads + 2 * sizes.num_kv_heads
    heads = _random(num_tokens, total, sizes.head_dim, dtype=dtype, device=device)
    key, value = heads[:, sizes.num_heads :].chunk(2, dim=1)
    caches = _caches(2 + num_tokens // BLOCK, sizes, dtype, device)
    arguments = (key, value, *caches, _places(num_tokens, device)[1])
    return Trial(kv_write, reference.kv_write, arguments, 2 * _num_bytes(key, value), changed=(2, 3))


def _rope(device: torch.device, sizes: Sizes, dtype: torch.dtype, num_tokens: int) -> Trial:
    heads = _random(num_tokens, sizes.num_heads + 2 * sizes.num_kv_heads, sizes.head_dim, dtype=dtype, device=device)
    x = heads[:, : -sizes.num_kv_heads]
    arguments = (x, _places(num_tokens, device)[0], _angles(sizes, device))
    return Trial(rope, reference.rope, arguments, 2 * _num_bytes(x) + num_tokens * sizes.head_dim * 4, changed=(0,))


def _rms_norm(device: torch.device, sizes: Sizes, dtype: torch.dtype, num_tokens: int) -> Trial:
    x = _random(num_tokens, sizes.hidden, dtype=dtype, device=device)
    weight = _random(sizes.hidden, dtype=dtype, device=device)
    torch_has = ("F.rms_norm", lambda: F.rms_norm(x, (sizes.hidden,), weight, 1e-5))
    return Trial(rms_norm, reference.rms_norm, (x, weight, 1e-5), 2 * _num_bytes(x), torch_has=torch_has)


def _head_norm(device: torch.device, sizes: Sizes, dtype: torch.dtype, num_tokens: int) -> Trial:
    """The norm of the query heads in a fused projection, as in Qwen3."""
    heads = _random(num_tokens, sizes.num_heads + 2 * sizes.num_kv_heads, sizes.head_dim, dtype=dtype, device=device)
    x, weight = heads[:, : sizes.num_heads], _random(sizes.head_dim, dtype=dtype, device=device)
    return Trial(rms_norm, reference.rms_norm, (x, weight, 1e-5), 2 * _num_bytes(x))


def _add_rms_norm(device: torch.device, sizes: Sizes, dtype: torch.dtype, num_tokens: int) -> Trial:
    x, residual = (_random(num_tokens, sizes.hidden, dtype=dtype, device=device) for _ in range(2))
    weight = _random(sizes.hidden, dtype=dtype, device=device)
    return Trial(add_rms_norm, reference.add_rms_norm, (x, residual, weight, 1e-5), 4 * _num_bytes(x), changed=(1,))


def _silu_mul(device: torch.device, sizes: Sizes, dtype: torch.dtype, num_tokens: int) -> Trial:
    gate_up = _random(num_tokens, 2 * sizes.intermediate, dtype=dtype, device=device)
    return Trial(silu_mul, reference.silu_mul, (gate_up,), 3 * _num_bytes(gate_up) // 2)


def _linear(device: torch.device, sizes: Sizes, numerics: Numerics, rows: int) -> Trial:
    x = _random(rows, sizes.hidden, dtype=numerics.activations, device=device)
    weight = _random(sizes.intermediate, sizes.hidden, dtype=torch.float32, device=device)
    linear = make_linear(weight, None, numerics)
    num_bytes = linear.num_bytes + _num_bytes(x) + rows * sizes.intermediate * x.element_size()
    return Trial(
        linear, lambda x: F.linear(x, weight), (x,), num_bytes, 2 * rows * sizes.hidden * sizes.intermediate,
        torch_has=("F.linear, float32 weights", lambda: F.linear(x, weight)),
    )  # fmt: skip


def _w4a16(device: torch.device, sizes: Sizes, dtype: torch.dtype, rows: int, is_symmetric: bool = True) -> Trial:
    out_features, num_groups = sizes.intermediate, sizes.hidden // sizes.group
    x = _random(rows, sizes.hidden, dtype=dtype, device=device)
    packed = torch.randint(0, 256, (out_features, sizes.hidden // 2), dtype=torch.uint8, device=device)
    scales = torch.rand(num_groups, out_features, device=device).to(dtype) * 0.1
    zeros = None if is_symmetric else (torch.rand(num_groups, out_features, device=device) * 15).to(dtype)
    weight = _random(out_features, sizes.hidden, dtype=dtype, device=device)
    return Trial(
        linear_w4a16, reference.linear_w4a16, (x, packed, scales, zeros),
        _num_bytes(x, packed, scales) + rows * out_features * dtype.itemsize, 2 * rows * sizes.hidden * out_features, dtype,
        torch_has=(f"F.linear, {str(dtype)[6:]} weights", lambda: F.linear(x, weight)),
    )  # fmt: skip


def _w8a8(device: torch.device, sizes: Sizes, dtype: torch.dtype, rows: int, weights: torch.dtype = torch.int8) -> Trial:
    x = _random(rows, sizes.hidden, dtype=dtype, device=device)
    weight = _random(sizes.intermediate, sizes.hidden, dtype=dtype, device=device)
    quantized, scales = reference.quantize_rows(weight, weights)
    return Trial(
        linear_w8a8, reference.linear_w8a8, (x, quantized, scales),
        _num_bytes(x, quantized, scales) + rows * sizes.intermediate * dtype.itemsize, 2 * rows * sizes.hidden * sizes.intermediate,
        weights, torch_has=(f"F.linear, {str(dtype)[6:]} weights", lambda: F.linear(x, weight)),
    )  # fmt: skip


def _moe(device: torch.device, sizes: Sizes, dtype: torch.dtype, num_tokens: int) -> Trial:
    hidden, intermediate, num_experts = sizes.hidden, sizes.intermediate, sizes.num_experts
    x = _random(num_tokens, hidden, dtype=dtype, device=device)
    gate_up = _random(num_experts, 2 * intermediate, hidden, dtype=dtype, device=device) * hidden**-0.5
    down = _random(num_experts, hidden, intermediate, dtype=dtype, device=device) * intermediate**-0.5
    weights, experts = torch.randn(num_tokens, num_experts, device=device).softmax(1).topk(sizes.top_k)
    used = num_experts if device.type == "meta" else len(experts.unique())
    return Trial(
        fused_experts, reference.fused_experts, (x, gate_up, down, experts.to(torch.int32), weights),
        2 * _num_bytes(x) + _num_bytes(gate_up, down) * used // num_experts,
        6 * num_tokens * sizes.top_k * hidden * intermediate, dtype,
    )  # fmt: skip


def _logits(device: torch.device, sizes: Sizes, rows: int) -> torch.Tensor:
    return torch.randn(rows, sizes.vocab, device=device) * torch.linspace(2, 8, rows, device=device).unsqueeze(1)


def _penalties(device: torch.device, sizes: Sizes, rows: int, length: int) -> Trial:
    logits = _logits(device, sizes, rows)
    token_ids = torch.randint(0, sizes.vocab, (rows, length), dtype=torch.int32, device=device)
    token_ids[:, ::3] = 7
    numbers = [_int32([n] * rows, device) for n in (length // 2, length)]
    strengths = [torch.full((rows,), x, device=device) for x in (0.5, 0.25, 1.1)]
    arguments = (logits, token_ids, _int32(range(rows), device), *numbers, *strengths)
    touched = min(rows * length, logits.numel()) * 4
    return Trial(apply_penalties, reference.apply_penalties, arguments, _num_bytes(token_ids) + 2 * touched, changed=(0,))


def _token_mask(device: torch.device, sizes: Sizes, rows: int) -> Trial:
    logits = _logits(device, sizes, rows)
    masks = torch.randint(-(2**31), 2**31, (rows, -(-sizes.vocab // 32)), device=device).int()
    arguments = (logits, torch.arange(rows, device=device), masks)
    return Trial(apply_token_mask, reference.apply_token_mask, arguments, _num_bytes(logits) // 2 + _num_bytes(masks), changed=(0,))


def _logit_bias(device: torch.device, sizes: Sizes, rows: int) -> Trial:
    pairs = torch.randperm(rows * sizes.vocab)[: 20 * rows].to(device)
    arguments = (_logits(device, sizes, rows), pairs // sizes.vocab, pairs % sizes.vocab, torch.randn(len(pairs), device=device))
    return Trial(add_logit_bias, reference.add_logit_bias, arguments, len(pairs) * (16 + 12), changed=(0,))


def _min_p(device: torch.device, sizes: Sizes, rows: int) -> Trial:
    logits = _logits(device, sizes, rows)
    arguments = (logits, torch.full((rows,), 0.05, device=device))
    return Trial(
        apply_min_p, reference.apply_min_p, arguments, 2 * _num_bytes(logits), changed=(0,), once=True, differs=_kept_differ
    )


def _top_k_top_p(device: torch.device, sizes: Sizes, rows: int, top_k: int, top_p: float) -> Trial:
    logits = _logits(device, sizes, rows)
    arguments = (logits, _int32([top_k] * rows, device), torch.full((rows,), top_p, device=device))
    return Trial(
        apply_top_k_top_p, reference.apply_top_k_top_p, arguments, 2 * _num_bytes(logits), changed=(0,), once=True,
        differs=_kept_differ, torch_has=("Tensor.sort", lambda: logits.sort(dim=-1, descending=True)),
    )  # fmt: skip


def _gumbel(device: torch.device, sizes: Sizes, rows: int) -> Trial:
    logits = _logits(device, sizes, rows)
    greedy = torch.arange(rows, device=device) % 8 == 7
    seeds, positions = torch.arange(rows, device=device) - 3, torch.arange(rows, device=device) * 1000
    torch_has = ("Tensor.argmax", lambda: logits.argmax(dim=-1))
    return Trial(
        gumbel_argmax, reference.gumbel_argmax, (logits, greedy, seeds, positions), _num_bytes(logits), torch_has=torch_has
    )


def _logprobs(device: torch.device, sizes: Sizes, rows: int) -> Trial:
    logits = _logits(device, sizes, rows)
    token_ids = torch.randint(0, sizes.vocab, (rows, 6), device=device)
    torch_has = ("log_softmax", lambda: logits.log_softmax(dim=-1))
    return Trial(gather_logprobs, reference.gather_logprobs, (logits, token_ids), _num_bytes(logits), torch_has=torch_has)


def _steps(sizes: Sizes, dtype: torch.dtype, cache_dtype: torch.dtype, num_tokens: int) -> Iterator[Case]:
    """The operations of a layer that do not depend on the requests of its tokens."""
    name = f"{num_tokens} tokens"

    def case(operation: str, make: Callable[..., Trial], tolerances: dict[torch.dtype, float] = TOLERANCE, *more: Any) -> Case:
        return Case(operation, name, dtype, lambda device: make(device, sizes, dtype, *more, num_tokens), tolerances)

    yield case("add_rms_norm", _add_rms_norm)
    yield case("rms_norm", _rms_norm)
    yield Case("rms_norm", f"{num_tokens} tokens, heads", dtype, lambda device: _head_norm(device, sizes, dtype, num_tokens))
    rounding = ROTATION_TOLERANCE[cache_dtype] if cache_dtype.itemsize < dtype.itemsize else 0.0
    looser = {dtype: max(ROTATION_TOLERANCE[dtype], rounding)}
    yield case("rope_kv_write", _rope_kv_write, looser, cache_dtype)
    yield case("rope", _rope, ROTATION_TOLERANCE)
    yield case("kv_write", _kv_write, EXACT)
    yield case("silu_mul", _silu_mul)


def _quantized(sizes: Sizes, dtype: torch.dtype, rows: int, float8: bool) -> Iterator[Case]:
    yield Case("w4a16", f"{rows} rows", dtype, lambda device: _w4a16(device, sizes, dtype, rows))
    yield Case("w8a8", f"{rows} rows, int8", dtype, lambda device: _w8a8(device, sizes, dtype, rows))
    if float8:
        make = lambda device: _w8a8(device, sizes, dtype, rows, torch.float8_e4m3fn)  # noqa: E731
        yield Case("w8a8", f"{rows} rows, float8", dtype, make, FLOAT8_TOLERANCE)


def _sampling(
    sizes: Sizes, rows: int, length: int, filters: tuple[tuple[int, float], ...] = ((50, 0.9), (0, 0.95), (20, 1.0))
) -> Iterator[Case]:
    name, dtype = f"{rows} x {sizes.vocab}", torch.float32
    yield Case("penalties", f"{name}, {length} tokens", dtype, lambda device: _penalties(device, sizes, rows, length))
    yield Case("logit_bias", name, dtype, lambda device: _logit_bias(device, sizes, rows), EXACT)
    yield Case("token_mask", name, dtype, lambda device: _token_mask(device, sizes, rows), EXACT)
    yield Case("min_p", name, dtype, lambda device: _min_p(device, sizes, rows), EXACT)
    for top_k, top_p in filters:
        make = lambda device, top_k=top_k, top_p=top_p: _top_k_top_p(device, sizes, rows, top_k, top_p)  # noqa: E731
        yield Case("top_k_top_p", f"{name}, k {top_k}, p {top_p}", dtype, make, EXACT)
    yield Case("gumbel", name, dtype, lambda device: _gumbel(device, sizes, rows), EXACT)
    yield Case("logprobs", f"{name}, 6 a row", dtype, lambda device: _logprobs(device, sizes, rows))


def _attention_case(name: str, sizes: Sizes, dtype: torch.dtype, cache_dtype: torch.dtype, *arguments: Any, **more: Any) -> Case:
    rounding = TOLERANCE[dtype]
    return Case(
        "attention",
        name,
        dtype,
        lambda device: _attention(device, sizes, dtype, cache_dtype, *arguments, **more),
        {dtype: rounding},
    )


def checks(sizes: Sizes, dtype: torch.dtype, float8: bool) -> Iterator[Case]:
    """Cases to compare with the twins: shapes that fill no tile, and some that do. Sampling is always float32."""
    contexts, query_lens = [1, 17, 600, 1337, 64, 90], [1, 1, 1, 37, 64, 1]
    if sizes is TINY:
        contexts, query_lens = [1, 33, 20, 40], [1, 1, 20, 7]
    longest = max(contexts)
    for name, more in (("", {}), (", window", {"window": longest // 3}), (", soft cap", {"soft_cap": 2.0})):
        yield _attention_case(f"mixed batch{name}", sizes, dtype, dtype, contexts, query_lens, **more)
    yield _attention_case("decodes", sizes, dtype, dtype, contexts, [1] * len(contexts))
    if dtype is torch.float32:
        yield _attention_case("decodes, float16 cache", sizes, dtype, torch.float16, contexts, [1] * len(contexts))
    num_tokens = 5 if sizes is TINY else 133
    yield from _steps(sizes, dtype, dtype, num_tokens)
    for rows in (3, 19) if sizes is TINY else (1, 19, 133):
        yield from _quantized(sizes, dtype, rows, float8)
    yield Case("w4a16", "2 rows, zeros", dtype, lambda device: _w4a16(device, sizes, dtype, 2, is_symmetric=False))
    for num_tokens in (5,) if sizes is TINY else (1, 23, 300):
        yield Case("moe", f"{num_tokens} tokens", dtype, lambda device, n=num_tokens: _moe(device, sizes, dtype, n))
    if dtype is torch.float32:
        if sizes is TINY:
            yield from _sampling(sizes, 3, 40, ((50, 0.9),))
        else:
            yield from _sampling(sizes, 9, 40)


def cpu_products(sizes: Sizes, batches: list[int]) -> Iterator[Case]:
    """Products by the CPU's kernels for 16-bit weights and for blocks of 8 bits."""
    for dtype, quantization in (("float16", "none"), ("bfloat16", "none"), ("float16", "int8")):
        numerics = Numerics.choose(dtype, quantization, torch.device("cpu"))
        for rows in batches:
            make = lambda device, numerics=numerics, rows=rows: _linear(device, sizes, numerics, rows)  # noqa: E731
            yield Case("linear", f"{rows} rows, {numerics}", torch.float32, make)


def timings(
    sizes: Sizes, dtype: torch.dtype, cache_dtype: torch.dtype, batches: list[int], context: int, prompt: int, float8: bool
) -> Iterator[Case]:
    """Cases to time: decodes at `context` tokens in each batch size, and a prompt."""
    for batch in batches:
        name = f"{batch} decodes at {context}"
        yield _attention_case(name, sizes, dtype, cache_dtype, [context] * batch, [1] * batch)
    yield _attention_case(f"a prompt of {prompt}", sizes, dtype, cache_dtype, [prompt], [prompt])
    for num_tokens in (batches[-1], prompt):
        yield from _steps(sizes, dtype, cache_dtype, num_tokens)
    for rows in (*batches, prompt):
        yield from _quantized(sizes, dtype, rows, float8)
    for num_tokens in (batches[-1], prompt):
        yield Case("moe", f"{num_tokens} tokens", dtype, lambda device, n=num_tokens: _moe(device, sizes, dtype, n))
    yield from _sampling(sizes, batches[-1], min(context, 1024))
