"""Compiling the check's launches for a chip that is not here."""

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu_compile import compile_cases
from benchmarks.kernel_cases import ODD, Case, Trial, checks


def test_launches_compile_and_failures_name_their_reason():
    (case,) = [case for case in checks(ODD, torch.bfloat16, True) if case.operation == "silu_mul"]
    broken = Case("silu_mul", "broken", torch.bfloat16, lambda device: Trial(lambda: 1 // 0, lambda: None, (), 0))
    (first, compiled), (second, reason) = compile_cases([case, case, broken], 90)
    assert first is case and (compiled.kernel, compiled.chip, compiled.spills) == ("silu_mul", 90, 0)
    assert second is broken and reason == "ZeroDivisionError: integer division or modulo by zero"
