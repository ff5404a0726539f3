"""A process dies at the point and the passing that the variable names, and nowhere else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.fault_points import ENVIRONMENT_VARIABLE

PASSES_TWO_POINTS = """
from engine.fault_points import reach
for _ in range(3):
    reach("after-take")
    reach("flush-sent")
    print("passed", flush=True)
"""


def passing(file: Path, order: str) -> tuple[int, int]:
    """Exit code, and rounds that the process made."""
    if order:
        file.write_text(order)
    environment = {**os.environ, ENVIRONMENT_VARIABLE: str(file)}
    done = subprocess.run([sys.executable, "-c", PASSES_TWO_POINTS], env=environment, capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout.count("passed")


@pytest.mark.parametrize(
    ("order", "code", "rounds"),
    [("", 0, 3), ("after-take:1", -signal.SIGKILL, 0), ("flush-sent:3", -signal.SIGKILL, 2), ("folded:1", 0, 3)],
)
def test_a_process_dies_at_the_ordered_passing_of_a_point(order: str, code: int, rounds: int, tmp_path: Path) -> None:
    assert passing(tmp_path / "order", order) == (code, rounds)


def test_an_order_is_obeyed_once(tmp_path: Path) -> None:
    file = tmp_path / "order"
    assert passing(file, "after-take:2") == (-signal.SIGKILL, 1)
    assert passing(file, "") == (0, 3)
