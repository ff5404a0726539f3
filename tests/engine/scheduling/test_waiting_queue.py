"""Order of waiting requests."""

from __future__ import annotations

import pytest

from engine.protocol import FinishReason
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.waiting_queue import WaitingQueue, fcfs_key, priority_key
from tests.engine.scheduling.harness import make_request


def pop(queue: WaitingQueue) -> Request:
    request = queue.peek()
    assert request is not None
    queue.remove(request)
    return request


def arrive(queue: WaitingQueue, *requests: Request) -> None:
    for sequence, request in enumerate(requests):
        request.sequence = sequence
        queue.push(request)


def names(queue: WaitingQueue) -> list[str]:
    return [request.request_id for request in queue]


def test_first_come_first_served_ignores_priority() -> None:
    queue = WaitingQueue("fcfs")
    arrive(queue, make_request("a", priority=5, arrival_time=9.0), make_request("b", priority=0, arrival_time=1.0))
    assert names(queue) == ["a", "b"]
    assert [pop(queue).request_id for _ in range(2)] == ["a", "b"]


def test_priority_then_arrival_then_sequence() -> None:
    queue = WaitingQueue("priority")
    arrive(
        queue,
        make_request("late", arrival_time=2.0),
        make_request("early", arrival_time=1.0),
        make_request("also early", arrival_time=1.0),
        make_request("urgent", priority=-1, arrival_time=3.0),
    )
    assert names(queue) == ["urgent", "early", "also early", "late"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_preempted_request_goes_before_all_others_of_its_priority(policy: str) -> None:
    queue = WaitingQueue(policy)
    arrive(queue, make_request("a"), make_request("b"))
    preempted = make_request("c", arrival_time=9.0)
    preempted.sequence, preempted.status = 2, RequestStatus.PREEMPTED
    queue.push(preempted)
    assert names(queue) == ["c", "a", "b"]


def test_ended_requests_are_skipped_and_swept() -> None:
    queue = WaitingQueue("fcfs")
    requests = [make_request(f"r{number}") for number in range(100)]
    arrive(queue, *requests)
    for request in requests[:99]:
        request.end(FinishReason.ABORT, -1, None, None, 0.0)
        queue.remove_ended(request)
    assert len(queue) == 1 and queue.peek() is requests[99]
    assert len(queue._heap) < 30, "ended requests pile up"
    assert pop(queue) is requests[99] and queue.peek() is None and len(queue) == 0


def test_the_first_are_named_in_order_and_one_from_the_middle_may_leave() -> None:
    queue = WaitingQueue("fcfs")
    requests = [make_request(name) for name in "abcde"]
    arrive(queue, *requests)
    requests[0].end(FinishReason.ABORT, -1, None, None, 0.0)
    queue.remove_ended(requests[0])
    assert [request.request_id for request in queue.first(2)] == ["b", "c"]
    queue.remove(requests[2])
    assert names(queue) == ["b", "d", "e"] and len(queue) == 3
    assert queue.first(0) == [] and [request.request_id for request in queue.first(9)] == ["b", "d", "e"]


def test_keys_order_victims() -> None:
    request = make_request("a", priority=3, arrival_time=1.5)
    request.sequence = 7
    assert fcfs_key(request) == (7,) and priority_key(request) == (3, 1.5, 7)
