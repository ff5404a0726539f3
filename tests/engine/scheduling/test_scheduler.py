"""What a step computes: order, budget, chunks, admission, preemption."""

from __future__ import annotations

import numpy as np
import pytest

from engine.config import SchedulerConfig
from engine.protocol import FinishReason
from engine.scheduling.request import RequestStatus
from engine.scheduling.scheduler import LOOKAHEAD, Scheduler
from gpu.plan import child_seed
from tests.engine.scheduling.harness import Engine, make_request
from tests.engine.scheduling.worker_oracle import expected_answer


def names(engine: Engine) -> list[str]:
    return [request.request_id for request in engine.scheduler.waiting]


def running(engine: Engine) -> list[str]:
    return [engine.scheduler.rows.request(int(row)).request_id for row in engine.scheduler.rows.running]


def test_one_request_alone() -> None:
    engine = Engine()
    request = make_request("a", 10, max_tokens=3)
    engine.add(request)
    assert engine.scheduler.has_work and request.status is RequestStatus.WAITING
    plan, outputs = engine.step()
    assert engine.worker.rows[request.row].num_prompt == 10
    assert plan.num_scheduled_tokens.tolist() == [10] and outputs.offsets.tolist() == [0]
    plan, outputs = engine.step()
    assert plan.new_requests == [] and plan.num_scheduled_tokens.tolist() == [1] and outputs.finished == []
    _, outputs = engine.step()
    assert outputs.finished == [request] and outputs.offsets.tolist() == [2], "the last token and the end come together"
    assert request.output_token_ids.tolist() == expected_answer(request.prompt_token_ids.tolist(), request.sampling, 0, "", 128)[0]
    assert not engine.scheduler.has_work and engine.scheduler.requests == {}


def test_where_only_the_prompt_is_scored_no_output_is_kept() -> None:
    engine = Engine()
    request = make_request("a", 10, max_tokens=0)
    engine.add(request)
    _, outputs = engine.step()
    assert outputs.finished == [request] and request.finish_reason is FinishReason.LENGTH
    assert (request.num_output_tokens, request.num_tokens) == (0, 10)
    engine.drain()


def test_chunks_add_up_to_the_prompt_and_only_the_last_one_samples() -> None:
    engine = Engine(budget=16)
    engine.add(make_request("a", 50, max_tokens=1))
    chunks, sampled = [], []
    while engine.scheduler.has_work:
        plan, outputs = engine.step()
        chunks += plan.num_scheduled_tokens.tolist()
        sampled.append(len(outputs.token_ids))
    assert chunks == [16, 16, 16, 2] and sampled == [0, 0, 0, 1]


def test_running_requests_come_before_waiting_ones() -> None:
    engine = Engine(budget=8)
    engine.add(make_request("a", 4, max_tokens=9), make_request("b", 20), make_request("c", 4))
    assert engine.counts(engine.plan_and_keep()) == {"a": 4, "c": 4}, "the first, then the shortest"
    assert engine.counts(engine.plan_and_keep()) == {"a": 1, "c": 1, "b": 6}
    assert engine.counts(engine.plan_and_keep()) == {"a": 1, "c": 1, "b": 6}


def test_no_more_sequences_than_allowed() -> None:
    engine = Engine(max_num_seqs=2)
    engine.add(*(make_request(name, 3) for name in "abcd"))
    while engine.scheduler.has_work:
        plan, _ = engine.step()
        assert len(plan.rows) <= 2
    assert engine.scheduler.stats().finished == {"length": 4}


def test_a_head_that_lacks_blocks_is_not_passed_by() -> None:
    engine = Engine(num_blocks=9)  # 8 blocks of 4
    engine.add(make_request("a", 16, max_tokens=3), make_request("big", 20), make_request("small", 2))
    engine.step()
    assert running(engine) == ["a"] and names(engine) == ["big", "small"]
    blocked = engine.scheduler.blocked
    assert blocked is not None and blocked.request.request_id == "big"
    assert (blocked.num_tokens, blocked.num_blocks_needed, blocked.num_blocks_short) == (20, 5, 1)
    engine.drain()


