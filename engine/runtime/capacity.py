"""The limits of an engine: defaults by device, and the fit of the KV cache to memory and context length."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.config import SchedulerConfig
from engine.scheduling.step_cost import NO_COST, StepCost, StepPace
from gpu.config import CacheConfig, Capacity, ModelConfig

CPU_STEP_SECONDS = 0.5  # a longer step of a CPU would hold up every stream
CPU_MAX_BATCHED_TOKENS = 512
CPU_MAX_SEQS = 128
GIB = 1 << 30


class DoesNotFit(Exception):
    """The configuration asks for more than the device has; the text says what is needed, available and feasible."""


@dataclass(frozen=True)
class Limits:
    max_model_len: int  # tokens
    num_blocks: int  # the null block included
    max_num_batched_tokens: int
    max_num_seqs: int


def step_limits(config: SchedulerConfig, device: str, memory_bytes: int = 0, device_name: str = "") -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) as configured, else by device: what vLLM's API server defaults to on the same GPU."""
    if device == "cpu":
        tokens, seqs = CPU_MAX_BATCHED_TOKENS, CPU_MAX_SEQS
    elif memory_bytes >= 160 * GIB:
        tokens, seqs = 16384, 1024
    elif memory_bytes >= 70 * GIB and not any(name in device_name for name in ("A100", "GB10")):
        tokens, seqs = 8192, 1024
    else:
        tokens, seqs = 2048, 256
    return config.max_num_batched_tokens or tokens, config.max_num_seqs or seqs


def step_cost(config: SchedulerConfig, capacity: Capacity) -> StepCost:
    """What the worker measured of steps, where their length is limited: on a CPU whose token budget was not configured."""
    if config.max_num_batched_tokens or capacity.device != "cpu" or not capacity.profiled_seconds_per_token:
        return NO_COST
    return StepCost(per_token=capacity.profiled_seconds_per_token, per_context=capacity.profiled_seconds_per_context)


def step_pace(cost: StepCost, capacity: Capacity) -> StepPace:
    return StepPace(math.inf if cost is NO_COST else CPU_STEP_SECONDS, capacity.sure_threads)


def calibrated_budget(budget: int, cost: StepCost) -> int:
    """The token budget, lowered so that a step of one prompt's first tokens takes half a second at most, never below 128."""
    if cost is NO_COST:
        return budget
    return min(budget, max(128, int(cost.tokens_within(CPU_STEP_SECONDS, 0)) // 32 * 32))


def fit_kv_cache(model: ModelConfig, cache: CacheConfig, capacity: Capacity) -> tuple[int, int]:
    """(max_model_len, num_blocks) that the memory allows.

    A context length that was asked for, or the model's own, must fit in full; -1 takes what fits. Raises `DoesNotFit`.
    """
    block = cache.block_size
    num_blocks = cache.num_gpu_blocks_override or capacity.available_kv_bytes // capacity.block_bytes
    feasible = max(0, num_blocks - 1) * block  # block 0 is the null block
    if model.max_model_len == -1:
        if feasible < block:
            raise DoesNotFit(_explain(block, capacity, cache, feasible))
        return min(feasible, capacity.max_model_len), num_blocks
    if model.max_model_len is not None and model.max_model_len > capacity.max_model_len:
        raise DoesNotFit(
            f"--max-model-len {model.max_model_len} is more than the model was made for: {capacity.max_model_len} tokens."
        )
    wanted = model.max_model_len or capacity.max_model_len
    if wanted > feasible:
        raise DoesNotFit(_explain(wanted, capacity, cache, feasible))
    return wanted, num_blocks


def _explain(wanted: int, capacity: Capacity, cache: CacheConfig, feasible: int) -> str:
    needed = (-(-wanted // cache.block_size) + 1) * capacity.block_bytes
    available = capacity.available_kv_bytes
    if cache.num_gpu_blocks_override:
        available = cache.num_gpu_blocks_override * capacity.block_bytes
    return (
        f"The KV cache of one request of {wanted} tokens needs {_mib(needed)}, but {_mib(available)} are available for it. "
        f"The longest feasible length is {feasible} tokens: use --max-model-len {max(feasible, cache.block_size)} "
        "(or -1 for as many as fit), or give it more memory with --kv-cache-memory-bytes or --gpu-memory-utilization."
    )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"
