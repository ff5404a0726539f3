"""What a step costs the engine in Python: it goes with what changed, not with how many requests run. Counted in function calls."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import pytest

from engine.bus.connection import Bus
from engine.config import SchedulerConfig
from engine.protocol import EngineCoreOutputs, decode_client_message, decode_column
from engine.runtime.owned_requests import OwnedRequests
from engine.runtime.publisher import Publisher, StepEvents
from engine.runtime.reconciliation import Reconciler
from engine.runtime.slot_owner import SlotOwner
from engine.scheduling.scheduler import Scheduler
from gpu.config import ModelConfig, ParallelConfig, WorkerConfig
from gpu.executor_factory import executor_for
from gpu.plan import SchedulerOutput, encode
from tests.engine.bus.ledger_world import engine_info
from tests.engine.scheduling.harness import make_request

BLOCK_SIZE = 16
T = TypeVar("T")


def counted(work: Callable[[], T]) -> tuple[T, int]:
    """What `work` returns, and how many functions, of Python or C, it calls from Python."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        return work(), count
    finally:
        sys.setprofile(None)


class Decodes:
    """`size` requests that decode, on the null model; some of two API servers."""

    def __init__(self, size: int) -> None:
        self.size = size
        limits = {"max_num_seqs": size, "max_num_batched_tokens": 64 * size}
        num_blocks = 8 * size + 1
        self.scheduler = Scheduler(SchedulerConfig(**limits), BLOCK_SIZE, num_blocks, 8 * BLOCK_SIZE)  # type: ignore[arg-type]
        parallel = ParallelConfig(distributed_executor_backend="uni")
        self.executor = executor_for(WorkerConfig(ModelConfig(load_format="null"), parallel=parallel, **limits))
        self.executor.start()
        self.executor.allocate_kv(num_blocks, 8 * BLOCK_SIZE)
        owner, owned = SlotOwner(Bus("redis://nowhere"), engine_info("model")), OwnedRequests()
        self.publisher = Publisher(owner, owned, Reconciler(owner, owned, queue.SimpleQueue()), ["a", "b"], lambda error: None)
        for index in range(size):
            prompt = range(1000 * index, 1000 * index + 20)
            self.scheduler.add_request(
                make_request(str(index), (token % 40_000 for token in prompt), client=index % 2, handle=index, max_tokens=90)
            )

    def step(self) -> tuple[SchedulerOutput, list[int], dict[str, bytes]]:
        """The plan; calls of schedule, encoding, update and publisher; messages by API server."""
        plan, planning = counted(lambda: self.scheduler.schedule(0.0))
        _, encoding = counted(lambda: encode(plan))
        self.executor.submit(plan)
        output = self.executor.collect()
        outputs, updating = counted(lambda: self.scheduler.update_from_output(plan, output, 0.0))
        (call, _, _), telling = counted(lambda: self.publisher.call_for(StepEvents(outputs)))
        clients, payloads = call.arguments[10::2], call.arguments[11::2]
        return plan, [planning, encoding, updating, telling], dict(zip(clients, payloads, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [8, 500])
def test_every_token_reaches_its_api_server(size: int) -> None:
    decodes = Decodes(size)
    decodes.step()
    _, _, messages = decodes.step()
    assert messages.keys() == {"a", "b"}
    for number, name in enumerate("ab"):
        message = decode_client_message(messages[name])
        assert isinstance(message, EngineCoreOutputs)
        assert decode_column(message.handles, np.int64).tolist() == list(range(number, size, 2))
        assert set(decode_column(message.offsets).tolist()) == {1}
        assert len(decode_column(message.token_ids)) == size // 2


def test_a_step_that_merely_goes_on_costs_the_same_for_few_and_many() -> None:
    few, many = Decodes(8), Decodes(500)
    costs = []
    for _ in range(10):  # no row fills a block: they hold 21 to 31 tokens
        (plan, cost, _), (other_plan, other_cost, _) = few.step(), many.step()
        assert (len(plan.rows), len(other_plan.rows)) == (8, 500)
        costs.append((cost, other_cost))
    assert all(cost == other_cost for cost, other_cost in costs[1:]), "the first step admits"
    assert max(sum(cost) for cost, _ in costs[1:]) < 400


def test_a_step_in_which_rows_fill_blocks_costs_a_few_calls_a_row() -> None:
    few, many = Decodes(8), Decodes(500)
    totals = []
    for decodes in (few, many):
        costs = [sum(decodes.step()[1]) for _ in range(2 * BLOCK_SIZE)]
        totals.append(max(costs[1:]))
    assert (totals[1] - totals[0]) / (500 - 8) < 20
