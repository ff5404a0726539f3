"""Threads that take chunks of the work that another thread does, one task after the other, without a lock.

The thread that computes a step, the leader, writes a task onto its board and takes chunks of it, as do the helpers: each takes the
next chunk when it has time. A helper that the operating system has paused costs what is left of its one chunk, and one that has not
woken up yet costs nothing. Between tasks helpers look at the board again and again, because a task takes less time than waking a
thread does.

A task is a C function (board, begin, end) that does items begin..end-1. It finds its operands on the board, arrays by their
addresses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from kernels.cpu.compiled import compiled
from kernels.cpu.ir import at, call, features, integers, pointers

# Places on the board, 8 bytes each; those that several threads change have a cache line of their own.
_LEFT = 0  # number of the task << CHUNK_BITS | chunks that nobody has taken
_DONE = 8  # chunks that have been done
_HELPERS = 16  # threads that may help; 0: the leader is alone
_TASK, _ITEMS, _PER_CHUNK = 24, 25, 26
OPERANDS = 27  # the first of the task's own
_SIZE = 64

CHUNK_BYTES = 128 << 10  # of weights that a product reads for a chunk: some microseconds
_CHUNK_BITS = 20
_LOOKS = 2000  # at the board, of some 10 ns each, before a thread that waits lets others have its core
_BOARD = types.CPointer(types.int64)

_yield_core = types.ExternalFunction("sched_yield", types.int32())
_own = threading.local()


def board() -> NDArray[np.int64]:
    """The calling thread's own. Nobody helps, except while a `Crew` is gathered."""
    if not hasattr(_own, "board"):
        memory = np.zeros(_SIZE + 8, np.int64)
        first = -memory.ctypes.data % 64 // 8
        _own.board = memory[first : first + _SIZE]
    found: NDArray[np.int64] = _own.board
    return found


class Crew:
    """`size` - 1 helpers for whoever leads. They have no work, and take no time, except while they are gathered."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._threads = ThreadPoolExecutor(max(1, size - 1), "crew")
        self._helping: list[Future[None]] = []

    @contextmanager
    def gather(self, count: int) -> Iterator[None]:
        """The calling thread's tasks are shared meanwhile by `count` threads, itself one of them, as soon as helpers wake up."""
        self._helping = [helper for helper in self._helping if not helper.done()]  # of the last time, on their way out or not yet
        own = board()
        own[_HELPERS] = count - 1
        for _ in range(count - 1 - len(self._helping)):
            self._helping.append(self._threads.submit(_help, own))
        try:
            yield
        finally:
            own[_HELPERS] = 0


def make_task(function: Callable[..., None], fastmath: frozenset[str] | set[str] = frozenset()) -> int:
    """The address of a compiled task; `function` (board, begin, end) closes over nothing but numbers and types."""
    signature = types.void(_BOARD, types.int64, types.int64)
    compiler: Any = numba.cfunc(signature, cache=True, error_model="numpy", fastmath=set(fastmath) or False)
    task = compiler(function)
    tasks.append(task)
    address: int = task.address
    return address


tasks: list[Any] = []  # that were made, kept because their code would go with them


# ---- compiled ----


@compiled()
def share(board, task, num_items, per_chunk):
    """Does the items 0..num_items-1 of a task whose operands are on the board, with the helpers that there are."""
    chunks = (num_items + per_chunk - 1) // per_chunk
    if board[_HELPERS] == 0 or chunks < 2:
        _call(task, board, 0, num_items)
        return
    board[_TASK], board[_ITEMS], board[_PER_CHUNK], board[_DONE] = task, num_items, per_chunk, 0
    number = (board[_LEFT] >> _CHUNK_BITS) + 1
    put(board, _LEFT, number << _CHUNK_BITS | chunks)  # what was written before is seen by whoever sees this
    while _do_chunk(board):
        pass
    looks = 0
    while _look(board, _DONE) < chunks:
        looks = _wait(looks)