def test_nothing_changes_when_admission_is_refused() -> None:
    engine = Engine(num_blocks=9)
    engine.add(make_request("a", 16, max_tokens=8), make_request("b", 20))
    engine.step()
    pool = engine.scheduler.kv.pool
    before = pool.num_free, pool.num_cached
    plan, _ = engine.plan()
    assert engine.counts(plan) == {"a": 1} and (pool.num_free, pool.num_cached) == (before[0] - 1, before[1])
    assert engine.scheduler.requests["b", 0].block_ids == []


class TestLongPrompts:
    def test_alone_a_prompt_has_the_whole_budget(self) -> None:
        engine = Engine(budget=32, long_prefill_token_threshold=8)
        engine.add(make_request("a", 40))
        assert engine.counts(engine.plan_and_keep()) == {"a": 32}

    def test_beside_others_it_is_capped_running_and_waiting(self) -> None:
        engine = Engine(budget=32, long_prefill_token_threshold=8)
        engine.add(make_request("a", 40), make_request("b", 40), make_request("c", 5))
        assert engine.counts(engine.plan_and_keep()) == {"a": 8, "b": 8, "c": 5}
        assert engine.counts(engine.plan_and_keep()) == {"a": 8, "b": 8, "c": 1}


class TestPriority:
    def test_admission_goes_by_priority_then_arrival(self) -> None:
        engine = Engine(max_num_seqs=1, scheduling_policy="priority")
        engine.add(
            make_request("late", arrival_time=2.0, max_tokens=1),
            make_request("early", arrival_time=1.0, max_tokens=1),
            make_request("urgent", priority=-1, arrival_time=3.0, max_tokens=1),
        )
        order = [engine.step()[1].finished[0].request_id for _ in range(3)]
        assert order == ["urgent", "early", "late"]

    def test_first_come_first_served_does_not_look_at_it(self) -> None:
        engine = Engine(max_num_seqs=1)
        engine.add(make_request("a", priority=5, max_tokens=1), make_request("b", priority=-5, max_tokens=1))
        assert [engine.step()[1].finished[0].request_id for _ in range(2)] == ["a", "b"]

    def test_the_victim_has_the_lowest_priority_wherever_it_stands(self) -> None:
        engine = Engine(num_blocks=7, scheduling_policy="priority")  # 6 blocks of 4, filled by three prompts of 8
        engine.add(
            make_request("first", 8, priority=1, arrival_time=1.0),
            make_request("second", 8, priority=0, arrival_time=2.0),
            make_request("third", 8, priority=0, arrival_time=3.0),
        )
        engine.step()
        assert running(engine) == ["second", "third", "first"]
        plan, _ = engine.step()
        assert running(engine) == ["second", "third"] and names(engine) == ["first"]
        assert len(plan.rows) == 2, "an earlier victim made another request lose its turn"

    def test_among_equals_the_victim_came_last(self) -> None:
        engine = Engine(num_blocks=7, scheduling_policy="priority")
        engine.add(*(make_request(name, 8, arrival_time=float(time)) for name, time in (("c", 3), ("a", 1), ("b", 2))))
        engine.step()
        engine.step()
        assert running(engine) == ["a", "b"] and names(engine) == ["c"]

    def test_a_running_prompt_keeps_half_of_the_budget_from_a_more_urgent_one(self) -> None:
        engine = Engine(budget=8, scheduling_policy="priority")
        engine.add(make_request("bulk", 40, priority=1))
        engine.step()
        engine.add(make_request("urgent", 5, priority=0, max_tokens=8))
        assert engine.counts(engine.plan_and_keep()) == {"bulk": 4, "urgent": 4}

    def test_once_running_the_more_urgent_comes_first(self) -> None:
        engine = Engine(budget=16, scheduling_policy="priority", long_prefill_token_threshold=8)
        engine.add(make_request("bulk", 40, priority=1), make_request("more bulk", 40, priority=1))
        engine.step()
        engine.scheduler.finish("more bulk", -1, FinishReason.ABORT)
        engine.add(make_request("urgent", 24, priority=0))
        engine.step()
        assert running(engine) == ["urgent", "bulk"]
        engine.scheduler.max_num_batched_tokens = engine.worker.budget = 9
        assert engine.counts(engine.plan_and_keep()) == {"urgent": 8, "bulk": 1}


