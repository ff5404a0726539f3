"""Noise and draws of `gumbel` on the CPU: words of the generator in vector registers, chunks that cannot win passed over."""

from __future__ import annotations

import numpy as np

from kernels.cpu.compiled import compiled
from kernels.cpu.math import log_float32

CHUNK = 64  # tokens whose noise is made at once, in vector registers
QUADS = CHUNK // 4  # calls of the generator that they take
MAX_NOISE = np.float32(16.64)  # -log(-log(1 - 2**-24)), rounded up: the largest noise there is
_MINUS_INFINITY = np.float32(-np.inf)


@compiled()
def _fill(noise, words, key, position, first):
    """Noise of tokens first..first+CHUNK-1, first a multiple of four; that of token first + j goes to noise[_place(j)].

    Word by word, not token by token: so both loops run in vector registers. words [CHUNK] uint32 is scratch.
    """
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    for quad in range(QUADS):
        c0 = np.uint64(first // 4 + quad)
        c1 = np.uint64(0)
        c2 = position & mask
        c3 = position >> shift
        k0 = key & mask
        k1 = key >> shift
        for _ in range(10):
            product0 = np.uint64(0xD2511F53) * c0
            product1 = np.uint64(0xCD9E8D57) * c2
            c0, c1, c2, c3 = (product1 >> shift) ^ c1 ^ k0, product1 & mask, (product0 >> shift) ^ c3 ^ k1, product0 & mask
            k0 = (k0 + np.uint64(0x9E3779B9)) & mask
            k1 = (k1 + np.uint64(0xBB67AE85)) & mask
        words[quad] = np.uint32(c0)
        words[QUADS + quad] = np.uint32(c1)
        words[2 * QUADS + quad] = np.uint32(c2)
        words[3 * QUADS + quad] = np.uint32(c3)
    for j in range(CHUNK):
        # 23 bits and a half: (0, 1) without its ends, exact in float32.
        uniform = (np.float32(np.int32(words[j] >> np.uint32(9))) + np.float32(0.5)) * np.float32(1.1920928955078125e-07)
        noise[j] = -log_float32(-log_float32(uniform))


@compiled()
def _place(j):
    return j % 4 * QUADS + j // 4


@compiled()
def fill_all(noise, key, position):
    chunk = np.empty(CHUNK, np.float32)
    words = np.empty(CHUNK, np.uint32)
    for token in range(len(noise)):
        if token % CHUNK == 0:
            _fill(chunk, words, key, position, token)
        noise[token] = chunk[_place(token % CHUNK)]


@compiled(fastmath={"nnan"})
def _largest(x):
    largest = _MINUS_INFINITY
    for i in range(len(x)):
        largest = max(largest, x[i])
    return largest


@compiled()
def draw(drawn, logits, greedy, seeds, positions):
    vocab = logits.shape[1]
    highest = np.empty((vocab + CHUNK - 1) // CHUNK, np.float32)  # logit of each chunk
    noise = np.empty(CHUNK, np.float32)
    words = np.empty(CHUNK, np.uint32)
    for i in range(logits.shape[0]):
        row = logits[i]
        for c in range(len(highest)):
            highest[c] = _largest(row[c * CHUNK : (c + 1) * CHUNK])
        likeliest = np.argmax(highest)
        start = likeliest * CHUNK
        best = start + np.argmax(row[start : start + CHUNK])
        if greedy[i] or row[best] == _MINUS_INFINITY:
            drawn[i] = best
            continue
        key, position = np.uint64(seeds[i]), np.uint64(positions[i])
        # The likeliest token's own score bounds the winner's from below: what cannot reach it with the largest noise is skipped.
        _fill(noise, words, key, position, start)
        best_score = row[best] + noise[_place(best - start)]
        for c in range(len(highest)):
            if highest[c] + MAX_NOISE < best_score:
                continue
            first = c * CHUNK
            _fill(noise, words, key, position, first)
            if highest[c] + _largest(noise) < best_score:
                continue
            for j in range(min(CHUNK, vocab - first)):
                score = row[first + j] + noise[_place(j)]
                if score > best_score or (score == best_score and first + j < best):
                    best, best_score = first + j, score  # type: ignore[assignment]  # numba unifies them
        drawn[i] = best
