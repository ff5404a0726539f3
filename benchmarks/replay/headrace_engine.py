"""headrace's engine with a recording for a model: `frontend` starts it in a process of its own.

    python -m benchmarks.replay.headrace_engine MODEL REDIS_URL NUM_STREAMS

Scheduler, loop, intake and publisher are the real ones, and MODEL's tokenizer; only what the runner samples is recorded.
"""

from __future__ import annotations

import sys

import numpy as np

import gpu.stand_in.null
from benchmarks.replay.recording import Gate, Recording
from engine.config import EngineConfig, RedisConfig, SchedulerConfig
from engine.runtime.process import run_engine
from gpu.config import CacheConfig, ModelConfig, ParallelConfig
from gpu.plan import Int32Array, ModelRunnerOutput, NewRequest, SchedulerOutput

NAME = "replay"


class ReplayRunner(gpu.stand_in.null.NullRunner):
    """The null runner, with recorded tokens in place of hashes."""

    def load(self, progress: object) -> None:
        self._recording = Recording()
        self._gate = Gate()
        self._first = np.zeros(self.config.max_num_seqs, np.int64)  # first token of each row's prompt

    def _take(self, request: NewRequest) -> None:
        super()._take(request)
        self._first[request.row] = request.token_ids[0]

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute(plan)
        output.token_ids[:] = self._recorded(output.rows)
        self._gate.announce(len(output.rows))
        return output

    def _recorded(self, rows: Int32Array) -> list[int]:
        offsets = self.num_tokens[rows] - self.num_prompt[rows] - 1  # the sampled token is counted already
        return [self._recording.token(*pair) for pair in zip(self._first[rows].tolist(), offsets.tolist(), strict=True)]


def main() -> int:
    model, redis_url, num_streams = sys.argv[1:]
    gpu.stand_in.null.NullRunner = ReplayRunner  # type: ignore[misc]  # which the worker looks up when it makes its runner
    return run_engine(
        EngineConfig(
            model=ModelConfig(model=model, load_format="null", max_model_len=1024),
            cache=CacheConfig(num_gpu_blocks_override=64 * int(num_streams)),
            parallel=ParallelConfig(distributed_executor_backend="uni"),
            scheduler=SchedulerConfig(max_num_seqs=int(num_streams), max_num_batched_tokens=8192),
            redis=RedisConfig(redis_url=redis_url),
            served_model_name=[NAME],
        )
    )


if __name__ == "__main__":
    sys.exit(main())