class TestPreemption:
    def test_the_last_comer_waits_first_with_its_tokens_kept_and_answers_the_same(self) -> None:
        engine = Engine(num_blocks=7)
        requests = [make_request(name, 7, max_tokens=8) for name in ("a", "b", "c")]
        engine.add(*requests, make_request("d", 2))
        preempted = []
        while engine.scheduler.has_work:
            before = {key: request.num_preemptions for key, request in engine.scheduler.requests.items()}
            plan, _ = engine.step()
            victims = [r for r in engine.scheduler.waiting if r.num_preemptions > before[r.key]]
            if victims:
                assert names(engine)[0] == victims[-1].request_id and not plan.new_requests
                assert all(r.status is RequestStatus.PREEMPTED and not r.block_ids and r.row < 0 for r in victims)
            preempted += [r.request_id for r in victims]
        assert preempted[0] == "c" and engine.scheduler.stats().preemptions == len(preempted)
        for request in requests:
            answer, reason, _ = expected_answer(request.prompt_token_ids.tolist(), request.sampling, request.seed, "", 128)
            assert (request.output_token_ids.tolist(), request.finish_reason) == (answer, reason)
            assert request.num_preemptions == preempted.count(request.request_id)

    def test_workers_are_told_of_the_row_and_get_the_request_whole_again(self) -> None:
        engine = Engine(num_blocks=5, caching=False)
        engine.add(make_request("a", 7, max_tokens=9), make_request("b", 7, max_tokens=9))
        engine.step()
        row = engine.scheduler.requests["b", 0].row
        engine.step()
        plan, _ = engine.step()
        assert plan.freed_rows == [row]
        while not plan.new_requests:
            plan, _ = engine.step()
        (new,) = plan.new_requests
        assert (new.num_prompt_tokens, new.num_computed_tokens, len(new.token_ids)) == (7, 0, 9)
        engine.drain()

    def test_nobody_is_preempted_while_blocks_suffice(self) -> None:
        engine = Engine(num_blocks=1 + 3 * 4, max_num_seqs=3)
        engine.add(*(make_request(name, 8, max_tokens=8) for name in "abc"))
        engine.drain()
        assert engine.scheduler.stats().preemptions == 0

    def test_two_that_do_not_fit_together_both_end(self) -> None:
        engine = Engine(num_blocks=9)
        engine.add(make_request("a", 4, max_tokens=28), make_request("b", 4, max_tokens=28))
        engine.drain(most_steps=200)
        assert engine.scheduler.stats().finished == {"length": 2}

    def test_a_request_too_long_for_the_pool_ends_with_an_error_that_names_the_need(self) -> None:
        engine = Engine(num_blocks=4)
        request = make_request("a", 8, max_tokens=20)
        engine.add(request)
        ended = [end for outputs in engine.drain() for end in outputs.finished]
        assert ended == [request] and request.finish_reason is FinishReason.ERROR
        assert request.error == "KV cache exhausted: the request alone needs 4 blocks of 4 tokens, the cache has 3"
        assert request.num_output_tokens == 5, "what it had is kept"

    def test_a_prompt_too_long_for_the_pool_lets_the_next_one_run(self) -> None:
        engine = Engine(num_blocks=4)
        long, short = make_request("long", 13), make_request("short", 8, max_tokens=1)
        engine.add(long, short)
        _, outputs = engine.step()
        assert {request.request_id for request in outputs.finished} == {"long", "short"}
        assert long.error == "KV cache exhausted: the request alone needs 4 blocks of 4 tokens, the cache has 3"

    def test_a_prompt_without_room_for_output_ends_at_once(self) -> None:
        engine = Engine(max_model_len=16)
        request = make_request("a", 16)
        engine.add(request)
        assert engine.scheduler.has_work
        plan, outputs = engine.step()
        assert plan.total_num_scheduled_tokens == 0 and outputs.finished == [request]
        assert request.error == "Invalid request: the prompt of 16 tokens leaves no room for output in a context of 16"
        assert not engine.scheduler.has_work


class TestWatermark:
    def test_admission_leaves_a_share_of_the_blocks_free(self) -> None:
        engine = Engine(num_blocks=11, watermark=0.3)
        engine.add(make_request("a", 16, max_tokens=2), make_request("b", 16))
        engine.step()
        assert running(engine) == ["a"] and names(engine) == ["b"]
        engine.drain()

    def test_an_idle_engine_does_not_wait_for_it(self) -> None:
        engine = Engine(num_blocks=11, watermark=0.9)
        engine.add(make_request("a", 36, max_tokens=2))
        engine.step()
        assert running(engine) == ["a"]


