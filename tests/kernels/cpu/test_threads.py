"""Work split over threads."""

import pytest

from kernels.cpu import threads


@pytest.mark.parametrize(("count", "items"), [(1, 5), (3, 1), (3, 6), (4, 101)])
def test_every_item_once(count, items):
    seen = []
    threads.set_num_threads(count)
    try:
        threads.for_ranges(lambda begin, end: seen.extend(range(begin, end)), items)
    finally:
        threads.set_num_threads(1)
    assert sorted(seen) == list(range(items))


def test_an_error_in_a_thread_reaches_the_caller():
    def work(begin, end):
        if begin > 0:
            raise ValueError(f"item {begin}")

    threads.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="item"):
            threads.for_ranges(work, 8)
    finally:
        threads.set_num_threads(1)
