"""The runner without a model: it must be as strict about rows as the real one is careless, and its outputs as well-formed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.config import CacheConfig, ModelConfig, WorkerConfig
from gpu.plan import Int32Array, ModelRunnerOutput, NewRequest, SamplingParams, SchedulerOutput
from gpu.stand_in.null import NullRunner, null_tokens
from gpu.stand_in.runner import ENVIRONMENT_VARIABLE, StandInSettings

NONE = np.zeros(0, np.int32)


def _int32(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def _runner(**settings: Any) -> NullRunner:
    config = WorkerConfig(ModelConfig(load_format="null"), CacheConfig(block_size=4), max_num_seqs=4, max_num_batched_tokens=16)
    runner = NullRunner(config, settings=StandInSettings(**settings))
    runner.load(lambda fraction: None)
    runner.allocate_kv(20, 64)
    return runner


def _request(row: int = 0, num_tokens: int = 3, num_prompt: int = 3, computed: int = 0, blocks: int = 8, **more: Any) -> NewRequest:
    seed = more.pop("seed", 1)
    block_ids = np.arange(1 + 8 * row, 1 + 8 * row + blocks, dtype=np.int32)
    return NewRequest(row, np.arange(num_tokens, dtype=np.int32), num_prompt, computed, block_ids, SamplingParams(**more), seed)


def _step(*requests: NewRequest, freed: list[int] | None = None, **scheduled: int) -> SchedulerOutput:
    """`scheduled` as row_0=3."""
    rows = _int32(*(int(name.removeprefix("row_")) for name in scheduled))
    counts = _int32(*scheduled.values())
    return SchedulerOutput(0, freed or [], list(requests), NONE, NONE, rows, counts, int(counts.sum()))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.integers(1, 300_000))
def test_tokens_are_splitmix_of_seed_and_position(seed: int, position: int, vocab_size: int) -> None:
    """Against Python's integers, which do not wrap by themselves."""
    mask = 2**64 - 1
    mixed = (seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15) & mask
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & mask
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & mask
    token_ids = null_tokens(np.array([seed], np.uint64), np.array([position], np.uint64), 0, vocab_size)
    assert token_ids.tolist() == [(mixed ^ (mixed >> 31)) % vocab_size]


def _tokens(runner: NullRunner, count: int) -> list[int]:
    outputs = [runner.execute(_step(row_0=1)) for _ in range(count)]
    return [output.token_ids.item() for output in outputs]


def test_tokens_depend_on_neither_chunks_nor_batch_nor_preemption() -> None:
    calm = _runner()
    first = calm.execute(_step(_request(num_tokens=6, num_prompt=6), row_0=6)).token_ids.item()
    expected = [first, *_tokens(calm, 5)]

    busy = _runner()
    other = _request(row=1, seed=5)
    assert busy.execute(_step(_request(num_tokens=6, num_prompt=6), other, row_0=4, row_1=3)).rows.tolist() == [1]
    output = busy.execute(_step(row_1=1, row_0=2))
    assert output.rows.tolist() == [1, 0]
    assert output.token_ids[1] == expected[0]
    assert _tokens(busy, 2) == expected[1:3]
    again = _request(row=2, num_tokens=9, num_prompt=6, computed=4, blocks=3)  # 6 of the prompt and the 3 sampled so far
    assert busy.execute(_step(again, freed=[0], row_2=5)).token_ids.tolist() == expected[3:4]


def test_rows_are_used_again() -> None:
    runner = _runner()
    runner.execute(_step(_request(seed=3), row_0=3))
    output = runner.execute(_step(_request(seed=4), freed=[0], row_0=3))
    assert output.token_ids.tolist() == null_tokens(np.array([4], np.uint64), np.array([3], np.uint64), 256, 49152).tolist()


