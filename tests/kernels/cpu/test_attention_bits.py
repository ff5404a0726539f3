"""Attention on the CPU: the same bits by every instruction set, whatever requests stand beside."""

import hashlib

import pytest
import torch

from kernels.attention import paged_attention
from kernels.cpu.ir import features
from tests.kernels.cpu.instruction_sets import digest_with_avx2
from tests.kernels.test_attention import make_case


def attend(contexts, query_lens):
    query, *rest = make_case(contexts, query_lens, 6, 2, 64, torch.float16)
    return paged_attention(query.float(), *rest, 0.125, 0)


def digest():
    return hashlib.sha256(attend([1, 70, 200, 130], [1, 1, 9, 130]).numpy().tobytes()).hexdigest()


@pytest.mark.skipif(not {"avx2", "fma"} <= features(), reason="compares instruction sets of x86 processors with AVX2")
def test_without_avx512_the_bits_are_the_same():
    assert digest_with_avx2(__name__) == digest()
