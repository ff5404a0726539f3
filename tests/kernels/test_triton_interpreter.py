"""Runs tests/kernels/triton under Triton's interpreter, in a process of its own: see the conftest there."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

DIRECTORY = Path(__file__).parent / "triton"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=8", str(DIRECTORY)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=DIRECTORY.parents[2])
    assert run.returncode == 0, run.stdout + run.stderr
