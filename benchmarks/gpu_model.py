"""A model of random weights, made where it runs, and steps of a runner in this process: prompts and decodes, checked and timed."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.driver import Driver
from gpu.checkpoint.architecture import ArchitectureConfig
from gpu.checkpoint.weights import Checkpoint
from gpu.config import CacheConfig, ModelConfig, ParallelConfig, WorkerConfig
from gpu.plan import SamplingParams
from gpu.runner.cuda_graphs import PaddedDecode
from gpu.runner.runner import ModelRunner
from kernels import device as kernel_device
from kernels import reference

BLOCK = 16
LLAMA_8B: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
    num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5,
    rope_theta=500000.0, tie_word_embeddings=False,
)  # fmt: skip
SMALL: dict[str, Any] = LLAMA_8B | dict(
    vocab_size=1003, hidden_size=512, intermediate_size=1000, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2
)
TINY: dict[str, Any] = LLAMA_8B | dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512,
)  # fmt: skip


class RandomCheckpoint(Checkpoint):
    """Weights of variance 1/in_features, made on the device, which takes a CPU minutes for a large model. Norms are 1."""

    def __init__(self, config: ArchitectureConfig, device: torch.device) -> None:
        super().__init__(config)
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def _read(self, name: str, dtype: torch.dtype, rows: range, columns: range | None) -> torch.Tensor:
        if columns is None:
            return torch.ones(len(rows), dtype=dtype)
        shape = (len(rows), len(columns))
        return torch.randn(shape, dtype=dtype, device=self.device, generator=self.generator).mul_(len(columns) ** -0.5).cpu()

    def content_hash(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self.config), sort_keys=True).encode()).hexdigest()

    def describe(self) -> str:
        return "the random checkpoint"


class Model(Driver):
    """A model of random weights; `decode_graphs` decodes from graphs on a GPU, and with the same padding on a CPU."""

    def __init__(self, config: dict[str, Any], device: torch.device, dtype: str, max_num_seqs: int, max_len: int) -> None:
        worker = WorkerConfig(
            ModelConfig(dtype=dtype, device=device.type),
            CacheConfig(block_size=BLOCK),
            ParallelConfig(num_threads=1, distributed_executor_backend="uni"),
            max_num_seqs=max_num_seqs,
        )
        super().__init__(worker, RandomCheckpoint(ArchitectureConfig.from_hf_config(config), device), device, max_len)
        runner = self.runner
        if runner.decode is None:
            width, activations = runner.batch.block_tables.shape[1], runner.numerics.activations
            runner.decode = PaddedDecode(runner.model, runner.kv, sorted({1, 4, max_num_seqs}), width, activations, device)
        self.decode_graphs = runner.decode


def compare_logits(model: Model, lengths: list[int]) -> dict[str, list[torch.Tensor]]:
    """Logits of the same steps in three ways: by the kernels, "padded" through graphs, and by the kernels' plain-torch twins.

    Steps: prompts of these lengths together, a chunk more of the first beside decodes of the others, decodes of all, of a few.
    """
    rows = list(range(len(lengths)))
    one_token = SamplingParams(temperature=0.0, allowed_token_ids=[7])  # the same input, whatever a way computes

    def steps() -> None:
        model.generator = np.random.default_rng(1)
        new = [model.new(row, length + (3 if row == 0 else 0), sampling=one_token) for row, length in enumerate(lengths)]
        model.execute(new, rows, lengths)
        model.execute([], rows, [3] + [1] * (len(rows) - 1))
        model.execute([], rows, [1] * len(rows))
        model.execute([], rows[:2], [1] * len(rows[:2]))
        model.free()

    found = {}
    for way in ("kernels", "padded", "twins"):
        model.runner.decode = model.decode_graphs if way == "padded" else None
        with _recorded_logits(model.runner) as logits, _twins() if way == "twins" else mock.patch.dict({}):
            steps()
        found[way] = logits
    return found


@contextmanager
def _recorded_logits(runner: ModelRunner) -> Iterator[list[torch.Tensor]]:
    recorded: list[torch.Tensor] = []
    sampler = runner.sampler

    def record(logits: torch.Tensor, *rest: Any) -> Any:
        recorded.append(logits.clone())
        return sampler(logits, *rest)

    runner.sampler = record  # type: ignore[assignment]
    try:
        yield recorded
    finally:
        runner.sampler = sampler


def _twins() -> Any:
    """Use the kernels' plain-torch twins, as where Triton is not installed."""
    return mock.patch.object(kernel_device, "accelerated", lambda operation, function: getattr(reference, function))


