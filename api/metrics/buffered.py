"""Cheap events for prometheus_client: observations are collected and handed over together, counters are looked up once."""

from __future__ import annotations

from bisect import bisect_left

from prometheus_client import Counter, Histogram


class Tally:
    """Observations for a histogram, counted here and told it together: each by itself would be two locks and a walk along the
    buckets, as much as the event of a token costs. Belongs to one thread."""

    def __init__(self, histogram: Histogram, bounds: tuple[float, ...]) -> None:
        self._histogram = histogram
        self._bounds = bounds
        self._forget()

    def _forget(self) -> None:
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def tell(self) -> None:
        """Hand the observations since the last call over to the histogram."""
        if not any(self._counts):
            return
        for bucket, count in zip(self._histogram._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        self._histogram._sum.inc(self._sum)
        self._forget()


class Tallied:
    """A histogram with a tally for each set of labels."""

    def __init__(self, histogram: Histogram, bounds: tuple[float, ...]) -> None:
        self._histogram = histogram
        self._bounds = bounds
        self._tallies: dict[tuple[str, ...], Tally] = {}

    def labels(self, *labels: str) -> Tally:
        tally = self._tallies.get(labels)
        if tally is None:
            tally = self._tallies[labels] = Tally(self._histogram.labels(*labels), self._bounds)
        return tally

    def tell(self) -> None:
        for tally in self._tallies.values():
            tally.tell()


class Counted:
    """A counter with its children at hand: to find one, prometheus_client makes a string of each label and takes a lock."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._children: dict[tuple[str, ...], Counter] = {}

    def labels(self, *labels: str) -> Counter:
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = self._counter.labels(*labels)
        return child
