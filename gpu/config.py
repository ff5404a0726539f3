"""Configuration of model, cache and parallelism: what a worker is started with. Torch-free; the engine's tree contains it.

Each field is one option: its name in kebab-case is the command-line flag, `HEADRACE_` plus its name the environment variable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# What a numeric class costs in perplexity against float32 on a CPU: SmolLM2-135M from a Q4_1 file, by `benchmarks.perplexity`.
PERPLEXITY_COSTS = {"gguf": "+0.4 %", "int8": "+0.6 %", "bfloat16": "less than 0.1 %", "float16": "less than 0.1 %"}


def option(default: Any, help: str, **more: Any) -> Any:
    """A field of a configuration section with its help text; `more` is kept in the field's metadata."""
    metadata = {"help": help, **more}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelConfig:
    model: str = option("", "a safetensors directory, a .gguf file or a directory with one, or `demo`", positional=True)
    dtype: str = option(
        "auto",
        "type of weights that are not quantized; auto: bfloat16 on GPUs and on CPUs that multiply it (AVX512_BF16), else float16. "
        "On the CPU sums and what flows between layers stay float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = option(
        "auto",
        "on the CPU, weights and activations of matrix products in small integers, a scale for each block of them. "
        "int8: weights of 8 bits; gguf: a GGUF file's blocks as they are; auto: gguf for a quantized GGUF file on the CPU, "
        "unless --dtype is given, else none",
        choices=("auto", "none", "int8", "gguf"),
    )
    weights_cache_dir: str = option(
        "", "where packed weights are kept, to be mapped by all engines of the machine and at the next start; `none`: nowhere"
    )
    device: str = option("auto", "cpu or cuda; auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    max_model_len: int | None = option(
        None, "longest prompt plus output in tokens (1k, 2K allowed); default: the model's own; -1: as many as fit"
    )
    max_logprobs: int = option(20, "most logprobs a request may ask for a token; -1: the whole vocabulary")
    logprobs_mode: str = option(
        "raw_logprobs", "before or after penalties, temperature and filters", choices=("raw_logprobs", "processed_logprobs")
    )
    load_format: str = option(
        "auto",
        "dummy: random weights from --seed, for tests and benchmarks; null: no model at all, tokens by a hash",
        choices=("auto", "dummy", "null"),
    )
    seed: int = option(0, "seed of dummy weights")
    enforce_eager: bool = option(False, "GPUs: launch decodes kernel by kernel, without CUDA graphs: starts faster, decodes slower")
    cuda_graph_sizes: list[int] = option(
        list, "numbers of decoding requests for which a CUDA graph is captured; default: 1 to 512 in growing steps; repeatable"
    )


@dataclass
class CacheConfig:
    block_size: int = option(16, "tokens in a KV block")
    gpu_memory_utilization: float = option(
        0.92, "share of the device's memory for weights and KV (CPU: of the memory available, KV of all engines at most 4 GiB)"
    )
    kv_cache_memory_bytes: int | None = option(
        None, "KV memory of an engine in bytes (suffixes K, M, G), instead of --gpu-memory-utilization"
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of keys and values; auto: the weights' type, float16 where they are quantized",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    num_gpu_blocks_override: int | None = option(None, "number of KV blocks, instead of a size in bytes")
    enable_prefix_caching: bool = option(True, "answer shared prompt prefixes from KV computed before")


@dataclass
class ParallelConfig:
    tensor_parallel_size: int = option(1, "ranks that share each layer; must divide the model's key-value heads")
    data_parallel_size: int = option(
        0,
        "engines that `serve` starts on this machine, replicas on one queue; 0: 1 on GPUs, by the cores on the CPU. "
        "`engine` starts one, which takes its part of memory and cores",
    )
    data_parallel_rank: int = option(
        0, "an engine's number among replicas: the slot that it takes where nobody holds it, else the lowest free one"
    )
    distributed_executor_backend: str = option(
        "mp", "mp: a process a rank; uni: the worker lives in the engine's process", choices=("mp", "uni")
    )
    num_threads: int = option(
        0,
        "compute threads a worker; 0: on two cores both, for each engine; on more the cores, shared among engines and ranks, of "
        "which one engine leaves one to the front end",
    )


@dataclass
class WorkerConfig:
    """All that a worker process needs, as plain numbers that the engine resolved."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 512


@dataclass
class Capacity:
    """What a worker reports after loading and profiling."""

    max_model_len: int  # tokens: the model's own limit
    vocab_size: int
    dtype: str
    device: str
    weight_bytes: int
    block_bytes: int  # KV of one block on this rank, all layers
    available_kv_bytes: int
    fingerprint: str  # weights, dtype and numeric class of the kernels; equal on engines that may take over each other's requests
    profiled_seconds_per_token: float = 0.0  # of a full prefill step; 0: not measured
