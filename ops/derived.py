"""Values that `serve` and a running engine settled because the configuration left them open, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from engine.config import ServeConfig
from engine.runtime.capacity import step_limits
from gpu.config import PERPLEXITY_COSTS

if TYPE_CHECKING:
    from engine.protocol import EngineInfo

Row = tuple[str, int | str, str]  # setting, value, reason


def derived_values(config: ServeConfig, info: EngineInfo, parallel: Mapping[str, str]) -> list[Row]:
    """Rows (setting, value, reason) of the settings that an engine of this configuration chose; `info` has its choices.

    parallel: the settings that `serve` chose, with its reasons.
    """
    by_device = f"default on {info.device}"
    rows: list[Row] = [(name, getattr(config.parallel, name), why) for name, why in parallel.items()]
    if config.model.device == "auto":
        rows.append(("device", info.device, "there is a GPU" if info.device != "cpu" else "there is no GPU"))
    quantization, _, dtype = info.dtype.rpartition("-")
    if config.model.quantization == "auto":
        rows.append(("quantization", quantization or "none", _quantization_reason(config, info, quantization)))
    if config.model.dtype == "auto":
        reason = "for weights that are not quantized" if quantization else f"{by_device}{_cost(dtype)}"
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
        rows.append(("num_gpu_blocks", info.num_blocks, f"as many as {size} allows{each}, of {info.block_size} tokens"))
    return rows


def _quantization_reason(config: ServeConfig, info: EngineInfo, quantization: str) -> str:
    if quantization:
        return f"the file's own blocks are fastest on a CPU{_cost(quantization)}; --dtype chooses another class"
    if info.device == "cpu" and config.model.dtype != "auto":
        return "dtype is given"
    return "the file has no quantized blocks that a kernel can use" if info.device == "cpu" else "for CPUs only"


def _cost(numeric_class: str) -> str:
    cost = PERPLEXITY_COSTS.get(numeric_class)
    return f"; perplexity {cost} against float32" if cost else ""


def common_values(by_engine: Sequence[Sequence[Row]]) -> list[tuple[str, list[tuple[int | str, str]]]]:
    """The engines' (value, reason) for each setting: one if all are equal, else one for each engine in their order."""
    settled = []
    for same in zip(*by_engine, strict=True):
        choices = [(value, reason) for _, value, reason in same]
        settled.append((same[0][0], choices[:1] if len(set(choices)) == 1 else choices))
    return settled


def _budget_reason(config: ServeConfig, info: EngineInfo, by_device: str) -> str:
    if info.device == "cpu" and info.max_num_batched_tokens < step_limits(config.scheduler, "cpu")[0]:
        return "measured: a full step stays under half a second"
    return by_device