@dataclass
class StepTime:
    name: str
    seconds: float
    tokens: int  # that a step computes
    bound: float  # seconds: weights and KV at the bandwidth of a copy, products at the rate of a large one


def time_steps(
    model: Model, batches: list[int], context: int, prompt: int, num_steps: int, bandwidth: float, rate: float
) -> Iterator[StepTime]:
    """Medians of decodes, launched and replayed from graphs, and of a prompt. KV of contexts is what lies in memory."""
    runner, config = model.runner, model.runner.model.config
    model.fill_kv()
    head = config.vocab_size * config.hidden_size
    matrices = sum(shape[0] * shape[1] for name, shape in config.tensor_shapes().items() if "layers" in name and len(shape) == 2)
    itemsize = runner.numerics.weights.itemsize
    token_kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * runner.kv_dtype.itemsize
    for batch in batches:
        work = (matrices + head) * itemsize + batch * context * token_kv
        bound = max(work / bandwidth, 2 * batch * (matrices + head) / rate)
        for name, decode in (("launched", None), ("graph", model.decode_graphs)):
            runner.decode = decode
            model.start_decodes(batch, context)
            seconds = _median(lambda batch=batch: model.decode(batch), num_steps)
            model.free()
            yield StepTime(f"{batch} decodes at {context}, {name}", seconds, batch, bound)

    attention = 2 * prompt * prompt * config.num_layers * config.num_heads * config.head_dim
    bound = max((matrices + head) * itemsize / bandwidth, (2 * prompt * matrices + 2 * head + attention) / rate)
    model.prefill(prompt)
    yield StepTime(f"a prompt of {prompt}", _median(lambda: model.prefill(prompt), max(3, num_steps // 4)), prompt, bound)


def _median(step: Callable[[], float], count: int) -> float:
    step()
    return statistics.median(step() for _ in range(count))


def time_transformers(
    config: dict[str, Any], device: torch.device, dtype: torch.dtype, batches: list[int], context: int, prompt: int, num_steps: int
) -> Iterator[StepTime]:
    """transformers' own generate, greedy, of a model of this shape. A decode's time: that of num_steps + 1 tokens less that of one,
    over num_steps. Raises ModuleNotFoundError where transformers is not installed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    names = {name: value for name, value in config.items() if name not in ("architectures", "model_type", "rope_theta")}
    hf_config = LlamaConfig(
        **names, rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]}, eos_token_id=None
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(hf_config).eval()
    finally:
        torch.set_default_dtype(before)

    def generate(ids: torch.Tensor, count: int) -> float:
        started = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    def ids(batch: int, length: int) -> torch.Tensor:
        return torch.randint(0, config["vocab_size"], (batch, length), device=device)

    for batch in batches:
        tokens = ids(batch, context)
        generate(tokens, 2)
        first = min(generate(tokens, 1) for _ in range(2))
        seconds = (generate(tokens, num_steps + 1) - first) / num_steps
        yield StepTime(f"{batch} decodes at {context}", seconds, batch, 0.0)
    tokens = ids(1, prompt)
    generate(tokens, 1)
    yield StepTime(f"a prompt of {prompt}", min(generate(tokens, 1) for _ in range(3)), prompt, 0.0)