def test_a_step_without_rows_has_no_output() -> None:
    output = _runner().execute(_step())
    assert (output.rows.size, output.token_ids.size, output.failed_rows) == (0, 0, {})


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (_step(row_1=1), "not known"),
        (_step(_request(), row_0=4), "not known"),
        (_step(_request(), row_0=0), "no token"),
        (_step(_request(num_tokens=8, num_prompt=8, blocks=1), row_0=8), "no block"),
        (_step(_request(blocks=0), row_0=3), "no block"),
        (_step(_request(row=3), row_3=3), "does not exist"),
        (_step(_request(computed=3), row_0=1), "all its tokens computed"),
        (_step(_request(num_tokens=65, num_prompt=65)), "longer than"),
        (_step(_request(), _request()), "row 0 is taken"),
        (_step(_request(num_tokens=30, num_prompt=30), row_0=17), "more tokens than the budget"),
        (SchedulerOutput(0, [], [_request()], NONE, NONE, _int32(0), _int32(3), 4), "sum"),
        (SchedulerOutput(0, [], [_request()], NONE, NONE, _int32(0, 0), _int32(1, 1), 2), "twice"),
        (SchedulerOutput(0, [], [_request()], _int32(0), _int32(0), NONE, NONE, 0), "null block"),
    ],
)
def test_a_wrong_plan_is_refused(plan: SchedulerOutput, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        _runner().execute(plan)


def test_grown_blocks_give_room() -> None:
    runner = _runner()
    runner.execute(_step(_request(num_tokens=4, num_prompt=4, blocks=1), row_0=4))
    output = runner.execute(SchedulerOutput(1, [], [], _int32(0), _int32(9), _int32(0), _int32(1), 1))
    assert output.rows.tolist() == [0]


def _all_tokens(runner: NullRunner, request: NewRequest, count: int) -> list[int]:
    return [runner.execute(_step(request, row_0=3)).token_ids.item(), *_tokens(runner, count - 1)]


def test_no_end_unless_it_is_asked_for() -> None:
    """In a vocabulary of eight, where the end would come up soon."""
    free = _all_tokens(_runner(vocab_size=8, lowest_token_id=0), _request(), 20)
    kept = _all_tokens(_runner(vocab_size=8, lowest_token_id=0), _request(eos_token_ids=[2], stop_token_ids=[3]), 20)
    assert {2, 3} <= set(free) <= set(range(8))
    assert {2, 3}.isdisjoint(kept)
    assert [token for token in free if token not in (2, 3)] == [kept[i] for i, token in enumerate(free) if token not in (2, 3)]


@pytest.mark.parametrize(("min_tokens", "end"), [(0, 3), (5, 5)])
def test_an_end_where_it_is_asked_for(min_tokens: int, end: int) -> None:
    tokens = _all_tokens(_runner(eos_after=3), _request(eos_token_ids=[2], min_tokens=min_tokens), 7)
    assert tokens.index(2) == end


@pytest.mark.parametrize("k", [0, 1, 5, -1])
def test_logprobs_have_the_sampled_token_first_and_k_others(k: int) -> None:
    vocab_size = 300
    output = _runner(vocab_size=vocab_size).execute(_step(_request(logprobs=k), row_0=3))
    (entry,) = output.logprobs
    size = vocab_size if k == -1 else k
    assert (entry.row, entry.rank) == (0, 1)
    assert entry.token_ids.shape == entry.logprobs.shape == (1 + size,)
    assert entry.token_ids[0] == output.token_ids[0]
    assert len(set(entry.token_ids[1:].tolist())) == size
    assert (np.diff(entry.logprobs[1:]) < 0).all()
    assert np.exp(entry.logprobs[1:]).sum() <= 1
    assert math.isclose(entry.logprobs[0], -math.log(2), rel_tol=1e-6)


def test_prompt_logprobs_of_chunks_cover_the_prompt_once() -> None:
    runner = _runner()
    request = _request(num_tokens=7, num_prompt=7, prompt_logprobs=1)
    outputs: list[ModelRunnerOutput] = [runner.execute(_step(request, row_0=3))]
    outputs += [runner.execute(_step(row_0=count)) for count in (1, 3, 1)]
    entries = [entry for output in outputs for entry in output.prompt_logprobs]
    assert [(entry.row, entry.position, entry.ranks.tolist()) for entry in entries] == [
        (0, 1, [1] * 3),
        (0, 4, [1]),
        (0, 5, [1] * 2),
    ]
    token_ids = np.concatenate([entry.token_ids for entry in entries]).reshape(-1, 2)
    assert token_ids[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert sum(entry.logprobs.size for entry in entries) == token_ids.size


def test_a_row_may_fail_alone() -> None:
    runner = _runner(fail_seed=9)
    output = runner.execute(_step(_request(seed=9), _request(row=1, seed=8), row_0=3, row_1=3))
    assert list(output.failed_rows) == [0]
    assert output.rows.tolist() == [1]
    output = runner.execute(_step(row_0=1, row_1=1))  # planned before the failure was known
    assert (list(output.failed_rows), output.rows.tolist()) == ([0], [1])
    assert runner.execute(_step(freed=[0], row_1=1)).rows.tolist() == [1]


def test_settings_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "vocab_size=100, step_seconds=0.5,fail_while=load")
    assert StandInSettings.from_environment() == StandInSettings(vocab_size=100, step_seconds=0.5, fail_while="load")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    assert StandInSettings.from_environment() == StandInSettings()
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "step=1")
    with pytest.raises(ValueError, match="no setting step; it has eos_after, "):
        StandInSettings.from_environment()
