"""Every operation that has a Triton kernel has a plain-torch twin, and the three take the same arguments."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import kernels
from kernels import reference

pytest.importorskip("triton")

OPERATIONS = sorted(
    (path.stem, *match)
    for path in Path(kernels.__file__).parent.glob("*.py")
    for match in re.findall(r'device\.accelerated\(\s*"(\w+)", "(\w+)"\s*\)', path.read_text())
)


def test_operations_are_found():
    assert len(OPERATIONS) > 15


@pytest.mark.parametrize(("file", "operation", "function"), OPERATIONS)
def test_signatures_are_the_same(file, operation, function):
    public = getattr(importlib.import_module(f"kernels.{file}"), function)
    in_triton = getattr(importlib.import_module(f"kernels.triton.{operation}"), function)
    twin = getattr(reference, function)
    assert inspect.signature(in_triton) == inspect.signature(public) == inspect.signature(twin)
