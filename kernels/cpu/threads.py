"""Compute threads of the CPU kernels: a range of independent work items split over a small pool.

Numba's own parallel loops would start a second OpenMP pool beside torch's, whose idle threads spin against ours; kernels that
release the GIL on plain threads do not. With one thread, the default of small machines, a call is a plain call.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

CHUNKS_PER_THREAD = 4  # items differ in cost (prefill tiles beside decodes), so threads take several smaller chunks


class _Threads:
    def __init__(self) -> None:
        self.count = 1
        self.most = 1
        self.pool: ThreadPoolExecutor | None = None  # of `most` - 1 threads


_threads = _Threads()


def set_num_threads(count: int) -> None:
    """Threads that kernels of this process use from now on; not to be called while a kernel runs."""
    _threads.count = count
    if count > _threads.most:
        if _threads.pool is not None:
            _threads.pool.shutdown()
        _threads.most, _threads.pool = count, ThreadPoolExecutor(count - 1, "kernel")


def num_threads() -> int:
    return _threads.count


def for_ranges(work: Callable[[int, int], None], num_items: int) -> None:
    """Calls `work(begin, end)` on ranges that together cover 0..num_items-1; returns when all are done."""
    pool = _threads.pool
    if pool is None or _threads.count == 1 or num_items < 2 * _threads.count:
        work(0, num_items)
        return
    num_chunks = min(num_items, _threads.count * CHUNKS_PER_THREAD)
    ranges = iter([(num_items * i // num_chunks, num_items * (i + 1) // num_chunks) for i in range(num_chunks)])

    def drain() -> None:
        for begin, end in ranges:  # next() of a list iterator is atomic under the GIL
            work(begin, end)

    helpers = [pool.submit(drain) for _ in range(_threads.count - 1)]
    drain()
    for helper in helpers:
        helper.result()
