"""Requests by themselves: tokens, choices, ends."""

from __future__ import annotations

import numpy as np
import pytest

from engine.protocol import EngineCoreRequest, FinishReason, encode_column
from engine.scheduling.request import Request, RequestStatus, make_requests
from gpu.plan import SamplingParams, child_seed
from tests.engine.scheduling.harness import make_request


def test_choices_of_a_request_share_all_but_seed_and_prompt_logprobs() -> None:
    source = EngineCoreRequest(
        version=1,
        request_id="r-1",
        prompt_token_ids=encode_column([5, 6, 7]),
        sampling=SamplingParams(n=3, seed=42, prompt_logprobs=2),
        client="api",
        handle=9,
        priority=2,
        cache_salt="s",
    )
    choices = make_requests(source, np.array([5, 6, 7], np.int32), enqueued=100.0, received=101.0)
    assert [request.key for request in choices] == [("r-1", 0), ("r-1", 1), ("r-1", 2)]
    assert [request.seed for request in choices] == [child_seed(42, choice) for choice in range(3)]
    assert len({request.seed for request in choices}) == 3
    assert [request.sampling.prompt_logprobs for request in choices] == [2, None, None]
    for request in choices:
        assert request.prompt_token_ids.tolist() == request.token_ids.tolist() == [5, 6, 7]
        assert (request.handle, request.priority, request.cache_salt) == (9, 2, "s")
        assert (request.arrival_time, request.times.enqueued, request.times.received) == (100.0, 100.0, 101.0)
    choices[0].times.scheduled = 102.0
    assert choices[1].times.scheduled == 0.0, "choices share a clock sheet"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        Request("a", np.array([], np.int32), SamplingParams())


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (FinishReason.STOP, RequestStatus.FINISHED_STOPPED),
        (FinishReason.LENGTH, RequestStatus.FINISHED_LENGTH_CAPPED),
        (FinishReason.ABORT, RequestStatus.FINISHED_ABORTED),
        (FinishReason.ERROR, RequestStatus.FINISHED_ERROR),
    ],
)
def test_the_end_is_told_once(reason: FinishReason, status: RequestStatus) -> None:
    request = make_request("a")
    assert not request.status.finished
    request.end(reason, -1, "###", "why", 5.0)
    assert request.status is status and status.finished
    assert (request.finish_reason, request.stop_reason, request.error, request.times.finished) == (reason, "###", "why", 5.0)
    with pytest.raises(RuntimeError, match="ends twice"):
        request.end(reason, -1, None, None, 6.0)


@pytest.mark.parametrize(("keep", "left"), [(-1, [7, 8, 9]), (0, []), (2, [7, 8]), (3, [7, 8, 9]), (9, [7, 8, 9])])
def test_keep_cuts_the_output(keep: int, left: list[int]) -> None:
    request = make_request("a", [1, 2])
    request.token_bytes += encode_column([7, 8, 9])
    request.end(FinishReason.STOP, keep, None, None, 0.0)
    assert request.output_token_ids.tolist() == left and request.num_output_tokens == len(left)
    assert request.prompt_token_ids.tolist() == [1, 2]


def test_token_copies_do_not_pin_the_buffer() -> None:
    request = make_request("a", [1, 2])
    views = request.token_ids, request.prompt_token_ids, request.output_token_ids
    request.token_bytes += encode_column([3])
    assert request.num_tokens == 3 and views[0].tolist() == [1, 2]


def test_prompt_logprobs_are_wanted_until_told() -> None:
    request = make_request("a", [1, 2, 3], prompt_logprobs=1)
    assert request.wants_prompt_logprobs
    request.num_prompt_logprobs = 3
    assert not request.wants_prompt_logprobs
    assert not make_request("b", [1], prompt_logprobs=1).wants_prompt_logprobs, "one token has none"
    assert not make_request("c", [1, 2]).wants_prompt_logprobs
