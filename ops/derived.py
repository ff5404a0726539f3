"""Values that `serve` and a running engine settled because the configuration left them open, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.config import ServeConfig
from engine.protocol import EngineInfo
from engine.runtime.capacity import step_limits
from gpu.config import PERPLEXITY_COSTS

Row = tuple[str, int | str, str]  # setting, value, reason


def derived_values(config: ServeConfig, info: EngineInfo, parallel: Mapping[str, str]) -> list[Row]:
    """Rows (setting, value, reason) of what `info`, an engine of this configuration, was left to settle.

    parallel: reasons for what the configuration was not given but has by now.
    """
    by_device = f"default on {info.device}"
    rows: list[Row] = [(name, getattr(config.parallel, name), why) for name, why in parallel.items()]
    if config.model.device == "auto":
        rows.append(("device", info.device, "a GPU is there" if info.device != "cpu" else "no GPU is there"))
    quantization, _, dtype = info.dtype.rpartition("-")
    if config.model.quantization == "auto":
        rows.append(("quantization", quantization or "none", _quantization_reason(config, info, quantization)))
    if config.model.dtype == "auto":
        reason = "of what is not quantized" if quantization else f"{by_device}{_cost(dtype)}"
        rows.append(("dtype", dtype, reason))
    if config.model.max_model_len is None:
        rows.append(("max_model_len", info.max_model_len, "the model's own"))
    elif config.model.max_model_len == -1:
        rows.append(("max_model_len", info.max_model_len, "as many as fit the KV cache, up to the model's own"))
    if config.scheduler.max_num_batched_tokens is None:
        rows.append(("max_num_batched_tokens", info.max_num_batched_tokens, _budget_reason(config, info, by_device)))
    if config.scheduler.max_num_seqs is None:
        rows.append(("max_num_seqs", info.max_num_seqs, by_device))
    if config.cache.num_gpu_blocks_override is None:
        size = "kv_cache_memory_bytes" if config.cache.kv_cache_memory_bytes else "gpu_memory_utilization"
        each = " in each engine" if config.parallel.data_parallel_size > 1 else ""
        rows.append(("num_gpu_blocks", info.num_blocks, f"what {size} leaves room for{each}, {info.block_size} tokens each"))
    return rows


def _quantization_reason(config: ServeConfig, info: EngineInfo, quantization: str) -> str:
    if quantization:
        return f"the file's own blocks are fastest on a CPU{_cost(quantization)}; --dtype takes others"
    if info.device == "cpu" and config.model.dtype != "auto":
        return "dtype is given"
    return "no quantized blocks that can be used as they are" if info.device == "cpu" else "for CPUs only"


def _cost(numeric_class: str) -> str:
    cost = PERPLEXITY_COSTS.get(numeric_class)
    return f"; perplexity {cost} against float32" if cost else ""


def common_values(by_engine: Sequence[Sequence[Row]]) -> list[tuple[str, list[tuple[int | str, str]]]]:
    """Of each setting, what the engines settled: (value, reason), once where all are of one mind, else of each in their order."""
    settled = []
    for same in zip(*by_engine, strict=True):
        choices = [(value, reason) for _, value, reason in same]
        settled.append((same[0][0], choices[:1] if len(set(choices)) == 1 else choices))
    return settled


def _budget_reason(config: ServeConfig, info: EngineInfo, by_device: str) -> str:
    if info.device == "cpu" and info.max_num_batched_tokens < step_limits(config.scheduler, "cpu")[0]:
        return "measured: a full step stays under half a second"
    return by_device
