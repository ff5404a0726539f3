"""Prefix cache: what is read from it, when it is written, what it counts."""

from __future__ import annotations

import numpy as np
import pytest

from engine.protocol import FinishReason
from engine.scheduling.request import Request
from gpu.plan import ModelRunnerOutput, SchedulerOutput
from tests.engine.scheduling.harness import Engine, make_request
from tests.engine.scheduling.worker_oracle import expected_answer

Out = tuple[SchedulerOutput, ModelRunnerOutput | None]


def first_admission(engine: Engine) -> int:
    """Tokens that the cache answers the one request that the next step admits."""
    plan, _ = engine.step()
    (new,) = plan.new_requests
    return new.num_computed_tokens


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (17, 16), (30, 16)])
def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute(length: int, hit: int) -> None:
    engine = Engine()
    engine.add(make_request("a", range(16), max_tokens=1))
    engine.drain()
    request = make_request("b", range(length), max_tokens=1)
    engine.add(request)
    assert first_admission(engine) == hit == request.num_cached_tokens


def test_output_is_cached_for_the_next_turn() -> None:
    engine = Engine()
    first = make_request("a", range(10), max_tokens=9)
    engine.add(first)
    engine.drain()
    engine.add(make_request("b", [*first.token_ids.tolist(), 1, 2, 3]))
    assert first_admission(engine) == 16, "19 tokens, the last never computed"


def test_salts_share_nothing_and_the_same_salt_shares() -> None:
    engine = Engine()
    engine.add(make_request("a", range(16), cache_salt="x", max_tokens=1))
    engine.drain()
    hits = {}
    for salt in ("", "y", "x"):
        engine.add(make_request(f"b{salt}", range(16), cache_salt=salt, max_tokens=1))
        hits[salt] = first_admission(engine)
    assert hits == {"": 0, "y": 0, "x": 12}


def test_without_caching_nothing_is_kept_or_counted() -> None:
    engine = Engine(caching=False)
    for name in "ab":
        engine.add(make_request(name, range(16)))
        assert first_admission(engine) == 0
        engine.drain()
    stats = engine.scheduler.stats()
    assert stats.prefix_cache_queries == stats.prefix_cache_hits == engine.scheduler.kv.pool.num_cached == 0


class TestPromptLogprobs:
    def test_a_prompt_with_logprobs_is_computed_whole_and_then_cached(self) -> None:
        engine = Engine(budget=10)
        engine.add(make_request("a", range(16), max_tokens=1))
        engine.drain()
        engine.add(make_request("b", range(24), prompt_logprobs=0))
        plan, outputs = engine.step()
        assert plan.new_requests[0].num_computed_tokens == 0
        told = [outputs, *engine.drain()]
        positions = [p.position + i for outputs in told for _, p in outputs.prompt_logprobs for i in range(len(p.ranks))]
        assert positions == list(range(1, 24))
        engine.add(make_request("c", range(24), max_tokens=1))
        assert first_admission(engine) == 20
        stats = engine.scheduler.stats()
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (16 + 24, 20), "who does not read does not count"

    def test_each_position_is_reported_once_whatever_happens(self) -> None:
        """Preempted in the middle of its prompt, a request computes it again, in other chunks."""
        engine = Engine(budget=13, num_blocks=11)
        asking = make_request("b", range(100, 124), prompt_logprobs=0, max_tokens=4)
        engine.add(make_request("a", 8, max_tokens=17), asking)
        told = engine.drain()
        assert asking.num_preemptions > 0
        positions = [
            (p.position + i, token)
            for outputs in told
            for _, p in outputs.prompt_logprobs
            for i, token in enumerate(p.token_ids.tolist())
        ]
        assert positions == [(position, 100 + position) for position in range(1, 24)]

    def test_only_the_first_choice_reports_prompt_logprobs(self) -> None:
        engine = Engine()
        engine.add(*(make_request("a", range(8), choice=choice, prompt_logprobs=0, max_tokens=1) for choice in range(2)))
        told = [request.choice for outputs in engine.drain() for request, _ in outputs.prompt_logprobs]
        assert told == [0]


