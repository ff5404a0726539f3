"""Scheduler and KV manager under random loads, against a worker that checks every slot (`worker_oracle`).

The rules add, step, plan ahead, take in, finish and fail in any order, on pools small enough that preemption is the rule. Some
requests come with output that another engine made. After each rule, all books must balance; every answer must be the one that the
request would get alone.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from engine.config import SchedulerConfig
from engine.protocol import FinishReason, RequestTimes
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_cost import NO_COST, StepCost, StepPace
from engine.scheduling.step_outputs import StepOutputs
from gpu.plan import ModelRunnerOutput, NewRequest, SamplingParams, SchedulerOutput, child_seed, decode_output, decode_plan, encode
from tests.engine.scheduling.worker_oracle import VOCAB_SIZE, WorkerOracle, expected_answer

PREFIX = [(7 * i) % VOCAB_SIZE for i in range(40)]  # prompts share parts of it

CHOICES: dict[str, list[Any]] = {
    "shared": list(range(21)),
    "salt": ["", "", "", "tenant"],
    "n": [1, 1, 1, 2, 3],
    "priority": [-1, 0, 1],
    "arrival": [0, 1, 2, 3],
    "max_tokens": list(range(1, 13)),
    "min_tokens": [0, 0, 1, 2, 4],
    "stops": [False, True],
    "ignore_eos": [False, True],
    "prompt_logprobs": [None, None, None, 0],
    "logprobs": [None, 0],
    "folded": [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 5, 12],  # output tokens that another engine made, as far as there are so many
}
REQUESTS = st.fixed_dictionaries(
    {name: st.sampled_from(values) for name, values in CHOICES.items()}
    | {"own": st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8)}
)


@dataclass
class Story:
    """What the test knows of one choice."""

    request: Request
    prompt: list[int]
    answer: list[int]
    reason: FinishReason
    stop_reason: int | None
    received: list[int] = field(default_factory=list)
    prompt_logprobs: list[int] = field(default_factory=list)  # positions told
    logprobs: list[int] = field(default_factory=list)  # offsets told
    asked: tuple[FinishReason, str, float, list[int]] | None = None  # how `finish` ended it: reason, stop reason, time, output
    over: bool = False  # it has ended, told or not: no output comes any more
    ended: bool = False  # its end came
    num_folded: int = 0  # of the tokens received, those that another engine made
    failed: bool = False  # its row was made to fail


class SchedulerMachine(RuleBasedStateMachine):
    num_steps = 0  # over all examples
    num_preemptions = 0
    num_hit_tokens = 0
    num_planned_ahead = 0
    num_exhausted = 0
    num_restarted = 0
    num_resumed = 0  # choices
    num_complete = 0  # of them, those that lacked only their end

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(4, 24),
        budget=st.integers(1, 24),
        num_rows=st.integers(1, 6),
        policy=st.sampled_from(["fcfs", "priority"]),
        threshold=st.sampled_from([0, 0, 3]),
        shrink=st.booleans(),
        watermark=st.sampled_from([0.0, 0.0, 0.2]),
        caching=st.sampled_from([True, True, True, False]),
        cost=st.sampled_from([NO_COST, NO_COST, StepCost(0.1, 0.1, 0.0), StepCost(0.0, 0.05, 0.01), StepCost(5.0, 1.0, 1.0)]),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        budget: int,
        num_rows: int,
        policy: str,
        threshold: int,
        shrink: bool,
        watermark: float,
        caching: bool,
        cost: StepCost,
    ) -> None:
        self.max_model_len = 28
        config = SchedulerConfig(budget, num_rows, threshold, policy, shrink_chunks=shrink, watermark=watermark)
        pace = StepPace(math.inf if cost is NO_COST else 1.0)
        self.scheduler = Scheduler(config, block_size, num_blocks, self.max_model_len, caching, cost, pace)
        self.worker = WorkerOracle(
            num_rows=num_rows, budget=budget, block_size=block_size, num_blocks=num_blocks, salt_of=self._salt_of
        )
        self.stories: dict[tuple[str, int], Story] = {}
        self.by_handle: dict[tuple[int, int], Story] = {}
        self.salts: dict[int, str] = {}
        self.out: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.time = 0.0
        self.in_step = False  # stays True where a step broke off with an error

    def _salt_of(self, new: NewRequest) -> str:
        return self.salts[new.seed]

    # ---------------------------------------------------------------- rules

    @rule(request=REQUESTS)
    def add(self, request: dict[str, Any]) -> None:
        self._add(**request)

    @rule(seed=st.integers(0, 1 << 32), count=st.integers(1, 60))
    def busy_hours(self, seed: int, count: int) -> None:
        """Many steps for one draw: requests come, are cut short, and steps run, by the dice."""
        dice = random.Random(seed)
        for _ in range(count):
            if dice.random() < 0.3 and len(self.scheduler.requests) < 12:
                self._add(
                    **{name: dice.choice(values) for name, values in CHOICES.items()}, own=dice.choices(range(VOCAB_SIZE), k=4)
                )
            if dice.random() < 0.05 and self.scheduler.requests:
                self._finish(*dice.choice(sorted(self.scheduler.requests)), dice.random() < 0.5, dice.randint(-1, 4), self.time)
            if dice.random() < 0.02:
                self._fail_row(dice.randrange(6))
            if len(self.out) < 2 and dice.random() < 0.7:
                type(self).num_planned_ahead += len(self.out)
                self._plan()
            if self.out and dice.random() < 0.8:
                self._take_in()
            self.books_balance()

    def _add(
        self,
        shared: int,
        own: list[int],
        salt: str,
        n: int,
        priority: int,
        arrival: int,
        max_tokens: int,
        min_tokens: int,
        stops: bool,
        ignore_eos: bool,
        prompt_logprobs: int | None,
        logprobs: int | None,
        folded: int,
    ) -> None:
        number = len({handle for handle, _ in self.by_handle}) + 1
        prompt = (PREFIX[:shared] + own)[: self.max_model_len - 1]
        sampling = SamplingParams(
            n=n,
            seed=number * 1000,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            ignore_eos=ignore_eos,
            eos_token_ids=[3],
            stop_token_ids=[5, 3] if stops else [],
            prompt_logprobs=prompt_logprobs,
            logprobs=logprobs,
        )
        for choice in range(n):
            request = Request(
                f"r{number}",
                np.array(prompt, np.int32),
                sampling,
                choice=choice,
                priority=priority,
                arrival_time=float(arrival),
                cache_salt=salt,
                client=number % 3,
                handle=number,
            )
            seed = child_seed(sampling.seed, choice)
            self.salts[seed] = salt
            story = Story(request, prompt, *expected_answer(prompt, sampling, seed, salt, self.max_model_len))
            self.stories[request.key] = story
            self.by_handle[number, choice] = story
            self._fold(story, folded)
            self.scheduler.add_request(request, self.time)
            assert request.status.finished == (story.received == story.answer)
            story.over = request.status.finished

    def _fold(self, story: Story, count: int) -> None:
        """Another engine made the first `count` tokens; or it died before the first, while it told the prompt's logprobs."""
        request = story.request
        wants_prompt_logprobs = request.sampling.prompt_logprobs is not None
        made = [] if count == 1 and wants_prompt_logprobs else story.answer[:count]
        story.num_folded = len(made)
        story.received += made
        if request.sampling.logprobs is not None:
            story.logprobs += range(len(made))
        if wants_prompt_logprobs and count:
            told = len(story.prompt) if made else min(3, len(story.prompt))
            story.prompt_logprobs += range(1, told)
            request.num_prompt_logprobs = told
        request.resume(np.array(made, np.int32), 0, RequestTimes(scheduled=1.0, first_token=2.0))
        type(self).num_resumed += bool(made)
        type(self).num_complete += story.received == story.answer

    @rule(count=st.integers(1, 24))
    def step(self, count: int) -> None:
        """Planned, run and taken in, strictly in turn."""
        while self.out:
            self._take_in()
        for _ in range(count):
            if not self.scheduler.has_work:
                break
            self._plan()
            if self.out:
                self._take_in()

    @precondition(lambda self: len(self.out) < 2)
    @rule()
    def plan(self) -> None:
        """One step may be planned while another is out."""
        type(self).num_planned_ahead += len(self.out)
        self._plan()

    @precondition(lambda self: self.out)
    @rule()
    def take_in(self) -> None:
        self._take_in()

    @rule(count=st.integers(1, 12))
    def pipeline(self, count: int) -> None:
        """Always one step planned ahead."""
        for _ in range(count):
            if len(self.out) < 2:
                type(self).num_planned_ahead += len(self.out)
                self._plan()
            if len(self.out) == 2:
                self._take_in()

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data(), whole=st.booleans(), keep=st.integers(-1, 4), now=st.integers(0, 9))
    def finish(self, data: st.DataObject, whole: bool, keep: int, now: int) -> None:
        self._finish(*data.draw(st.sampled_from(sorted(self.scheduler.requests))), whole, keep, now)

    def _finish(self, request_id: str, choice: int, whole: bool, keep: int, now: float) -> None:
        reason = FinishReason.ABORT if keep < 0 else FinishReason.STOP
        live = [key for key in self.scheduler.requests if key[0] == request_id and (whole or key[1] == choice)]
        for _ in range(2):  # the second time nothing lives under the key
            self.scheduler.finish(request_id, -1 if whole else choice, reason, keep, "###", None, float(now))
        assert not self.scheduler.requests.keys() & live
        for key in live:
            story = self.stories[key]
            story.over = True
            story.asked = (reason, "###", float(now), story.received if keep < 0 else story.received[:keep])
            if not self.out:
                assert not story.request.block_ids and story.request.row < 0, "blocks are held though no step is out"

    @rule(row=st.integers(0, 5))
    def fail_row(self, row: int) -> None:
        """The request that has the row when it is computed next fails."""
        self._fail_row(row)

    def _fail_row(self, row: int) -> None:
        self.worker.failing.add(row % self.scheduler.max_num_seqs)

    @rule()
    def reset_prefix_cache(self) -> None:
        held = any(request is not None for request in self.scheduler.rows.requests)
        assert self.scheduler.reset_prefix_cache() is not held
        assert held or self.scheduler.kv.pool.num_cached == 0

    # ---------------------------------------------------------------- a step

    def _plan(self) -> None:
        self.time += 1
        self.in_step = True
        scheduler = self.scheduler
        waiting = list(scheduler.waiting)
        preemptions = {key: request.num_preemptions for key, request in scheduler.requests.items()}
        running = [scheduler.rows.request(int(row)) for row in scheduler.rows.running]
        suffices = self._num_blocks_wanted() <= scheduler.kv.pool.num_free
        calm = not self.out
        num_ended = sum(not story.ended for story in self.stories.values()) - len(scheduler.requests)
        plan = scheduler.schedule(self.time)
        preempted = [request for key, request in scheduler.requests.items() if request.num_preemptions > preemptions[key]]
        if suffices:
            assert not preempted, "somebody was preempted though blocks sufficed"
        if calm and scheduler.requests:
            more_ended = sum(not story.ended for story in self.stories.values()) - len(scheduler.requests) - num_ended
            assert plan.total_num_scheduled_tokens or more_ended, "requests live and nothing moves"
        self._check_order(waiting, running, preempted, plan)
        type(self).num_preemptions += len(preempted)
        if plan.total_num_scheduled_tokens:
            type(self).num_steps += 1
            type(self).num_hit_tokens += sum(new.num_computed_tokens for new in plan.new_requests)
            output = self.worker.execute(decode_plan(encode(plan)))
            output.forward_seconds = (plan.step * 37 % 50) / 10  # steps take what they take
            self.out.append((plan, decode_output(encode(output))))
        else:
            assert not plan.new_requests and not len(plan.rows) and not plan.freed_rows
            self._receive(scheduler.update_from_output(plan, None, self.time))
        self.in_step = False

    def _num_blocks_wanted(self) -> int:
        rows = self.scheduler.rows
        missing = rows.num_tokens[rows.running] - rows.capacity[rows.running]
        return int(np.maximum(0, -(-missing // rows.block_size)).sum())

    def _check_order(self, waiting: list[Request], running: list[Request], preempted: list[Request], plan: SchedulerOutput) -> None:
        scheduler = self.scheduler
        by_priority = scheduler.config.scheduling_policy == "priority"

        def key(request: Request) -> tuple[float, ...]:
            return (request.priority, request.arrival_time, request.sequence) if by_priority else (request.sequence,)

        now_running = [scheduler.rows.request(int(row)) for row in scheduler.rows.running]
        assert [key(request) for request in now_running] == sorted(map(key, now_running))
        for victim in preempted:
            assert victim in running and victim.row not in plan.rows.tolist()
            assert all(key(request) < key(victim) for request in now_running), "the victim is not the last"
        if preempted:
            assert not plan.new_requests
            least = min(request.priority for request in scheduler.waiting) if by_priority else 0
            urgent = [request for request in preempted if request.priority == least] if by_priority else preempted
            if urgent:
                head = next(iter(scheduler.waiting))  # or one that was restarted beside a failed row before, and came earlier
                restarted = head.status is RequestStatus.PREEMPTED and all(key(head) < key(victim) for victim in urgent)
                assert head in preempted or restarted, "a preempted request is not at the head"
        admitted = [scheduler.rows.request(new.row) for new in plan.new_requests]
        still_live = [request for request in waiting if not request.status.finished]
        assert set(map(id, admitted)) <= set(map(id, still_live))
        if admitted != still_live[: len(admitted)]:  # prompts share the step: only shorter ones pass others by
            passed = [request for request in still_live[: still_live.index(admitted[-1])] if request not in admitted]
            assert not by_priority or all(request.priority >= admitted[-1].priority for request in passed)

    def _take_in(self) -> None:
        plan, output = self.out.popleft()
        self.time += 1
        self.in_step = True
        failed = [self.scheduler.rows.request(row) for row in output.failed_rows]
        for request in failed:
            self.stories[request.key].failed |= not request.status.finished
        preemptions = self.scheduler.statistics.counters.preemptions
        outputs = self.scheduler.update_from_output(plan, output, self.time)
        self._receive(outputs)
        assert all(request.status.finished for request in failed)
        type(self).num_restarted += self.scheduler.statistics.counters.preemptions - preemptions
        self.in_step = False

    def _receive(self, outputs: StepOutputs) -> None:
        columns = zip(outputs.handles, outputs.choices, outputs.clients, outputs.offsets, outputs.token_ids, strict=True)
        for handle, choice, client, offset, token in columns:
            story = self.by_handle[int(handle), int(choice)]
            assert client == story.request.client
            assert not story.over, "output after the end"
            assert offset == len(story.received)
            story.received.append(int(token))
        for request, offset, logprobs in outputs.logprobs:
            story = self.stories[request.key]
            assert logprobs.token_ids[0] == story.received[offset] and offset == len(story.received) - 1
            story.logprobs.append(offset)
        for request, prompt_logprobs in outputs.prompt_logprobs:
            story = self.stories[request.key]
            count = len(prompt_logprobs.ranks)
            first = prompt_logprobs.position
            assert prompt_logprobs.token_ids.tolist() == story.prompt[first : first + count]
            story.prompt_logprobs += range(first, first + count)
        for request in outputs.finished:
            self._end(self.stories[request.key])
        for story in self.stories.values():
            story.over = story.request.status.finished

    def _end(self, story: Story) -> None:
        request = story.request
        assert not story.ended, "ended twice"
        story.ended = True
        assert request.row < 0 and not request.block_ids, "an end came before its blocks were free"
        if story.asked is not None:
            *how, output = story.asked
            assert [request.finish_reason, request.stop_reason, request.times.finished] == how
            assert request.output_token_ids.tolist() == output
            return
        assert request.output_token_ids.tolist() == story.received == story.answer[: len(story.received)]
        if request.sampling.logprobs is not None:
            assert story.logprobs == list(range(len(story.received)))
        if story.failed:
            assert (request.finish_reason, request.error) == (FinishReason.ERROR, "logits are not finite")
        elif request.finish_reason is FinishReason.ERROR:
            type(self).num_exhausted += 1
            assert request.error and request.error.startswith("KV cache exhausted")
            pool = self.scheduler.kv.pool
            assert math.ceil((request.num_tokens) / self.scheduler.block_size) > pool.num_usable
        else:
            assert (request.finish_reason, request.stop_reason) == (story.reason, story.stop_reason)
            assert story.received == story.answer
            if request.sampling.prompt_logprobs is not None:
                assert story.prompt_logprobs == list(range(1, len(story.prompt)))

    # ---------------------------------------------------------------- always

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        scheduler.check_integrity()
        rows = scheduler.rows
        assert rows.num_running <= scheduler.max_num_seqs
        assert (rows.num_tokens[rows.running] <= rows.max_tokens[rows.running]).all(), "a token beyond the last is planned"
        assert (rows.num_computed[rows.running] <= rows.num_tokens[rows.running]).all()
        assert scheduler.requests.keys() == {key for key, story in self.stories.items() if not story.request.status.finished}
        for key, request in scheduler.requests.items():
            story = self.stories[key]
            assert scheduler.output_token_ids(*key).tolist() == story.received == story.answer[: len(story.received)]
            assert request.status is not RequestStatus.RUNNING or request.block_ids
        if not scheduler.config.watermark and not scheduler.kv.enable_prefix_caching:
            assert scheduler.kv.pool.num_cached == 0

    def teardown(self) -> None:
        """Everything ends, and then everything is free."""
        if not hasattr(self, "scheduler") or self.in_step:
            return
        most = 40 * sum(len(story.answer) + len(story.prompt) for story in self.stories.values()) + 10
        for _ in range(most):
            if not self.scheduler.has_work:
                break
            self.step(1)
        while self.out:
            self._take_in()
        self.books_balance()
        pool = self.scheduler.kv.pool
        assert not self.scheduler.has_work and not len(self.scheduler.waiting) and not self.scheduler.rows.num_running
        assert pool.num_free == pool.num_usable == self.scheduler.stats().num_free_blocks
        assert all(story.ended for story in self.stories.values())
        stats = self.scheduler.stats()
        assert sum(stats.finished.values()) == len(self.stories)
        assert stats.scheduled_tokens == self.worker.num_computed_tokens
        assert stats.iteration_tokens_sum == self.worker.num_computed_prompt_tokens + stats.generation_tokens
        assert stats.generation_tokens == sum(len(story.received) - story.num_folded for story in self.stories.values())
        assert self.scheduler.reset_prefix_cache()
        self.scheduler.check_integrity()


def test_random_loads() -> None:
    """At least 20,000 steps, and more until the loads have met each kind of event."""
    machine = SchedulerMachine

    def has_met_everything() -> bool:
        often = machine.num_preemptions >= 300 and machine.num_planned_ahead >= 1_000 and machine.num_hit_tokens >= 5_000
        often = often and machine.num_resumed >= 300 and machine.num_complete >= 30
        return often and machine.num_exhausted >= 50 and machine.num_restarted >= 5

    example_settings = settings(
        max_examples=100,
        stateful_step_count=50,
        deadline=None,
        derandomize=False,  # hypothesis' profile for CI would give every round the same loads; the seeds below are enough
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    rounds = itertools.count(1)
    while machine.num_steps < 20_000 or (machine.num_steps < 80_000 and not has_met_everything()):
        run_state_machine_as_test(seed(next(rounds))(machine), settings=example_settings)
    print(
        f"{machine.num_steps} steps, {machine.num_planned_ahead} planned ahead, {machine.num_preemptions} preemptions, "
        f"{machine.num_hit_tokens} tokens from the prefix cache, {machine.num_exhausted} requests too long for the pool, "
        f"{machine.num_restarted} restarted beside a failed one, {machine.num_resumed} resumed, "
        f"{machine.num_complete} of them complete"
    )
    assert has_met_everything()