class TestShrunkChunks:
    @pytest.mark.parametrize(("shrink", "counts"), [(False, {"a": 1}), (True, {"a": 1, "b": 7})])
    def test_a_running_chunk_shrinks_before_anybody_is_preempted(self, shrink: bool, counts: dict[str, int]) -> None:
        engine = Engine(budget=16, num_blocks=9, shrink_chunks=shrink)
        engine.add(make_request("a", 7, max_tokens=12), make_request("b", 24, max_tokens=1))
        assert engine.counts(engine.plan_and_keep()) == {"a": 7, "b": 9}
        engine.scheduler.kv.pool.allocate(2)  # leaves one block: a needs none, the next chunk of b three
        assert engine.counts(engine.plan()[0]) == counts
        assert engine.scheduler.stats().preemptions == (not shrink)

    def test_a_first_chunk_shrinks_to_what_is_free(self) -> None:
        engine = Engine(num_blocks=9, shrink_chunks=True)
        engine.add(make_request("a", 16, max_tokens=2), make_request("b", 20, max_tokens=1))
        assert engine.counts(engine.plan_and_keep()) == {"a": 16, "b": 16}
        engine.drain()


class TestManyChoices:
    def test_choices_compute_their_prompt_once_in_one_step(self) -> None:
        engine = Engine(budget=64)
        choices = [make_request("a", range(18), choice=choice, max_tokens=5, n=4, seed=3) for choice in range(4)]
        engine.add(*choices)
        plan, outputs = engine.step()
        assert plan.num_scheduled_tokens.tolist() == [18, 2, 2, 2] and len(outputs.token_ids) == 4
        assert [new.num_computed_tokens for new in plan.new_requests] == [0, 16, 16, 16]
        engine.drain()
        for choice, request in enumerate(choices):
            answer = expected_answer(list(range(18)), request.sampling, child_seed(3, choice), "", 128)[0]
            assert request.output_token_ids.tolist() == answer

    def test_a_live_choice_cannot_be_added_again(self) -> None:
        engine = Engine()
        engine.add(make_request("a"))
        with pytest.raises(ValueError, match="request a choice 0 is live already"):
            engine.add(make_request("a"))
        engine.add(make_request("a", choice=1))