@compiled()
def wait_for(place, number):
    """Returns when place[0], which only grows, is `number` or more."""
    looks = 0
    while _look(place, 0) < number:
        looks = _wait(looks)


@compiled()
def num_threads(board):
    """That share a task."""
    return board[_HELPERS] + 1


@compiled()
def _help(board):
    """Takes chunks until the leader has no use for helpers."""
    looks = 0
    while _look(board, _HELPERS) > 0:
        looks = 0 if _do_chunk(board) else _wait(looks)


@compiled()
def _do_chunk(board):
    """Whether there was one left. While it is being done the task cannot end, nor the board change."""
    while True:
        left: Any = _look(board, _LEFT)
        number = (left & ((1 << _CHUNK_BITS) - 1)) - 1
        if number < 0:
            return False
        if _swap(board, _LEFT, left, left - 1):
            break
    begin = number * board[_PER_CHUNK]
    _call(board[_TASK], board, begin, min(board[_ITEMS], begin + board[_PER_CHUNK]))
    _add(board, _DONE, 1)
    return True


@compiled()
def _wait(looks):
    """Between two looks at the board, of which there have been `looks`; returns one more."""
    if looks > _LOOKS:
        _yield_core()
    else:
        _pause()
    return looks + 1


@intrinsic
def pointer_to(typing_context, address, dtype):
    """A pointer to elements of a numpy type, for `carray`."""
    return _pointer(types.CPointer(dtype.dtype), dtype)


@intrinsic
def pointer_like(typing_context, address, array):
    """A pointer to elements of an array's type, for `carray`."""
    return _pointer(types.CPointer(array.dtype), array)


def _pointer(pointer, other):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(types.int64, other), generate


@intrinsic
def _call(typing_context, task, board, begin, end):
    def generate(context, builder, signature, arguments):
        (data,) = pointers(context, builder, signature, arguments, (1,))
        address, first, last = integers(context, builder, signature, arguments, (0, 2, 3))
        kind = ir.FunctionType(ir.VoidType(), [data.type, first.type, last.type])
        builder.call(builder.inttoptr(address, kind.as_pointer()), [data, first, last])
        return context.get_dummy_value()

    return types.none(task, board, begin, end), generate


@intrinsic
def _look(typing_context, board, place):
    return types.int64(board, place), _at_place(lambda builder, pointer: builder.load_atomic(pointer, "acquire", 8))


@intrinsic
def put(typing_context, board, place, number):
    """board[place] = number; a thread that sees it sees all that this one wrote before."""

    def store(builder, pointer, value):
        builder.store_atomic(value, pointer, "release", 8)

    return types.none(board, place, number), _at_place(store)


@intrinsic
def _add(typing_context, board, place, number):
    return types.int64(board, place, number), _at_place(
        lambda builder, pointer, x: builder.atomic_rmw("add", pointer, x, "acq_rel")
    )


@intrinsic
def _swap(typing_context, board, place, old, new):
    """Whether the place had `old`; then it has `new`."""

    def exchange(builder, pointer, before, after):
        return builder.extract_value(builder.cmpxchg(pointer, before, after, "acq_rel", "acquire"), 1)

    return types.boolean(board, place, old, new), _at_place(exchange)


def _at_place(emit):
    """Of an intrinsic (board, place, *numbers): emit(builder, pointer to the place, *numbers)."""

    def generate(context, builder, signature, arguments):
        (data,) = pointers(context, builder, signature, arguments, (0,))
        place, *numbers = integers(context, builder, signature, arguments, range(1, len(arguments)))
        value = emit(builder, at(builder, data, place), *numbers)
        return context.get_dummy_value() if value is None else value

    return generate


@intrinsic
def _pause(typing_context):
    """Tells the processor that the thread only looks at memory again and again."""

    def generate(context, builder, signature, arguments):
        if "sse2" in features():
            call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.none(), generate
