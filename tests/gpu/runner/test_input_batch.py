"""Row tables under the differences of steps."""

import numpy as np
import torch

from gpu.plan import NewRequest, SamplingParams, SchedulerOutput
from gpu.runner.input_batch import Batch


def int32(*values):
    return np.array(values, np.int32)


def make_plan(rows=(), counts=(), new=(), freed=(), grown=()):
    """new: (row, tokens, num_prompt_tokens, num_computed, blocks); grown: (row, block)."""
    requests = [NewRequest(row, int32(*t), p, c, int32(*b), SamplingParams(), 0) for row, t, p, c, b in new]
    grown_rows, grown_blocks = int32(*(row for row, _ in grown)), int32(*(block for _, block in grown))
    return SchedulerOutput(0, list(freed), requests, grown_rows, grown_blocks, int32(*rows), int32(*counts), sum(counts))


def make_batch():
    return Batch(4, 40, 4, 100, torch.device("cpu"))


def test_a_step_gathers_tokens_positions_slots_and_sampling_rows():
    batch = make_batch()
    plan = make_plan(
        rows=(3, 0, 2),
        counts=(3, 2, 1),
        new=[(0, [5, 6, 7, 8, 9, 10], 6, 4, [7, 2]), (3, [11, 12, 13, 14], 4, 0, [9]), (2, [20, 21], 1, 1, [4])],
    )
    batch.apply(plan)
    step = batch.make_step(plan)
    assert step.token_ids.tolist() == [11, 12, 13, 9, 10, 21]
    assert step.positions.tolist() == [0, 1, 2, 4, 5, 1]
    assert step.attention.slots.tolist() == [36, 37, 38, 8, 9, 17]
    assert step.attention.query_start.tolist() == [0, 3, 5, 6] and step.attention.context_lens.tolist() == [3, 6, 2]
    assert step.sampled_rows.tolist() == [0, 2] and step.last_tokens.tolist() == [4, 5]


def test_sampled_tokens_are_the_next_steps_input():
    batch = make_batch()
    plan = make_plan(rows=(1,), counts=(2,), new=[(1, [5, 6], 2, 0, [3])])
    batch.apply(plan)
    batch.advance(batch.make_step(plan), int32(42))
    plan = make_plan(rows=(1,), counts=(1,))
    batch.apply(plan)
    step = batch.make_step(plan)
    assert (step.token_ids.tolist(), step.positions.tolist(), step.sampled_rows.tolist()) == ([42], [2], [1])


def test_blocks_grow_in_order_also_several_in_a_step():
    batch = make_batch()
    batch.apply(make_plan(new=[(1, range(10), 10, 0, [3]), (2, range(10), 10, 0, [8])]))
    batch.apply(make_plan(grown=[(1, 5), (2, 6), (1, 4)]))
    assert batch.block_tables[1, :3].tolist() == [3, 5, 4] and batch.block_tables[2, :2].tolist() == [8, 6]


def test_a_freed_row_may_be_taken_in_the_same_step():
    batch = make_batch()
    batch.apply(make_plan(new=[(1, range(12), 12, 0, [3, 4, 5])]))
    plan = make_plan(rows=(1,), counts=(2,), freed=[1], new=[(1, [50, 51], 2, 0, [9])])
    batch.apply(plan)
    step = batch.make_step(plan)
    assert step.token_ids.tolist() == [50, 51] and step.attention.slots.tolist() == [36, 37] and step.sampled_rows.tolist() == [1]


def test_rows_of_the_longest_request_and_a_little_beyond_fit():
    batch = make_batch()
    plan = make_plan(rows=(0,), counts=(1,), new=[(0, range(40), 40, 39, range(1, 11))])
    batch.apply(plan)
    batch.advance(batch.make_step(plan), int32(7))
    plan = make_plan(rows=(0,), counts=(1,), grown=[(0, 11)])
    batch.apply(plan)
    assert batch.make_step(plan).attention.slots.tolist() == [44]
