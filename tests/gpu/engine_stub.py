"""The least scheduler that can drive a ModelRunner: plans of given chunks, so that a test says exactly what a step computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from gpu.checkpoint.weights import open_checkpoint
from gpu.config import CacheConfig, ModelConfig, ParallelConfig, WorkerConfig
from gpu.distributed import TensorParallelGroup
from gpu.plan import ModelRunnerOutput, NewRequest, SamplingParams, SchedulerOutput
from gpu.runner.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=1000)


def make_config(
    model: Path | str, dtype: str = "float32", block_size: int = 16, max_num_seqs: int = 32, budget: int = 512, **more
) -> WorkerConfig:
    return WorkerConfig(
        model=ModelConfig(model=str(model), dtype=dtype, device="cpu", **more),
        cache=CacheConfig(block_size=block_size),
        parallel=ParallelConfig(num_threads=1),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )


def make_runner(
    config: WorkerConfig, group: TensorParallelGroup | None = None, num_blocks: int = 400, max_model_len: int = 512
) -> ModelRunner:
    runner = ModelRunner(config, open_checkpoint(config.model.model), torch.device("cpu"), group or TensorParallelGroup())
    runner.load(lambda fraction: None)
    runner.allocate_kv(num_blocks, max_model_len)
    return runner


class Driver:
    """Keeps blocks and rows of a runner; blocks are handed out in descending order and never given back."""

    def __init__(self, runner: ModelRunner, num_blocks: int = 400) -> None:
        self.runner = runner
        self.block_size = runner.config.cache.block_size
        self.free = list(range(1, num_blocks))
        self.step = 0
        self.tokens: dict[int, list[int]] = {}
        self.prompt_lens: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}
        self.sampling: dict[int, SamplingParams] = {}
        self.unsent: list[int] = []
        self.freed: list[int] = []
        self.outputs: list[ModelRunnerOutput] = []

    def add(
        self,
        row: int,
        tokens: Sequence[int],
        sampling: SamplingParams = GREEDY,
        prompt_len: int | None = None,
        computed: int = 0,
        blocks: Sequence[int] = (),
    ) -> None:
        self.tokens[row] = list(tokens)
        self.prompt_lens[row] = len(tokens) if prompt_len is None else prompt_len
        self.computed[row] = computed
        self.blocks[row] = list(blocks)
        self.sampling[row] = sampling
        self.unsent.append(row)

    def remove(self, row: int) -> None:
        self.freed.append(row)
        for table in (self.tokens, self.prompt_lens, self.computed, self.blocks, self.sampling):
            del table[row]

    def run(self, scheduled: dict[int, int]) -> ModelRunnerOutput:
        """One step: row -> number of tokens. Returns what the runner answered, applied to the driver's own state."""
        grown: list[tuple[int, int]] = []
        for row, count in scheduled.items():
            needed = -(-(self.computed[row] + count) // self.block_size) - len(self.blocks[row])
            new = [self.free.pop() for _ in range(needed)]
            self.blocks[row] += new
            if row not in self.unsent:
                grown += [(row, block) for block in new]
        new_requests = [
            NewRequest(
                row, _int32(self.tokens[row]), self.prompt_lens[row], self.computed[row], _int32(self.blocks[row]),
                self.sampling[row], self.sampling[row].seed,
            )
            for row in self.unsent
        ]  # fmt: skip
        plan = SchedulerOutput(
            self.step, self.freed, new_requests, _int32([row for row, _ in grown]), _int32([block for _, block in grown]),
            _int32(list(scheduled)), _int32(list(scheduled.values())), sum(scheduled.values()),
        )  # fmt: skip
        self.unsent, self.freed = [], []
        self.step += 1
        output = self.runner.execute(plan)
        self.runner.rest()
        for row, count in scheduled.items():
            self.computed[row] += count
        for row, token in zip(output.rows.tolist(), output.token_ids.tolist(), strict=True):
            self.tokens[row].append(token)
        self.outputs.append(output)
        return output

    def left(self, row: int) -> int:
        """Known tokens of the row that are not computed."""
        return len(self.tokens[row]) - self.computed[row]

    def generate(
        self, num_tokens: int, chunk: int = 10_000, stop: Callable[[int], bool] = lambda row: False
    ) -> dict[int, list[int]]:
        """Steps until every row has `num_tokens` of output; prompts in chunks. Returns row -> output."""
        while True:
            pending = {
                row: min(chunk, self.left(row)) for row in self.tokens if len(self.output(row)) < num_tokens and not stop(row)
            }
            if not pending:
                return {row: self.output(row) for row in self.tokens}
            self.run(pending)

    def output(self, row: int) -> list[int]:
        return self.tokens[row][self.prompt_lens[row] :]


def _int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)
