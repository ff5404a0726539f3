"""Work that threads share without a lock: every item once, however threads come and go, and the same bits as one thread's."""

import functools
import threading
import time

import numpy as np
import pytest
import torch
from numba.np.numpy_support import carray

from kernels.cpu import crew
from kernels.cpu.block_matmul import pack_blocks
from kernels.cpu.compiled import compiled
from kernels.cpu.crew import OPERANDS, Crew, make_task, num_threads, pointer_to, share
from kernels.cpu.project import PackedWeight, matmul
from kernels.cpu.quantized_blocks import quantize


@functools.cache
def count_task():
    def count(board, begin, end):
        counts = carray(pointer_to(board[OPERANDS], np.int64), (board[OPERANDS + 1],))
        for i in range(begin, end):
            counts[i] += 1

    return make_task(count)


@compiled()
def count(counts, per_chunk, board, task):
    board[OPERANDS], board[OPERANDS + 1] = counts.ctypes.data, len(counts)
    share(board, task, len(counts), per_chunk)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("items", "per_chunk"), [(1, 1), (2, 1), (101, 7), (5000, 1)])
def test_every_item_once(size, items, per_chunk):
    team = Crew(size)
    counts = np.zeros(items, np.int64)
    for times in range(1, 6):  # helpers of the time before may still be there, or on their way out
        with team.gather(size):
            assert num_threads(crew.board()) == size
            for _ in range(20):
                count(counts, per_chunk, crew.board(), count_task())
        assert (counts == 20 * times).all()
    assert num_threads(crew.board()) == 1


def test_the_leader_needs_nobody():
    """Where helpers do not wake up, as on a busy machine, the leader does all of it."""
    team = Crew(2)
    held = threading.Event()
    team._threads.submit(held.wait)  # its only helper has something else to do
    counts = np.zeros(100, np.int64)
    with team.gather(2):
        count(counts, 1, crew.board(), count_task())
    held.set()
    assert (counts == 1).all()


def test_helpers_leave_when_the_leader_fails():
    team = Crew(3)
    with pytest.raises(ZeroDivisionError), team.gather(3):
        raise ZeroDivisionError
    for helper in team._helping:
        helper.result(timeout=10)


def test_leaders_have_boards_of_their_own():
    """Parts of a step are computed by threads that lead nobody, beside one another."""
    weight = pack_blocks([quantize(torch.randn(4000, 512).numpy())])
    packed = PackedWeight(weight.records, weight.out_features, weight.in_features, weight.segments)
    rows = [torch.randn(3, 512) for _ in range(4)]
    alone = [matmul(x, packed) for x in rows]
    found = [[] for _ in rows]

    def compute(i):
        found[i] += [matmul(rows[i], packed) for _ in range(50)]

    threads = [threading.Thread(target=compute, args=(i,)) for i in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, products in enumerate(found):
        assert len(products) == 50 and all(torch.equal(product, alone[i]) for product in products)


def test_products_have_the_same_bits_by_any_number_of_threads():
    weight = pack_blocks([quantize(torch.randn(4000, 512).numpy())])
    packed = PackedWeight(weight.records, weight.out_features, weight.in_features, weight.segments)
    x = torch.randn(9, 512)
    alone = matmul(x, packed)
    for size in (2, 3):
        with Crew(size).gather(size):
            for _ in range(50):
                assert torch.equal(matmul(x, packed), alone)


def test_waiting_for_a_number_ends_with_it():
    place = np.zeros(1, np.int64)
    waiting = threading.Thread(target=crew.wait_for, args=(place, 2))
    waiting.start()
    place[0] = 1
    time.sleep(0.01)
    assert waiting.is_alive()
    place[0] = 3
    waiting.join(timeout=10)
    assert not waiting.is_alive()
