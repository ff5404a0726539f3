"""The order of waiting and running requests under a scheduling policy."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from engine.scheduling.request import Request, RequestStatus

OrderKey = tuple[float, ...]  # smaller is earlier; the last running request is the first to be preempted


def fcfs_key(request: Request) -> OrderKey:
    """First come, first served, in the order in which the scheduler got them."""
    return (request.sequence,)


def priority_key(request: Request) -> OrderKey:
    """Lower priority value first, then earlier arrival at the API server."""
    return (request.priority, request.arrival_time, request.sequence)


ORDER_KEYS: dict[str, Callable[[Request], OrderKey]] = {"fcfs": fcfs_key, "priority": priority_key}


class WaitingQueue:
    """Requests that wait for admission, in the policy's order; preempted ones before all others (of their priority).

    Removal from the middle only counts: an ended request is skipped when it comes up, and swept when such are the most.
    """

    def __init__(self, policy: str) -> None:
        self._by_priority = policy == "priority"
        self._heap: list[tuple[OrderKey, Request]] = []
        self._num_waiting = 0
        self.num_prompt_tokens = 0  # of those that wait

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap, key=lambda entry: entry[0]) if not request.status.finished)

    def push(self, request: Request) -> None:
        fresh = request.status is not RequestStatus.PREEMPTED
        if self._by_priority:
            key: OrderKey = (request.priority, fresh, request.arrival_time, request.sequence)
        else:
            key = (fresh, request.sequence)
        heapq.heappush(self._heap, (key, request))
        self._count(request, 1)

    def peek(self) -> Request | None:
        while self._heap and self._heap[0][1].status.finished:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def first(self, count: int) -> list[Request]:
        """At most `count`, in order."""
        if not self._num_waiting or count <= 0:
            return []
        ended = len(self._heap) - self._num_waiting
        entries = heapq.nsmallest(count + ended, self._heap, key=lambda entry: entry[0])
        return [request for _, request in entries if not request.status.finished][:count]

    def remove(self, request: Request) -> None:
        """One that waits; the first one costs least."""
        if self.peek() is request:
            heapq.heappop(self._heap)
        else:
            self._heap = [entry for entry in self._heap if entry[1] is not request]
            heapq.heapify(self._heap)
        self._count(request, -1)

    def remove_ended(self, request: Request) -> None:
        """One that waits here has ended: its status says so."""
        self._count(request, -1)
        if len(self._heap) > 2 * self._num_waiting + 16:
            self._heap = [entry for entry in self._heap if not entry[1].status.finished]
            heapq.heapify(self._heap)

    def _count(self, request: Request, sign: int) -> None:
        self._num_waiting += sign
        self.num_prompt_tokens += sign * request.num_prompt_tokens
