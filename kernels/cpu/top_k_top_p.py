"""The filters of `top_k_top_p` on the CPU: heaps instead of sorted rows."""

from __future__ import annotations

import numpy as np

from kernels.cpu.compiled import compiled
from kernels.cpu.math import exp_float32

_MINUS_INFINITY = np.float32(-np.inf)


@compiled()
def filter_rows(logits, top_k, top_p):
    for i in range(logits.shape[0]):
        row = logits[i]
        if 0 < top_k[i] < len(row):
            threshold = _kth_highest(row, top_k[i])
            for token in range(len(row)):
                if row[token] < threshold:
                    row[token] = _MINUS_INFINITY
        if top_p[i] < 1:
            _keep_nucleus(row, top_p[i])


@compiled()
def _kth_highest(row, k):
    """By a heap of the k highest so far, its smallest on top: one comparison for most of the vocabulary."""
    heap = np.full(k, _MINUS_INFINITY)
    for token in range(len(row)):
        value = row[token]
        if value <= heap[0]:
            continue
        hole = 0
        while True:
            child = 2 * hole + 1
            if child >= k:
                break
            if child + 1 < k and heap[child + 1] < heap[child]:
                child += 1
            if heap[child] >= value:
                break
            heap[hole] = heap[child]
            hole = child
        heap[hole] = value
    return heap[0]


@compiled()
def _keep_nucleus(row, top_p):
    """Takes the likeliest token off a heap until the nucleus is full: few are taken, so that nothing is sorted."""
    vocab = len(row)
    highest = row[0]
    for token in range(vocab):
        highest = max(highest, row[token])
    weights = np.empty(vocab, np.float32)
    for token in range(vocab):
        weights[token] = exp_float32(row[token] - highest) if row[token] > _MINUS_INFINITY else np.float32(0.0)
    total = 0.0
    for token in range(vocab):
        total += weights[token]
    # Tokens below (1 - top_p) / vocab together weigh less than 1 - top_p, so that the nucleus is full before the first of them.
    lightest = np.float32((1.0 - top_p) / vocab * total)
    heap = np.empty(vocab, np.int32)
    size = 0
    for token in range(vocab):
        if weights[token] >= lightest:
            heap[size] = token
            size += 1
    for hole in range(size // 2 - 1, -1, -1):
        _sift_down(heap, size, hole, weights)
    before = 0.0
    while size > 0 and (before == 0.0 or before < top_p * total):
        token = heap[0]
        before += weights[token]
        weights[token] = -weights[token]  # kept
        size -= 1
        heap[0] = heap[size]
        _sift_down(heap, size, 0, weights)
    for token in range(vocab):
        if weights[token] >= 0:
            row[token] = _MINUS_INFINITY


@compiled()
def _sift_down(heap, size, hole, weights):
    """Restores the heap below `hole`: heavier tokens first, lower ids first among equals."""
    if size == 0:
        return
    token = heap[hole]
    while True:
        child = 2 * hole + 1
        if child >= size:
            break
        if child + 1 < size and _heavier(heap[child + 1], heap[child], weights):
            child += 1
        if not _heavier(heap[child], token, weights):
            break
        heap[hole] = heap[child]
        hole = child
    heap[hole] = token


@compiled()
def _heavier(a, b, weights):
    return weights[a] > weights[b] or (weights[a] == weights[b] and a < b)
