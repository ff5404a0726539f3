"""A scheduler over the worker oracle, with the few verbs that scheduler tests speak in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from engine.config import SchedulerConfig
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_outputs import StepOutputs
from gpu.plan import ModelRunnerOutput, SamplingParams, SchedulerOutput
from tests.engine.scheduling.worker_oracle import WorkerOracle


def make_request(
    request_id: str,
    prompt: int | Iterable[int] = 8,
    *,
    choice: int = 0,
    priority: int = 0,
    arrival_time: float = 0.0,
    cache_salt: str = "",
    handle: int = 0,
    client: int = 0,
    **sampling: Any,
) -> Request:
    """`prompt`: token ids, or how many (tokens that no other request of another id has)."""
    if isinstance(prompt, int):
        base = sum(map(ord, request_id)) * 1000
        tokens = np.arange(base, base + prompt, dtype=np.int32)
    else:
        tokens = np.array(list(prompt), dtype=np.int32)
    params = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **sampling})
    return Request(
        request_id,
        tokens,
        params,
        choice=choice,
        priority=priority,
        arrival_time=arrival_time,
        cache_salt=cache_salt,
        handle=handle,
        client=client,
    )


class Engine:
    """Scheduler and oracle side by side."""

    def __init__(
        self,
        *,
        budget: int = 64,
        max_num_seqs: int = 8,
        block_size: int = 4,
        num_blocks: int = 64,
        max_model_len: int = 128,
        caching: bool = True,
        **config: Any,
    ) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, **config),
            block_size,
            num_blocks,
            max_model_len,
            caching,
        )
        self.worker = WorkerOracle(num_rows=max_num_seqs, budget=budget, block_size=block_size, num_blocks=num_blocks)
        self.now = 0.0

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)

    def plan(self) -> tuple[SchedulerOutput, ModelRunnerOutput | None]:
        """Plan a step and run it; it stays out until `take_in`."""
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        return plan, self.worker.execute(plan) if plan.total_num_scheduled_tokens else None

    def take_in(self, out: tuple[SchedulerOutput, ModelRunnerOutput | None]) -> StepOutputs:
        self.now += 1.0
        outputs = self.scheduler.update_from_output(*out, self.now)
        self.scheduler.check_integrity()
        return outputs

    def step(self) -> tuple[SchedulerOutput, StepOutputs]:
        out = self.plan()
        return out[0], self.take_in(out)

    def plan_and_keep(self) -> SchedulerOutput:
        """A step whose outputs change no request's place in the running order, so that its plan can be read afterwards."""
        plan, outputs = self.step()
        assert not outputs.finished
        return plan

    def drain(self, most_steps: int = 1000) -> list[StepOutputs]:
        """Steps until nothing is left to do; then everything must be free."""
        outputs = []
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                pool = self.scheduler.kv.pool
                assert pool.num_free == pool.num_usable
                return outputs
            outputs.append(self.step()[1])
        raise AssertionError(f"still busy after {most_steps} steps: {list(self.scheduler.requests.values())}")

    def counts(self, plan: SchedulerOutput) -> dict[str, int]:
        """Tokens that a plan gives to each request, by id (valid until the plan is taken in)."""
        rows = zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True)
        return {self.scheduler.rows.request(row).request_id: count for row, count in rows}