class TestPlanningAhead:
    def test_the_next_step_is_planned_while_one_is_out(self) -> None:
        engine = Engine()
        request = make_request("a", 6, max_tokens=4)
        engine.add(request)
        outs = [engine.plan(), engine.plan()]
        assert [out[0].num_scheduled_tokens.tolist() for out in outs] == [[6], [1]]
        tokens = []
        while outs:
            tokens += engine.take_in(outs.pop(0)).token_ids.tolist()
            if engine.scheduler.has_work and len(outs) < 2:
                out = engine.plan()
                if out[1] is not None:
                    outs.append(out)
        assert tokens == expected_answer(request.prompt_token_ids.tolist(), request.sampling, 0, "", 128)[0]
        assert request.finish_reason is FinishReason.LENGTH

    def test_no_step_is_planned_beyond_the_last_token(self) -> None:
        engine = Engine()
        engine.add(make_request("a", 6, max_tokens=2))
        first, second = engine.plan(), engine.plan()
        assert second[1] is not None
        engine.take_in(first)
        assert engine.plan()[1] is None, "the last token is on its way already"
        assert len(engine.take_in(second).finished) == 1

    def test_what_is_computed_for_an_ended_request_is_dropped(self) -> None:
        engine = Engine()
        request = make_request("a", 6, max_tokens=9, ignore_eos=False, eos_token_ids=list(range(16)))
        engine.add(request)
        first, second = engine.plan(), engine.plan()
        assert engine.take_in(first).finished == [] and request.block_ids, "a step that is out writes its blocks"
        outputs = engine.take_in(second)
        assert len(outputs.token_ids) == 0 and outputs.finished == [request] and request.block_ids == []
        assert request.num_output_tokens == 1

    def test_not_two_steps_ahead(self) -> None:
        engine = Engine()
        engine.add(make_request("a", 6, max_tokens=9))
        engine.plan()
        engine.plan()
        with pytest.raises(RuntimeError, match="two steps are out"):
            engine.plan()

    def test_outputs_are_taken_in_order(self) -> None:
        engine = Engine()
        engine.add(make_request("a", 6, max_tokens=9))
        first, second = engine.plan(), engine.plan()
        with pytest.raises(RuntimeError, match="step 2 is not the one whose output is due"):
            engine.take_in(second)
        with pytest.raises(RuntimeError, match="step 1 is not the one"):
            engine.scheduler.update_from_output(first[0], None, 0.0)
        with pytest.raises(RuntimeError, match="step 1 is not the one"):
            engine.scheduler.update_from_output(first[0], second[1], 0.0)

    def test_a_missing_row_is_an_error(self) -> None:
        engine = Engine()
        engine.add(make_request("a", 6), make_request("b", 6))
        plan, output = engine.plan()
        assert output is not None
        output.rows, output.token_ids = output.rows[:1], output.token_ids[:1]
        with pytest.raises(RuntimeError, match="step 1 sampled rows"):
            engine.scheduler.update_from_output(plan, output, 0.0)

    def test_blocks_that_a_returning_step_frees_are_waited_for(self) -> None:
        engine = Engine(num_blocks=7, caching=False)
        engine.add(make_request("a", 8, max_tokens=9), make_request("b", 8, max_tokens=9), make_request("c", 8))
        out = engine.plan()
        engine.scheduler.finish("c", 0, FinishReason.ABORT)
        ahead = engine.plan()
        assert ahead[1] is None and engine.scheduler.stats().preemptions == 0, "preempted though blocks are about to be free"
        engine.take_in(out)
        assert engine.counts(engine.plan()[0]) == {"a": 1, "b": 1}

    def test_a_preempted_request_is_not_admitted_before_its_step_returns(self) -> None:
        engine = Engine(num_blocks=5, caching=False)
        engine.add(make_request("a", 8, max_tokens=9), make_request("b", 8, max_tokens=9))
        out = engine.plan()
        assert engine.plan()[1] is None, "a waits for the blocks of b, which the step that is out still writes"
        assert names(engine) == ["b"] and engine.scheduler.requests["b", 0].block_ids
        engine.scheduler.finish("a", -1, FinishReason.ABORT)
        assert engine.plan()[1] is None and names(engine) == ["b"]
        assert len(engine.take_in(out).token_ids) == 1, "b's token comes, a's is dropped"
        assert engine.counts(engine.plan()[0]) == {"b": 9}


