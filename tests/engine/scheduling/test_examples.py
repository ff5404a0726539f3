"""Worked examples of scheduling, each through the simulator: the real scheduler without a model."""

from __future__ import annotations

from dataclasses import replace

from engine.scheduling.simulate import Load, SimulatedStep, simulate


def steps(load: Load) -> list[SimulatedStep]:
    return list(simulate(load))


def test_decodes_come_first_and_a_prompt_gets_the_rest_of_the_budget() -> None:
    """Budget 1024, two decodes and a prompt with 1800 tokens left: 1, 1, 1022; 778 stay."""
    first, second, *_ = steps(Load(max_num_batched_tokens=1024, block_size=16, num_decodes=2, prompts=(1800,)))
    assert (first.num_decodes, first.num_tokens) == (2, 1024)
    assert first.chunks["prompt 1"][0] == 1022
    assert second.chunks["prompt 1"][0] == 778


def test_admission_needs_blocks_for_the_first_chunk_only() -> None:
    """Budget 2048, block 64, 64 decodes, prompt 3968, 64 free blocks: first chunk 1984 = 31 blocks, admitted, 2 chunks."""
    load = Load(max_num_batched_tokens=2048, block_size=64, num_decodes=64, prompts=(3968,), num_free_blocks=64)
    first, second, third, *_ = steps(load)
    assert first.num_decodes == second.num_decodes == 64
    assert first.admitted == ["prompt 1"]
    assert first.chunks == {"prompt 1": (1984, 31)}
    assert second.chunks == {"prompt 1": (1984, 31)}
    assert third.chunks == {} and third.num_decodes == 65
    assert (first.num_free_blocks, second.num_free_blocks) == (33, 2)


def test_a_chunk_without_its_blocks_is_not_admitted() -> None:
    """Budget 2048, block 64, 127 decodes, prompt 1920, 16 free blocks: chunk 1920 = 30 blocks, 14 short, not admitted."""
    load = Load(max_num_batched_tokens=2048, block_size=64, num_decodes=127, prompts=(1920,), num_free_blocks=16, max_steps=1)
    (first,) = steps(load)
    assert first.num_decodes == first.num_tokens == 127
    assert (first.blocked, first.blocked_tokens, first.blocked_blocks, first.blocked_short) == ("prompt 1", 1920, 30, 14)
    assert first.admitted == [] and first.waiting == ["prompt 1"] and first.num_free_blocks == 16


def test_a_chunk_may_shrink_to_the_blocks_there_are() -> None:
    load = Load(max_num_batched_tokens=2048, block_size=64, num_decodes=127, prompts=(1920,), num_free_blocks=16, max_steps=1)
    (first,) = steps(replace(load, shrink_chunks=True))
    assert first.chunks == {"prompt 1": (16 * 64, 16)} and first.num_free_blocks == 0


def test_a_full_budget_touches_at_most_32_new_blocks_of_64() -> None:
    """Budget 2048, 128 decodes: 1920 left for prefill. Without decodes a full budget is 32 blocks of 64."""
    first, *_ = steps(Load(max_num_batched_tokens=2048, block_size=64, num_decodes=128, prompts=(4096,)))
    assert first.chunks == {"prompt 1": (1920, 30)}
    for prompts in ((4096,), (1024, 1024, 500), (700, 700, 700)):
        for line in steps(Load(max_num_batched_tokens=2048, block_size=64, prompts=prompts, output_tokens=1)):
            # each further prompt of the step may begin one block that it does not fill
            assert line.num_tokens <= 2048 and line.num_new_blocks <= 32 + len(line.chunks) - 1
