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
    model: str = option(
        "",
        "a directory with safetensors, a .gguf file (of a split model the first part), a directory with one GGUF model, or `demo`",
        positional=True,
    )
    dtype: str = option(
        "auto",
        "type of weights that are not quantized; auto: bfloat16 on GPUs, and on CPUs with AVX512_BF16 where no weights are "
        "quantized, else float16; on a CPU, sums and activations between layers are float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = option(
        "auto",
        "on a CPU, small integers for weights and activations in matrix products; int8: weights of 8 bits, in "
        "blocks with a scale each; gguf: a GGUF file's own blocks; auto: gguf for a quantized GGUF file unless "
        "--dtype is given, else none",
        choices=("auto", "none", "int8", "gguf"),
    )
    weights_cache_dir: str = option(
        "",
        "folder for packed weights, shared by all engines of the machine and by later starts; default: under "
        "HEADRACE_CACHE_DIR; `none`: each engine keeps its own in memory",
    )
    device: str = option("auto", "device that computes; auto: cuda if there is a GPU, else cpu", choices=("auto", "cpu", "cuda"))
    max_model_len: int | None = option(
        None,
        "most tokens of a prompt and its output together (1k and 2K are allowed); default: the model's own limit; "
        "-1: as many as fit",
    )
    max_logprobs: int = option(
        20,
        "most logprobs that a request may ask for, for each token, within --max-request-logprobs in all; -1: the vocabulary",
    )
    logprobs_mode: str = option(
        "raw_logprobs",
        "raw_logprobs: before penalties, temperature and filters; processed_logprobs: after them",
        choices=("raw_logprobs", "processed_logprobs"),
    )
    load_format: str = option(
        "auto",
        "auto: the model's weights; dummy: random weights from --seed, for tests and benchmarks; null: no model, "
        "tokens from a hash; scripted: no model, its tokenizer and the texts of --script",
        choices=("auto", "dummy", "null", "scripted"),
    )
    script: str = option("", "YAML file with the answers of --load-format scripted (docs/operating.md)")
    trust_remote_code: bool = option(False, "accepted for vLLM's sake; code of a model's repository is never run")
    seed: int = option(0, "seed of the random weights of --load-format dummy")
    enforce_eager: bool = option(False, "on GPUs, no CUDA graphs: starts faster, decodes slower")
    cuda_graph_sizes: list[int] = option(
        list,
        "on GPUs, numbers of decoding requests for which a CUDA graph is captured; default: growing steps from 1 "
        "to 512; repeatable",
    )

    @property
    def computes_nothing(self) -> bool:
        """A stand-in takes the model's place: no weights, no KV, no threads."""
        return self.load_format in ("null", "scripted")


@dataclass
class CacheConfig:
    block_size: int = option(16, "tokens in a KV block")
    gpu_memory_utilization: float = option(
        0.92,
        "share of the device's memory for weights and KV; on a CPU, share of the available memory, with at most 4 "
        "GiB of KV for all engines together",
    )
    kv_cache_memory_bytes: int | None = option(
        None, "KV memory of each engine in bytes (suffixes K, M, G); replaces --gpu-memory-utilization"
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of keys and values; auto: the weights' type, float16 if they are quantized",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    num_gpu_blocks_override: int | None = option(None, "number of KV blocks of each engine; replaces the number that memory allows")
    enable_prefix_caching: bool = option(True, "reuse the KV of prompt prefixes that were computed before")


@dataclass
class ParallelConfig:
    tensor_parallel_size: int = option(1, "ranks that share each layer; must divide the model's number of key-value heads")
    data_parallel_size: int = option(
        0,
        "engines on this machine that share one queue; `serve` starts that many, `engine` takes its part of "
        "memory and cores; 0: one on GPUs, by the cores on a CPU",
    )
    data_parallel_rank: int = option(
        0,
        "number of this engine among the engines of --data-parallel-size; it takes the slot of that number if it "
        "is free, else the lowest free one",
    )
    distributed_executor_backend: str = option(
        "mp", "mp: a process for each rank; uni: the worker runs in the engine's process", choices=("mp", "uni")
    )
    num_threads: int = option(
        0,
        "compute threads of a worker; 0: two on a machine with two cores; on others the cores divided among "
        "engines and ranks, and a single engine leaves one to the API server",
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
    """The report of a worker after loading and profiling."""

    max_model_len: int  # tokens: the model's own limit
    vocab_size: int
    dtype: str
    device: str
    weight_bytes: int
    block_bytes: int  # KV of one block on this rank, all layers
    available_kv_bytes: int
    fingerprint: str  # weights, dtype and numeric class of the kernels; equal on engines that may take over each other's requests
    profiled_seconds_per_token: float = 0.0  # of a prompt in one thread, without what its tokens attend to; 0: not measured
    profiled_seconds_per_context: float = 0.0  # more of a token for each that it attends to
    sure_threads: int = 1  # of a step while all engines of the machine compute; it may borrow more from idle ones
