"""Tests of the Triton kernels against their plain-torch twins: under Triton's interpreter on any machine, for real on a GPU.

The interpreter is chosen when a kernel is imported (`TRITON_INTERPRET=1`) and then for the whole process, so these files are not
collected beside the other tests: `tests/kernels/test_triton_interpreter.py` runs them all in a process of its own. With a GPU they
are collected everywhere, marked `gpu`.

The interpreter proves index arithmetic and numerics of float32 and float16, nothing else: its bfloat16 arithmetic is wrong,
programs run one after another, and there is no limit of shared memory. About 1.5 ms a program: keep grids small.
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = not INTERPRETED and torch.cuda.is_available() and importlib.util.find_spec("triton") is not None

if not (INTERPRETED or ON_GPU):
    collect_ignore_glob = ["test_*.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    # Triton 3.6's interpreter makes Python numbers out of arrays of one element, which numpy will refuse from 2.4 on.
    interpreter = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu if ON_GPU else interpreter)


@pytest.fixture
def device():
    """Where the kernels run."""
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(params=[torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])], ids=str)
def dtype(request):
    return request.param
