"""Ends from outside (abort, stop string), in every state, and failures of one row."""

from __future__ import annotations

import pytest

from engine.protocol import FinishReason
from engine.scheduling.request import RequestStatus
from gpu.plan import SamplingParams
from tests.engine.scheduling.harness import Engine, make_request
from tests.engine.scheduling.worker_oracle import expected_answer

ABORT, STOP, ERROR = FinishReason.ABORT, FinishReason.STOP, FinishReason.ERROR


def test_unknown_requests_are_left_aside() -> None:
    engine = Engine()
    engine.scheduler.finish("nobody", -1, ABORT)
    assert not engine.scheduler.has_work
    engine.add(make_request("a"))
    engine.scheduler.finish("a", 1, ABORT)
    assert [end.finish_reason for outputs in engine.drain() for end in outputs.finished] == [FinishReason.LENGTH]
    engine.scheduler.finish("a", -1, ABORT)
    assert not engine.scheduler.has_work, "it has ended"


def test_a_waiting_request_ends_at_once() -> None:
    engine = Engine(max_num_seqs=1)
    request = make_request("b")
    engine.add(make_request("a"), request, make_request("c", max_tokens=1))
    engine.step()
    engine.scheduler.finish("b", 0, ABORT, now=7.0)
    assert (request.status, request.times.finished) == (RequestStatus.FINISHED_ABORTED, 7.0)
    assert engine.scheduler.stats().num_waiting == 1
    assert engine.step()[1].finished == [request]
    assert [end.request_id for outputs in engine.drain() for end in outputs.finished] == ["a", "c"]


def test_a_request_ended_between_steps_frees_its_blocks_at_once() -> None:
    engine = Engine()
    request = make_request("a", 10, max_tokens=50)
    engine.add(request)
    engine.step()
    row = request.row
    engine.scheduler.finish("a", -1, ABORT)
    assert request.block_ids == [] and engine.scheduler.kv.pool.num_free == 63
    engine.add(make_request("b"))
    plan, outputs = engine.step()
    assert plan.freed_rows == [row] and outputs.finished == [request]


def test_a_request_ended_in_a_step_frees_its_blocks_when_the_step_returns() -> None:
    engine = Engine()
    request = make_request("a", 10, max_tokens=50, logprobs=0, prompt_logprobs=0)
    engine.add(request, make_request("b", 10))
    out = engine.plan()
    engine.scheduler.finish("a", -1, ABORT)
    assert request.block_ids and engine.scheduler.kv.pool.num_free < 63 - 3
    assert ("a", 0) not in engine.scheduler.requests
    outputs = engine.take_in(out)
    assert request.block_ids == [] and outputs.finished == [request]
    assert len(outputs.token_ids) == 1 and outputs.logprobs == [] and outputs.prompt_logprobs == []
    assert request.num_output_tokens == 0
    engine.drain()


def test_a_preempted_request_ends_at_once() -> None:
    engine = Engine(num_blocks=7)
    engine.add(*(make_request(name, 8, max_tokens=9) for name in "abc"))
    engine.step()
    engine.step()
    (victim,) = engine.scheduler.waiting
    engine.scheduler.finish("c", -1, ABORT)
    assert victim.finish_reason is ABORT and victim.num_output_tokens == 1
    assert engine.scheduler.stats().num_waiting == 0
    engine.drain()


def test_a_request_preempted_while_a_step_is_out_ends_when_the_step_returns() -> None:
    """Its last token is on its way: it still comes, once; an abort before that drops it."""
    for abort in (False, True):
        engine = Engine(num_blocks=7, caching=False)
        engine.add(*(make_request(name, 8, max_tokens=9, handle=number) for number, name in enumerate("abc")))
        first = engine.plan()
        second = engine.plan()
        victim = engine.scheduler.requests["c", 0]
        assert victim.status is RequestStatus.PREEMPTED and victim.block_ids, "the step that is out writes them"
        if abort:
            engine.scheduler.finish("c", -1, ABORT)
        outputs = engine.take_in(first)
        assert outputs.handles.tolist() == ([0, 1] if abort else [0, 1, 2])
        assert outputs.finished == ([victim] if abort else [])
        assert victim.block_ids == [] and victim.num_output_tokens == (0 if abort else 1)
        if second[1] is not None:
            engine.take_in(second)
        engine.drain()
        assert engine.scheduler.stats().finished == ({"abort": 1, "length": 2} if abort else {"length": 3})


def test_finish_ends_one_choice_or_all() -> None:
    engine = Engine()
    choices = [make_request("a", 8, choice=choice, max_tokens=9) for choice in range(3)]
    engine.add(*choices)
    engine.step()
    engine.scheduler.finish("a", 1, STOP, keep=0, stop_reason="\n")
    assert choices[1].stop_reason == "\n" and choices[1].num_output_tokens == 0
    engine.scheduler.finish("a", -1, ABORT)
    assert engine.step()[1].finished == [choices[1], choices[0], choices[2]]
    assert not engine.scheduler.has_work


def test_an_end_that_a_step_in_flight_defers_comes_when_that_step_returned() -> None:
    """The last token comes at once; the end, asked for or not, when nothing may write the blocks any more."""
    engine = Engine()
    answer = expected_answer([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), 0, "", 128)[0]
    request = make_request("a", [1, 2, 3], max_tokens=9, stop_token_ids=[answer[0]])
    engine.add(request)
    first, second = engine.plan(), engine.plan()
    outputs = engine.take_in(first)
    assert outputs.token_ids.tolist() == answer[:1] and outputs.finished == [] and request.block_ids
    assert request.finish_reason is STOP and not engine.scheduler.requests
    engine.scheduler.finish("a", -1, ERROR, error="too late")
    outputs = engine.take_in(second)
    assert len(outputs.token_ids) == 0 and outputs.finished == [request] and not request.block_ids
    assert (request.finish_reason, request.error) == (STOP, None)