class TestDuplicatesAtOnce:
    def test_duplicates_compute_their_prompt_once_before_it_is_cached(self) -> None:
        engine = Engine()
        engine.add(make_request("a", range(21)), make_request("b", range(21)), make_request("c", [*range(10), 99]))
        out = engine.plan()
        assert out[0].num_scheduled_tokens.tolist() == [21, 1, 3]
        assert engine.scheduler.kv.pool.num_cached == 0, "published before it is written"
        engine.take_in(out)
        assert engine.scheduler.kv.pool.num_cached == 5
        engine.drain()

    def test_duplicates_share_across_chunks_and_with_a_step_out(self) -> None:
        engine = Engine(budget=16)
        engine.add(make_request("a", range(40), max_tokens=2))
        outs = [engine.plan()]
        engine.add(make_request("b", range(40), max_tokens=2))
        outs.append(engine.plan())
        assert outs[1][0].num_scheduled_tokens.tolist() == [16], "the running prompt has the budget"
        engine.take_in(outs.pop(0))
        outs.append(engine.plan())
        assert engine.counts(outs[1][0]) == {"a": 8, "b": 4}, "36 of 40 tokens are shared, 8 of them in this very step"
        engine.take_in(outs.pop(0))
        engine.take_in(outs.pop(0))
        engine.drain()

    def test_the_second_duplicate_continues_when_the_first_is_aborted(self) -> None:
        engine = Engine()
        second = make_request("b", range(20), max_tokens=6)
        engine.add(make_request("a", range(20), max_tokens=6), second)
        out = engine.plan()
        engine.scheduler.finish("a", -1, FinishReason.ABORT)
        engine.take_in(out)
        engine.add(make_request("c", range(20), max_tokens=1))
        assert first_admission(engine) == 16, "the survivor publishes what it shares"
        engine.drain()
        assert second.finish_reason is FinishReason.LENGTH

    def test_two_computed_copies_are_cached_until_one_is_evicted(self) -> None:
        engine = Engine()
        engine.add(make_request("a", range(16)), make_request("b", range(16), prompt_logprobs=0))
        engine.step()
        assert engine.scheduler.kv.pool.num_cached == 8
        engine.drain()


def answer_alone(request: Request) -> list[int]:
    """What a request without a salt answers when nothing disturbs it."""
    return expected_answer(request.prompt_token_ids.tolist(), request.sampling, request.seed, "", 128)[0]


class TestFailedRows:
    """A step planned before a row was known to have failed is out, and goes on writing KV that follows from what that row wrote.

    Newcomers come in twos: the first finds no beginning of its prompt and computes it, and through it the second could reach the
    blocks that the step still writes.
    """

    def start(self, engine: Engine, *requests: Request) -> list[Out]:
        """Two steps out, the first of which has 20 of 64 tokens left for `requests`; the first of these fails in it."""
        engine.add(make_request("other", 44, max_tokens=30), *requests)
        engine.worker.failing.add(1)  # rows are given out in order
        outs = [engine.plan(), engine.plan()]
        assert outs[0][1] is not None and outs[0][1].failed_rows.keys() == {requests[0].row}
        return outs

    def admit_newcomers(self, engine: Engine, prompt: range, **more: int) -> list[Request]:
        newcomers = [make_request(name, prompt, seed=5, **more) for name in ("new", "newer")]
        engine.add(*newcomers)
        return newcomers

    def finish_all(self, engine: Engine, outs: list[Out], *expected: Request) -> None:
        for out in outs:
            engine.take_in(out)
        engine.drain()
        for request in expected:
            assert request.finish_reason is FinishReason.LENGTH and request.output_token_ids.tolist() == answer_alone(request)

    def test_blocks_that_a_failed_row_still_writes_are_not_shared(self) -> None:
        engine = Engine()
        failing = make_request("failing", range(41))
        first, second = self.start(engine, failing)
        assert engine.counts(second[0]) == {"other": 1, "failing": 21}
        engine.take_in(first)
        assert failing.finish_reason is FinishReason.ERROR
        distrusted = set(failing.block_ids)
        newcomers = self.admit_newcomers(engine, range(41))
        third = engine.plan()
        assert engine.counts(third[0]) == {"other": 1, "new": 41, "newer": 1}, "the newcomers share with each other"
        assert distrusted and all(distrusted.isdisjoint(request.block_ids) for request in newcomers)
        self.finish_all(engine, [second, third], *newcomers)

    def test_blocks_that_a_restarted_sharer_still_writes_are_not_shared(self) -> None:
        engine = Engine(scheduling_policy="priority")
        failing, sharer = make_request("failing", range(17)), make_request("sharer", range(41))
        first, second = self.start(engine, failing, sharer)
        assert engine.counts(second[0]) == {"other": 1, "failing": 1, "sharer": 22}
        engine.take_in(first)
        assert sharer.num_preemptions == 1
        distrusted = set(sharer.block_ids)
        newcomers = self.admit_newcomers(engine, range(41), priority=-1)  # before the sharer, which waits for its step
        third = engine.plan()
        assert engine.counts(third[0]) == {"other": 1, "new": 41, "newer": 1}
        assert distrusted and all(distrusted.isdisjoint(request.block_ids) for request in newcomers)
        self.finish_all(engine, [second, third], sharer, *newcomers)

    def test_blocks_that_an_aborted_sharer_still_writes_are_not_shared(self) -> None:
        engine = Engine()
        failing, sharer = make_request("failing", range(17)), make_request("sharer", range(41))
        first, second = self.start(engine, failing, sharer)
        engine.scheduler.finish("sharer", -1, FinishReason.ABORT)
        engine.take_in(first)
        distrusted = set(sharer.block_ids)
        newcomers = self.admit_newcomers(engine, range(41))
        third = engine.plan()
        assert engine.counts(third[0]) == {"other": 1, "new": 41, "newer": 1}
        assert distrusted and all(distrusted.isdisjoint(request.block_ids) for request in newcomers)
        self.finish_all(engine, [second, third], *newcomers)

    def test_a_request_that_shares_only_with_a_sharer_is_restarted_too(self) -> None:
        """Its own prefix stands in blocks that another request published after the sharer was admitted."""
        engine = Engine()
        before = make_request("before", 8, max_tokens=8)
        known = [*before.token_ids.tolist(), *answer_alone(before)[:4]]
        engine.add(before)
        for _ in range(4):
            engine.step()
        first = engine.plan()  # completes the third block, by a decode, which announces nothing
        failing, sharer = make_request("failing", [*known, 7]), make_request("sharer", [*known, *range(20)])
        engine.add(failing, sharer)
        engine.worker.failing.add(1)
        second = engine.plan()
        engine.take_in(first)
        second_sharer = make_request("second", [*known, *range(20)])
        engine.add(second_sharer)
        third = engine.plan()
        assert engine.counts(third[0])["second"] == 4, "two blocks of the first request, one more, and the sharer's"
        assert failing.block_ids[2] in sharer.block_ids and failing.block_ids[2] not in second_sharer.block_ids
        engine.take_in(second)
        assert failing.finish_reason is FinishReason.ERROR
        assert [request.num_preemptions for request in (sharer, second_sharer)] == [1, 1]
        self.finish_all(engine, [third], before, sharer, second_sharer)