class TestPureDecodes:
    def test_a_step_of_decodes_touches_no_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its cost must not grow with what merely goes on."""
        engine = Engine(max_num_seqs=64, budget=4096, block_size=16, num_blocks=1000, max_model_len=512)
        engine.add(*(make_request(f"r{number}", [number] * 17, max_tokens=200) for number in range(64)))
        engine.step()
        scheduler = engine.scheduler
        touched: list[int] = []
        request_of = scheduler.rows.request
        monkeypatch.setattr(scheduler.rows, "request", lambda row: touched.append(row) or request_of(row))
        for _ in range(14):
            plan, output = engine.plan()
            outputs = scheduler.update_from_output(plan, output, engine.now)
            assert len(plan.rows) == len(outputs.token_ids) == 64 and len(plan.grown_rows) == 0
        assert touched == []
        engine.step()
        plan, _ = engine.plan()
        assert len(plan.grown_rows) == 64 and len(touched) >= 64, "at a block border every row needs a look"


class TestWhatMayBeTaken:
    def test_an_idle_engine_takes_what_one_step_could_hold(self) -> None:
        assert Engine(budget=8192, max_num_seqs=256).scheduler.num_free_request_slots == 64
        assert Engine(budget=8192, max_num_seqs=2).scheduler.num_free_request_slots == 2 + LOOKAHEAD
        assert Engine(budget=16, max_num_seqs=256).scheduler.num_free_request_slots == LOOKAHEAD

    def test_a_full_engine_keeps_a_short_line(self) -> None:
        engine = Engine(max_num_seqs=2)
        engine.add(make_request("a"), make_request("b"))
        engine.step()
        assert engine.scheduler.num_free_request_slots == LOOKAHEAD
        engine.add(*(make_request(f"r{number}") for number in range(3)))
        assert engine.scheduler.num_free_request_slots == LOOKAHEAD - 3
        engine.add(*(make_request(f"s{number}") for number in range(3)))
        assert engine.scheduler.num_free_request_slots == 0

    def test_places_are_the_seats_left_and_none_while_blocks_are_short(self) -> None:
        engine = Engine(num_blocks=17, max_num_seqs=8)
        assert engine.scheduler.num_free_places == 8
        engine.add(make_request("a", 25), make_request("b", 25))
        assert engine.scheduler.num_free_places == 6
        engine.step()
        assert engine.scheduler.num_free_places == 6
        engine.add(make_request("c", 25))
        engine.step()
        assert engine.scheduler.num_free_places == 0, "two have 14 of 16 blocks, the third needs 7"
        engine.scheduler.finish("c", 0, FinishReason.ABORT)
        assert engine.scheduler.num_free_places == 6

    def test_who_waits_for_budget_alone_takes_a_seat_and_no_more(self) -> None:
        engine = Engine(budget=16, max_num_seqs=8)
        engine.add(make_request("a", 40), make_request("b", 40))
        engine.step()
        assert engine.scheduler.num_free_places == 6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SchedulerConfig(None, 8), "at least 1"),
        (SchedulerConfig(8, 0), "at least 1"),
        (SchedulerConfig(8, 8, watermark=1.0), "watermark"),
    ],
)
def test_impossible_limits_are_refused(config: SchedulerConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scheduler(config, 16, 10, 100)


def test_statistics() -> None:
    engine = Engine(budget=16)
    engine.add(make_request("a", 20, max_tokens=3), make_request("b", 20, max_tokens=1))
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.steps, stats.scheduled_tokens) == (1, 1, 1, 16)
    assert stats.num_free_blocks == 63 - 4 and stats.kv_cache_usage == pytest.approx(4 / 63)
    assert (stats.prompt_tokens, stats.generation_tokens) == (0, 0)
    engine.drain()
    stats = engine.scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.finished) == (40, 4, {"length": 2})
    assert stats.scheduled_tokens == 40 + 2 and stats.iteration_tokens_sum == 40 + 4
    assert stats.iteration_tokens_buckets == [1, 1, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4] and stats.steps == 4
    engine.add(make_request("c", 4))
    engine.scheduler.finish("c", -1, FinishReason.ABORT)
    engine.drain()
    assert engine.scheduler.stats().finished == {"length": 2, "abort": 1} and stats.finished == {"length": 2}


def test_a_step_s_size_is_prompt_tokens_computed_and_tokens_generated() -> None:
    engine = Engine(budget=64)
    engine.add(*(make_request(name, 6, max_tokens=10) for name in "abc"))
    engine.drain()
    assert engine.scheduler.stats().iteration_tokens_sum == 3 * (6 + 10)


def test_a_prompt_counts_once_and_when_its_first_token_is_there() -> None:
    engine = Engine(budget=16)
    engine.add(*(make_request("choices", 6, max_tokens=2, choice=choice) for choice in range(3)))
    engine.add(make_request("ended while it waits", 30), make_request("ended in its prompt", 30, priority=-1))
    engine.scheduler.finish("ended while it waits", -1, FinishReason.ABORT)
    engine.step()
    engine.step()
    engine.scheduler.finish("ended in its prompt", -1, FinishReason.ABORT)
    engine.drain()
    assert engine.scheduler.stats().prompt_tokens == 6


def test_what_the_prefix_cache_answered_counts_with_the_prompt() -> None:
    engine = Engine(budget=64)
    engine.add(make_request("first", range(33), max_tokens=1))
    engine.drain()
    engine.add(make_request("again", range(33), max_tokens=1))
    engine.drain()
    stats = engine.scheduler.stats()
    assert (stats.prompt_tokens, stats.prompt_tokens_cached) == (66, 32) and stats.iteration_tokens_sum == 33 + 1 + 1 + 1


def test_times() -> None:
    engine = Engine()
    request = make_request("a", 4, max_tokens=3)
    engine.add(request)
    engine.drain()
    times = request.times
    assert (times.scheduled, times.first_token, times.last_token, times.finished) == (1.0, 2.0, 6.0, 6.0)


def test_a_row_is_freed_and_given_again_in_one_plan() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(make_request("a", 4, max_tokens=1), make_request("b", 4, max_tokens=1))
    engine.step()
    plan, _ = engine.step()
    assert plan.freed_rows == [0] and [new.row for new in plan.new_requests] == [0]
    assert plan.rows.dtype == plan.num_scheduled_tokens.dtype == plan.grown_rows.dtype == plan.grown_blocks.dtype == np.int32
