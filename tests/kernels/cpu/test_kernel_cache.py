"""Compiled kernels are found again by the next process, and steps of other sizes compile nothing: else users wait for seconds."""

import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numba
import torch
from numba.core.dispatcher import Dispatcher

import kernels.cpu
from kernels.attention import paged_attention
from kernels.cpu import crew
from tests.kernels.test_attention import make_case

ROOT = Path(__file__).parents[3]


def attend_with_every_cache():
    """Prints by type of the cache how often attention was compiled, for one token and several, and how often not found."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        before = len(crew.tasks)
        for count in (1, 5):
            query, *rest = make_case([40], [count], 9, 3, 64, dtype)
            heads = torch.cat([query.float(), torch.zeros(count, 6, 64)], dim=1)  # as projected: queries, keys, values
            paged_attention(heads[:, :9], *rest, 0.125, 0)
        made = crew.tasks[before:]
        print(len(made), sum(not task.cache_hits for task in made))


def run(cache):
    command = [sys.executable, "-c", "from tests.kernels.cpu.test_kernel_cache import *; attend_with_every_cache()"]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    return [tuple(map(int, line.split())) for line in ran.stdout.splitlines()]


def test_what_other_versions_compiled_goes_after_a_month_without_use(tmp_path):
    own = Path(numba.config.CACHE_DIR).name
    unused, used = "kernels-" + 16 * "0", "kernels-" + 16 * "1"
    ages = {unused: 31, used: 29, own: 400, "models": 400, "kernels-of-somebody": 400}  # days
    for name, days in ages.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "code").touch()
        os.utime(tmp_path / name, (time.time() - 86400 * days,) * 2)
    command = [sys.executable, "-c", "import kernels, numba; print(numba.config.CACHE_DIR)"]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(tmp_path / own)
    assert {path.name for path in tmp_path.iterdir()} == ages.keys() - {unused}


def test_attention_is_compiled_once_for_each_type_of_cache(tmp_path):
    """In a copy of this machine's cache, to which no other process writes: the first use compiles, the second finds it."""
    own = Path(numba.config.CACHE_DIR)
    shutil.copytree(own, tmp_path / own.name, ignore=shutil.ignore_patterns("*.tmp.*"))  # written just now
    assert all(signatures == 1 and misses <= 1 for signatures, misses in run(tmp_path))
    assert run(tmp_path) == [(1, 0)] * 3


def test_every_compiled_function_states_its_arithmetic():
    """One without flags would take those of the first caller that compiles it, and keep them in the cache."""
    functions = [
        (f"{module.name}.{name}", function)
        for module in pkgutil.iter_modules(kernels.cpu.__path__)
        for name, function in vars(importlib.import_module(f"kernels.cpu.{module.name}")).items()
        if isinstance(function, Dispatcher) and function.targetoptions.get("inline", "never") != "always"
    ]
    assert len(functions) > 20
    assert [name for name, function in functions if not {"fastmath", "error_model"} <= function.targetoptions.keys()] == []


def test_bits_do_not_depend_on_what_was_compiled_before(tmp_path):
    gates = (
        "import hashlib, torch; from kernels.silu_mul import silu_mul; torch.manual_seed(0); "
        "print(hashlib.sha256(silu_mul(torch.randn(8, 512)).numpy()).hexdigest())"
    )
    exponential = "import numpy; from kernels.cpu.math import exp_float32; exp_float32(numpy.float32(1)); "
    digests = set()
    for number, code in enumerate((gates, exponential + gates)):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / str(number))}
        ran = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
        digests.add(ran.stdout)
    assert len(digests) == 1