class TestEviction:
    def test_the_head_of_a_prefix_outlives_its_tail(self) -> None:
        engine = Engine(num_blocks=9)
        engine.add(make_request("a", range(24), max_tokens=1))
        engine.drain()
        engine.add(make_request("b", 16, max_tokens=1))  # takes the two blocks never used and the two tail blocks
        engine.drain()
        engine.add(make_request("c", range(24), max_tokens=1))
        assert first_admission(engine) == 16

    def test_a_preempted_request_finds_its_own_blocks(self) -> None:
        engine = Engine(num_blocks=9)
        victim = make_request("b", range(200, 212), max_tokens=8)
        engine.add(make_request("a", 14, max_tokens=4), victim)
        for _ in range(4):
            engine.step()
        assert victim.num_preemptions == 1 and victim.row < 0
        plan, _ = engine.step()
        assert plan.new_requests[0].num_computed_tokens == 12
        assert victim.num_cached_tokens == 0
        stats = engine.scheduler.stats()
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (26, 0), "coming back is no cached traffic"
        engine.drain()


def test_a_query_counts_once_however_often_admission_is_tried() -> None:
    engine = Engine(num_blocks=9)
    engine.add(make_request("a", range(12), max_tokens=12), make_request("b", [*range(4), *range(50, 74)], max_tokens=1))
    for _ in range(5):
        engine.step()
        assert engine.scheduler.blocked is not None and engine.scheduler.stats().prefix_cache_queries == 12
    engine.drain()
    stats = engine.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (12 + 28, 4)


def test_reset() -> None:
    engine = Engine()
    engine.add(make_request("a", range(16), max_tokens=3))
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.drain()
    assert engine.scheduler.reset_prefix_cache()
    engine.add(make_request("b", range(16), max_tokens=1))
    assert first_admission(engine) == 0


def test_a_reset_is_refused_while_a_step_is_out() -> None:
    engine = Engine()
    engine.add(make_request("a", range(16)))
    out = engine.plan()
    engine.scheduler.finish("a", -1, FinishReason.ABORT)
    assert not engine.scheduler.reset_prefix_cache()
    engine.take_in(out)
    assert engine.scheduler.reset_prefix_cache()


def test_block_lists_follow_the_tokens() -> None:
    engine = Engine()
    request = make_request("a", 7, max_tokens=10)
    engine.add(request)
    lengths = []
    while engine.scheduler.has_work:
        plan, output = engine.plan()
        lengths.append(len(request.block_ids))
        if len(plan.grown_rows):
            assert plan.grown_blocks.tolist() == request.block_ids[-1:] and np.unique(request.block_ids).size == lengths[-1]
        engine.take_in((plan, output))
    assert lengths == [2, 2, 3, 3, 3, 3, 4, 4, 4, 4]
