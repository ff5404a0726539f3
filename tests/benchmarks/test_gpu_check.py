"""The command that checks a GPU, tried without one: by Triton's interpreter, with no packages but torch, Triton and numpy."""

import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import kernels.triton
from benchmarks import gpu_check
from benchmarks.gpu_check import CHECKS, OPERATIONS, TIMES, Runner
from benchmarks.kernel_cases import LLAMA_8B, ODD, TINY, Case, Trial, checks, largest_difference, timings

ROOT = Path(__file__).parents[2]
# What torch and Triton need themselves.
INSTALLED = (
    "torch", "torchgen", "functorch", "triton", "numpy", "typing_extensions", "sympy", "mpmath", "filelock", "jinja2", "markupsafe",
    "networkx", "fsspec",
)  # fmt: skip


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """An interpreter that finds those packages alone, as this environment has them."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for path in Path(importlib.util.find_spec("torch").origin).parents[1].iterdir():
        if path.name.lower().split("-")[0].split(".")[0] in INSTALLED:
            (site / path.name).symlink_to(path)
    return folder / "bin" / "python"


def run_check(python, out, *arguments):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    command = [python, "-m", "benchmarks.gpu_check", "--device", "cpu", "--seconds", "280", "--out", out, *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    return run, json.loads(out.read_text())


def test_the_whole_command_needs_torch_triton_and_numpy_alone(bare_python, tmp_path):
    run, found = run_check(bare_python, tmp_path / "out.json")
    assert run.returncode == 0, run.stdout + run.stderr
    assert found["is_correct"] and not found["errors"] and not found["skipped"]
    assert {check["operation"] for check in found["checks"]} == {*OPERATIONS, "model"}
    assert {check["dtype"] for check in found["checks"]} == {"float32", "float16"}
    assert {entry["operation"] for entry in found["times"]} == set(OPERATIONS)
    assert all(entry["seconds"] > 0 and entry["bytes"] > 0 for entry in found["times"])
    assert {step["engine"] for step in found["steps"]} == {"headrace"}
    assert sorted(step["name"] for step in found["steps"])[-1] == "a prompt of 20"
    assert "not installed, and not needed here: gguf, llguidance, llvmlite, msgspec, numba, psutil, safetensors" in found["notes"]
    assert any("transformers is not installed" in note for note in found["notes"])
    assert "every check passed" in run.stdout


def test_a_wrong_kernel_fails_its_check():
    script = (
        "import sys, benchmarks.gpu_units as units, kernels.triton.silu_mul as module\n"
        "right = module.silu_mul\n"
        "module.silu_mul = lambda x: right(x) * 1.001\n"
        "sys.exit(units.main())"
    )

    class Broken(Runner):
        def command(self, units):
            return [sys.executable, "-c", script, self.device, *units]

    runner = Broken("cpu", time.monotonic() + 200)
    runner.run(["machine", "check rms_norm", "check silu_mul"])
    assert not runner.report.errors
    verdicts = {(check["operation"], check["dtype"]): check["passed"] for check in runner.report.checks}
    assert verdicts == {
        ("rms_norm", "float32"): True, ("rms_norm", "float16"): True,
        ("silu_mul", "float32"): False, ("silu_mul", "float16"): True,  # a thousandth is a unit in float16's last place
    }  # fmt: skip
    assert not runner.report.is_correct and "FAILED" in gpu_check.check_table(runner.report)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("os._exit(7)", "status 7"),
        ("time.sleep(60)", "no sign of life"),
        ("tell(event='error', text='an illegal memory access'); sys.exit(3)", "an illegal memory access"),
    ],
)
def test_a_part_that_dies_or_hangs_stops_no_other_part(behaviour, reason):
    script = f"""
import json, os, sys, time
def tell(**event): print(json.dumps(event), flush=True)
for unit in sys.argv[1:]:
    tell(event="begin", unit=unit)
    if unit == "check moe":
        {behaviour}
    tell(event="check", operation=unit.split()[1], name="", dtype="float32", difference=0.0, tolerance=0.0, passed=True)
    tell(event="end")
"""

    class Scripted(Runner):
        def command(self, units):
            return [sys.executable, "-c", script, *units]

    runner = Scripted("cpu", time.monotonic() + 100, silence=3.0)
    runner.run(["check rope", "check moe", "check gumbel"])
    report = runner.report
    assert [check["operation"] for check in report.checks] == ["rope", "gumbel"]
    ((unit, text),) = [(error["unit"], error["text"]) for error in report.errors]
    assert unit == "check moe" and reason in text
    assert not report.is_correct and not report.skipped


def test_a_run_without_time_or_without_its_process_is_incorrect():
    class Absent(Runner):
        def command(self, units):
            return [sys.executable, "-c", "import sys; sys.exit(1)"]

    late = Absent("cpu", time.monotonic() - 1)
    late.run(["check rope", "time rope"])
    assert late.report.skipped == ["check rope", "time rope"] and not late.report.is_correct
    broken = Absent("cpu", time.monotonic() + 60)
    broken.run(["machine", "check rope", "time rope"])
    assert broken.report.errors[0]["text"] == "the process of the parts did not start"
    assert not broken.report.is_correct


def test_correctness_comes_before_any_timing():
    assert [unit.split()[0] for unit in CHECKS + TIMES].count("check") == len(CHECKS) == len(OPERATIONS) + 1


def test_every_triton_kernel_is_checked_and_timed():
    modules = {module.name for module in pkgutil.iter_modules(kernels.triton.__path__)} - {"variant", "float32"}
    assert set(OPERATIONS) == modules | {"add_rms_norm"}  # which shares its twin's file
    for sizes in (TINY, ODD, LLAMA_8B):
        assert {case.operation for case in checks(sizes, torch.float32, True)} == set(OPERATIONS)
        assert {case.operation for case in timings(sizes, torch.float32, torch.float32, [4], 64, 64, True)} == set(OPERATIONS)


def test_the_largest_difference_is_relative_and_infinite_where_one_is():
    expected = [torch.tensor([3.0, -4.0, torch.inf])]
    assert largest_difference([expected[0].clone()], expected) == 0
    assert largest_difference([torch.tensor([3.0, -4.5, torch.inf])], expected) == pytest.approx(0.5 / (12.5**0.5 + 4))
    assert largest_difference([torch.tensor([3.0, -4.0, 5.0])], expected) == torch.inf
    assert largest_difference([torch.tensor([torch.nan, -4.0, torch.inf])], expected) == torch.inf
    with pytest.raises(AssertionError, match="float64"):
        largest_difference([expected[0].double()], expected)


def test_arguments_that_a_call_changes_are_compared_and_kept():
    x = torch.arange(6.0)
    trial = Trial(lambda x: x.add_(1), lambda x: x.add_(1.5), (x,), 48, changed=(0,))
    assert trial.difference() > 0 and torch.equal(x, torch.arange(6.0))
    case = Case("add", "", torch.float32, lambda device: trial)
    assert trial.difference() > case.tolerance
