"""The simulator tells what the scheduler did, in numbers and in text."""

from __future__ import annotations

import pytest

from engine.scheduling.simulate import Load, render, simulate


def test_every_prompt_ends_and_every_token_is_counted() -> None:
    load = Load(max_num_batched_tokens=32, max_num_seqs=4, block_size=4, prompts=(50, 7, 20, 1), output_tokens=3)
    steps = list(simulate(load))
    assert [name for line in steps for name in line.admitted] == ["prompt 1", "prompt 2", "prompt 3", "prompt 4"]
    assert {name: reason for line in steps for name, reason in line.finished.items()} == dict.fromkeys(
        ["prompt 1", "prompt 2", "prompt 3", "prompt 4"], "length"
    )
    assert sum(line.num_tokens for line in steps) == sum(load.prompts) + 4 * (3 - 1)
    assert all(line.num_tokens <= 32 for line in steps)


def test_preemption_and_a_full_pool_show() -> None:
    load = Load(max_num_batched_tokens=64, max_num_seqs=8, block_size=4, prompts=(8, 8), num_free_blocks=5, output_tokens=8)
    steps = list(simulate(load))
    assert [name for line in steps for name in line.preempted] == ["prompt 2"]
    blocked = [line for line in steps if line.blocked]
    assert blocked and all(line.blocked == "prompt 2" and line.blocked_short > 0 for line in blocked)
    assert steps[-1].finished == {"prompt 2": "length"}


def test_priorities() -> None:
    load = Load(
        max_num_batched_tokens=8, max_num_seqs=8, block_size=4, prompts=(8, 8), priorities=(1, 0), scheduling_policy="priority"
    )
    assert [line.admitted for line in simulate(load)][:2] == [["prompt 2"], ["prompt 1"]]


def test_text() -> None:
    load = Load(max_num_batched_tokens=2048, block_size=64, num_decodes=2, prompts=(2100,), num_free_blocks=40, output_tokens=4)
    assert list(render(simulate(load))) == [
        "step 1: 2048 tokens = 2 decodes + prompt 1: 2046 tokens, 32 new blocks; 8 blocks free\n  admitted: prompt 1",
        "step 2: 56 tokens = 2 decodes + prompt 1: 54 tokens, 1 new blocks; 7 blocks free",
        "steps 3 to 4, each: 3 tokens = 3 decodes; 7 blocks free",
        "step 5: 3 tokens = 3 decodes; 7 blocks free\n  finished: prompt 1 (length)",
    ]
    blocked = Load(block_size=64, num_decodes=127, prompts=(1920,), num_free_blocks=16, max_steps=5)
    assert list(render(simulate(blocked))) == [
        "steps 1 to 5, each: 127 tokens = 127 decodes; 16 blocks free\n"
        "  not admitted: prompt 1: chunk of 1920 tokens, 30 blocks needed, 14 short\n"
        "  waiting: prompt 1"
    ]


def test_a_prompt_beyond_the_pool_is_an_error_not_a_hang() -> None:
    steps = list(simulate(Load(block_size=4, prompts=(100,), num_free_blocks=8)))
    assert steps[0].finished == {"prompt 1": "KV cache exhausted: the request alone needs 25 blocks of 4 tokens, the cache has 8"}
    assert len(steps) == 1


def test_impossible_loads_are_refused() -> None:
    with pytest.raises(ValueError, match="more than max_num_seqs"):
        list(simulate(Load(num_decodes=5, max_num_seqs=4)))