@pytest.mark.parametrize("keep", [-1, 0, 3, 6, 99])
def test_keep_cuts_the_output(keep: int) -> None:
    engine = Engine()
    request = make_request("a", 10, max_tokens=50)
    engine.add(request)
    made = [token for _ in range(6) for token in engine.step()[1].token_ids.tolist()]
    assert engine.scheduler.output_token_ids("a", 0).tolist() == made
    engine.scheduler.finish("a", 0, STOP, keep, "stop here")
    assert request.output_token_ids.tolist() == (made if keep < 0 else made[:keep])
    assert (request.status, request.stop_reason) == (RequestStatus.FINISHED_STOPPED, "stop here")


def test_an_id_may_come_again_after_its_end_even_with_a_step_out() -> None:
    engine = Engine()
    engine.add(make_request("a", 10, max_tokens=2))
    out = engine.plan()
    engine.scheduler.finish("a", -1, ABORT)
    again = make_request("a", 10, max_tokens=2)
    engine.add(again)
    engine.take_in(out)
    assert again.num_output_tokens == 0
    engine.drain()
    assert again.finish_reason is FinishReason.LENGTH and engine.scheduler.stats().finished == {"abort": 1, "length": 1}


def test_output_so_far_is_there_for_a_replay_in_every_state() -> None:
    engine = Engine(num_blocks=7)
    engine.add(*(make_request(name, 7, max_tokens=9) for name in "abc"))
    received: dict[str, list[int]] = {name: [] for name in "abc"}
    while engine.scheduler.has_work:
        plan, output = engine.plan()
        assert output is not None
        sampled = dict(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True))
        for row, token in sampled.items():
            received[engine.scheduler.rows.request(row).request_id].append(token)
        engine.take_in((plan, output))
        for request_id, choice in engine.scheduler.requests:
            assert engine.scheduler.output_token_ids(request_id, choice).tolist() == received[request_id]
    with pytest.raises(KeyError):
        engine.scheduler.output_token_ids("a", 0)


class TestFailedRows:
    def test_one_request_fails_and_the_others_go_on(self) -> None:
        engine = Engine()
        good, bad = make_request("good", 10), make_request("bad", 10)
        engine.add(good, bad)
        engine.step()
        engine.worker.failing.add(bad.row)
        _, outputs = engine.step()
        assert outputs.finished == [bad] and (bad.finish_reason, bad.error) == (ERROR, "logits are not finite")
        assert bad.block_ids == [] and bad.num_output_tokens == 1 and len(outputs.token_ids) == 1
        engine.drain()
        assert good.finish_reason is FinishReason.LENGTH

    def test_the_blocks_of_a_failed_row_leave_the_prefix_cache(self) -> None:
        engine = Engine()
        bad = make_request("bad", range(32))
        engine.add(bad)
        engine.step()
        assert engine.scheduler.kv.pool.num_cached == 8
        engine.worker.failing.add(bad.row)
        engine.step()
        assert engine.scheduler.kv.pool.num_cached == 0
        engine.add(make_request("again", range(32)))
        assert engine.step()[0].new_requests[0].num_computed_tokens == 0

    @pytest.mark.parametrize("ahead", [False, True])
    def test_a_request_that_shares_blocks_of_a_failed_row_computes_anew(self, ahead: bool) -> None:
        """A duplicate reads what the failed row wrote: its token is wrong, and so is what it wrote itself."""
        engine = Engine()
        bad, twin, other = make_request("bad", range(20)), make_request("twin", range(20)), make_request("other", 20)
        engine.add(bad, twin, other)
        engine.worker.failing.add(0)
        outs = [engine.plan(), *([engine.plan()] if ahead else [])]
        outputs = engine.take_in(outs[0])
        ended = outputs.finished
        assert bad.finish_reason is ERROR and len(outputs.token_ids) == 1, "only the one that shares nothing got a token"
        assert twin.status is RequestStatus.PREEMPTED and engine.scheduler.kv.pool.find(twin.block_hashes[0]) is None
        for out in outs[1:]:
            outputs = engine.take_in(out)
            assert len(outputs.token_ids) == 1
            ended = ended + outputs.finished
        assert ended == [bad]
        engine.drain()
        answer = expected_answer(list(range(20)), twin.sampling, twin.seed, "", 128)[0]
        assert twin.output_token_ids.tolist() == answer and other.num_preemptions == 0

    def test_a_row_whose_request_ended_meanwhile_may_fail(self) -> None:
        engine = Engine()
        bad = make_request("bad", 10)
        engine.add(bad)
        engine.worker.failing.add(0)
        out = engine.plan()
        engine.scheduler.finish("bad", -1, ABORT)
        assert engine.take_in(out).finished == [bad] and bad.finish_reason is ABORT and bad.block_ids == []


def test_output_columns_name_client_handle_and_choice_of_each_token() -> None:
    engine = Engine()
    engine.add(
        make_request("a", 4, client=1, handle=1 << 40, logprobs=0),
        make_request("b", 4, choice=0, client=2, handle=7),
        make_request("b", 4, choice=1, client=2, handle=7),
    )
    for offset in range(2):
        _, outputs = engine.step()
        assert outputs.clients.tolist() == [1, 2, 2] and outputs.handles.tolist() == [1 << 40, 7, 7]
        assert outputs.choices.tolist() == [0, 0, 1] and outputs.offsets.tolist() == [offset] * 3
        ((request, at, logprobs),) = outputs.logprobs
        assert (request.request_id, at, logprobs.token_ids[0]) == ("a", offset, outputs.token_ids[0])
