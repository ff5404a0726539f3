"""One rank's model at work: loads it, says how much KV fits, executes steps."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch

from gpu import machine
from gpu.checkpoint.packed_weights import open_weights, packed_name
from gpu.checkpoint.weights import Checkpoint
from gpu.config import Capacity, WorkerConfig
from gpu.distributed import TensorParallelGroup
from gpu.errors import CheckpointError, UnsupportedConfiguration
from gpu.machine import compute_threads, sure_threads
from gpu.models.kv_cache import KVCache
from gpu.models.load import load_model
from gpu.numerics import DTYPES, Numerics
from gpu.plan import Int32Array, ModelRunnerOutput, PromptLogprobs, SchedulerOutput
from gpu.runner.compiled_grammars import grammar_tokenizer
from gpu.runner.core_lock import Cores
from gpu.runner.cuda_graphs import CudaGraphs, PaddedDecode, capture_sizes
from gpu.runner.grammars import Grammars, TokenMasks
from gpu.runner.input_batch import OVERRUN, Batch, Step
from gpu.runner.profile import Profiler
from gpu.runner.sampler import Sampler, top_logprobs
from gpu.runner.step_parts import Part, Team, count_parts, split
from gpu.runner.step_profile import kept_profile
from gpu.runner.thread_choice import ThreadChoice

logger = logging.getLogger(__name__)

# Changes whenever kernels or layers change what they compute beyond the last bits of float32: engines of different numerics must
# not take over each other's requests.
NUMERICS_VERSION = 7
PROMPT_LOGPROB_ROWS = 64  # positions whose logits stand in memory at once: 12 MB at a vocabulary of 49152


class ModelRunner:
    """`load`, `capacity`, `allocate_kv`, then `execute` a step after the other. All ranks of a group make the same calls."""

    def __init__(self, config: WorkerConfig, checkpoint: Checkpoint, device: torch.device, group: TensorParallelGroup) -> None:
        """Raises CheckpointError or UnsupportedConfiguration for options that cannot work, before anything is loaded."""
        self.config = config
        self.checkpoint = checkpoint
        self.device = device
        self.group = group
        if config.model.quantization == "gguf" and not checkpoint.is_quantized:
            raise CheckpointError(f"{checkpoint.describe()} has no quantized blocks: --quantization gguf is for GGUF files that do")
        self.numerics = self._choose_numerics()
        self.kv_dtype = _kv_dtype(config.cache.kv_cache_dtype, self.numerics)
        self.graph_sizes = capture_sizes(config.model.cuda_graph_sizes, config.max_num_seqs)
        self.sampler = Sampler(config.model.logprobs_mode)
        vocab_size = checkpoint.config.vocab_size
        self.grammars = Grammars(vocab_size, partial(grammar_tokenizer, config.model.model, vocab_size))

    def _choose_numerics(self) -> Numerics:
        model, checkpoint = self.config.model, self.checkpoint
        options = (model.dtype, model.quantization, self.device)
        has_blocks = checkpoint.is_quantized and checkpoint.divides_blocks(self.group.size)
        chosen = Numerics.choose(*options, has_blocks)
        if self.group.rank == 0 and chosen != Numerics.choose(*options, checkpoint.is_quantized):
            logger.warning(
                "weights are %s instead of the file's own blocks, through which %d ranks would cut", chosen, self.group.size
            )
        return chosen

    def load(self, progress: Callable[[float], None]) -> None:
        num_threads = num_compute_threads(self.config)
        self.in_parts = self.device.type == "cpu" and self.group.size == 1  # ranks exchange sums, which must keep one order
        self.team = Team(num_threads)
        self.cores = Cores(num_threads)
        self.thread_choice = ThreadChoice(num_threads)
        torch.set_num_threads(1 if self.in_parts else num_threads)
        self.fingerprint = self._fingerprint()
        name = packed_name(self.checkpoint, self.numerics, self.group)
        weights = open_weights(self._weights_folder(), name)
        self.kept_profile = kept_profile(self._weights_folder(), name, self.config, self.kv_dtype, num_threads)
        self.model = load_model(self.checkpoint, self.numerics, self.device, self.group, progress, weights)
        self.checkpoint.close()

    @torch.inference_mode()
    def capacity(self) -> Capacity:
        """After `load`. Runs steps, which compile what is not compiled yet: the largest there can be, or a short one where time and
        memory of that one are known."""
        model_config, cache = self.model.config, self.config.cache
        makers = (self.make_kv, self.make_batch)
        profiler = Profiler(self.config, self.model, self.sampler, *makers, self.group, self.device, self.kept_profile)
        cost = (0.0, 0.0)
        if self.device.type == "cpu":
            steps = profiler.profile_on_cpu()
            available, cost = profiler.kv_bytes_on_cpu(steps.memory), (steps.seconds_per_token, steps.seconds_per_context)
        else:
            available = profiler.kv_bytes_on_gpu()
        if cache.kv_cache_memory_bytes is not None:
            available = cache.kv_cache_memory_bytes
            if self.device.type == "cpu" and available > (total := machine.total_memory()):  # which would be noticed only when used
                raise UnsupportedConfiguration(f"--kv-cache-memory-bytes {available} is more than this machine has, {total}")
        return Capacity(
            max_model_len=model_config.max_position_embeddings,
            vocab_size=model_config.vocab_size,
            dtype=str(self.numerics),
            device=self.device.type,
            weight_bytes=self.model.weight_bytes,
            block_bytes=KVCache.block_bytes(
                model_config.num_layers, cache.block_size, self.model.num_kv_heads, model_config.head_dim, self.kv_dtype
            ),
            available_kv_bytes=available,
            fingerprint=self.fingerprint,
            profiled_seconds_per_token=cost[0],
            profiled_seconds_per_context=cost[1],
            sure_threads=num_sure_threads(self.config),
        )

    def allocate_kv(self, num_blocks: int, max_model_len: int) -> None:
        """num_blocks counts the null block."""
        self.kv = self.make_kv(num_blocks)
        self.model.rotary.ensure(max_model_len + OVERRUN)
        self.batch = self.make_batch(max_model_len)
        self.decode: PaddedDecode | None = self._make_graphs()

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        started = time.perf_counter()
        batch = self.batch
        batch.apply(plan)
        self._note_grammars(plan)
        if not len(plan.rows):
            return _make_output(plan.step, seconds=time.perf_counter() - started)
        step = batch.make_step(plan)
        masks = self.grammars.fill(step.sampled_rows, batch.histories)
        computed, num_threads = self._compute_step(
            step, shares_kv=any(request.num_computed_tokens for request in plan.new_requests)
        )
        prompt_logprobs = self._prompt_logprobs(step, [hidden for hidden, _ in computed])
        output = _make_output(plan.step, prompt_logprobs=prompt_logprobs)
        output.num_threads = num_threads
        sampled = output.token_ids
        if len(step.sampled):
            sampled = self._sample(step, _join([logits for _, logits in computed]), masks.result() if masks else None, output)
        batch.advance(step, sampled)
        output.failed_rows = batch.failed_of(step)
        output.forward_seconds = time.perf_counter() - started
        return output

    def compile_grammar(self, grammar: str) -> Future[str]:
        """Safe on any thread. The result is why it cannot be compiled, or ""."""
        return self.grammars.compile(grammar)

    def rest(self) -> None:
        """No step comes soon: what is kept from step to step is given back."""
        self.thread_choice.leave()
        self.cores.rest()

    def _compute_step(self, step: Step, shares_kv: bool) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
        """(hidden states of the tokens, logits of the sampling ones), by parts in the order of tokens; and how many threads
        computed them."""
        if self.decode is not None and (shape := self.decode.shape_of(step)) is not None:
            return [self.decode(step, shape)], 1
        wanted = self._threads_for(step)
        with self.cores.claim(wanted) as threads:
            if threads < wanted:
                self.thread_choice.leave()
            count = count_parts(step, threads, num_engines(self.config)) if self.in_parts else 1
            return self.team.map(lambda part: self._compute(step, part), split(step, count, shares_kv), threads), threads

    def _threads_for(self, step: Step) -> int:
        """That the step should have: all where they take a part of it each, else as many as are fastest."""
        size = self.team.size
        if size > 1 and self.in_parts and count_parts(step, size, num_engines(self.config)) == 1:
            return self.thread_choice.choose(int(step.query_start[-1]))
        self.thread_choice.leave()
        return size

    def _compute(self, step: Step, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden states of the part's tokens, logits of its sampling ones)."""
        hidden = self.model.forward(step.token_ids[part.tokens], step.positions[part.tokens], self.kv, part.attention)
        return hidden, self.model.logits(hidden[part.last_tokens])

    def _note_grammars(self, plan: SchedulerOutput) -> None:
        for row in plan.freed_rows:
            self.grammars.clear(row)
        for request in plan.new_requests:
            if request.sampling.grammar:
                self.grammars.set(request.row, request.sampling.grammar)

    def _sample(self, step: Step, logits: torch.Tensor, masks: TokenMasks | None, output: ModelRunnerOutput) -> Int32Array:
        """Puts the tokens of rows that did not fail into `output`; returns those of all [num_sampled]."""
        rows, failed = step.sampled_rows, self.batch.failed_rows
        sampled = self.sampler(logits, rows, self.batch.sampling, self.batch.histories, masks)
        for place, reason in sampled.failed.items():
            failed.setdefault(int(rows[place]), reason)
        kept = ~np.isin(rows, list(failed)) if failed else slice(None)
        output.rows, output.token_ids = rows[kept], sampled.token_ids[kept]
        output.logprobs = [entry for entry in sampled.logprobs if entry.row not in failed]
        return sampled.token_ids

    def _prompt_logprobs(self, step: Step, hidden_parts: list[torch.Tensor]) -> list[PromptLogprobs]:
        batch = self.batch
        entries: list[PromptLogprobs] = []
        wanting = np.flatnonzero(batch.sampling.num_prompt_logprobs[step.rows] >= 0).tolist()
        if not wanting:
            return entries
        hidden = _join(hidden_parts)
        for i in wanting:
            row = int(step.rows[i])
            first = int(batch.num_computed[row])
            count = min(int(step.query_lens[i]), int(batch.num_prompt_tokens[row]) - 1 - first)
            if count > 0 and row not in batch.failed_rows:
                begin = int(step.query_start[i])
                targets = batch.token_ids[row, first + 1 : first + 1 + count]
                k = int(batch.sampling.num_prompt_logprobs[row])
                entries.append(PromptLogprobs(row, first + 1, *self._score(hidden[begin : begin + count], targets, k)))
        return entries

    def _score(self, hidden: torch.Tensor, token_ids: Int32Array, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Flattened ids, flattened logprobs and ranks of token_ids[i] given hidden[i]."""
        targets = torch.from_numpy(token_ids).long().to(self.device)
        parts = []
        for begin in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            some = slice(begin, begin + PROMPT_LOGPROB_ROWS)
            parts.append(top_logprobs(self.model.logits(hidden[some]), targets[some], k))
        ids, values, ranks = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return ids.reshape(-1), values.reshape(-1), ranks

    def _make_graphs(self) -> CudaGraphs | None:
        """None where steps are launched kernel by kernel: on the CPU, by choice, and with several ranks, whose exchanges have not
        been captured on any machine yet."""
        if self.device.type != "cuda" or self.config.model.enforce_eager or self.group.size > 1 or not self.graph_sizes:
            return None
        width = self.batch.block_tables.shape[1]
        graphs = CudaGraphs(self.model, self.kv, self.graph_sizes, width, self.numerics.activations, self.device)
        graphs.capture()
        return graphs

    def make_kv(self, num_blocks: int, shared: bool = False) -> KVCache:
        config = self.model.config
        return KVCache(
            config.num_layers,
            num_blocks,
            self.config.cache.block_size,
            self.model.num_kv_heads,
            config.head_dim,
            self.kv_dtype,
            self.device,
            shared,
        )

    def make_batch(self, max_model_len: int) -> Batch:
        return Batch(
            self.config.max_num_seqs, max_model_len, self.config.cache.block_size, self.model.config.vocab_size, self.device
        )

    def _weights_folder(self) -> str:
        """Where packed weights are shared; empty: nowhere. Weights on a GPU and random ones are not."""
        folder = self.config.model.weights_cache_dir
        return folder if folder != "none" and self.device.type == "cpu" and self.checkpoint.stamp() else ""

    def _fingerprint(self) -> str:
        numerics = f"{self.checkpoint.content_hash()} {self.numerics} {self.kv_dtype} {self.device.type} {NUMERICS_VERSION}"
        return hashlib.sha256(numerics.encode()).hexdigest()[:32]


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _make_output(
    step: int,
    prompt_logprobs: list[PromptLogprobs] | None = None,
    failed_rows: dict[int, str] | None = None,
    seconds: float = 0.0,
) -> ModelRunnerOutput:
    none = np.zeros(0, np.int32)
    return ModelRunnerOutput(step, none, none, [], prompt_logprobs or [], failed_rows or {}, seconds)


def _kv_dtype(name: str, numerics: Numerics) -> torch.dtype:
    """For the option --kv-cache-dtype. By default KV has the weights' type, on a CPU too, where 16 bits are half of what float32
    activations would take."""
    if name != "auto":
        return DTYPES[name]
    if numerics.quantization != "none":
        return torch.float16
    return numerics.weights


def num_engines(config: WorkerConfig) -> int:
    """Of this machine, as far as the configuration says."""
    return max(1, config.parallel.data_parallel_size)


def num_compute_threads(config: WorkerConfig) -> int:
    """As configured, else by the cores."""
    parallel = config.parallel
    if parallel.num_threads > 0:
        return parallel.num_threads
    return compute_threads(machine.available_cores(), num_engines(config), parallel.tensor_parallel_size)


def num_sure_threads(config: WorkerConfig) -> int:
    """Of them, those for which no other engine of this machine need be idle."""
    sure = sure_threads(machine.available_cores(), num_engines(config), config.parallel.tensor_parallel_size)
    return min(sure, num_compute_threads(config))
