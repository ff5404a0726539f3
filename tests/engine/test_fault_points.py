"""A process dies at the point and the passing that the variable names, and nowhere else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from engine.fault_points import ENVIRONMENT_VARIABLE

PASSES_TWO_POINTS = """
from engine.fault_points import reach
for _ in range(3):
    reach("after-take")
    reach("flush-sent")
    print("passed", flush=True)
"""


def passing(order: str) -> tuple[int, int, str]:
    """Exit code, rounds that the process made, and its stderr."""
    environment = {**os.environ, ENVIRONMENT_VARIABLE: order}
    done = subprocess.run([sys.executable, "-c", PASSES_TWO_POINTS], env=environment, capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout.count("passed"), done.stderr


@pytest.mark.parametrize(
    ("order", "code", "rounds"),
    [("", 0, 3), ("after-take:1", -signal.SIGKILL, 0), ("flush-sent:3", -signal.SIGKILL, 2), ("folded:1", 0, 3)],
)
def test_a_process_dies_at_the_ordered_passing_of_a_point(order: str, code: int, rounds: int) -> None:
    assert passing(order)[:2] == (code, rounds)


@pytest.mark.parametrize("order", ["after-take", "after-take:0", "nowhere:1"])
def test_an_order_that_names_no_passing_of_a_known_point_is_refused(order: str) -> None:
    code, rounds, stderr = passing(order)
    assert (code, rounds) == (1, 0)
    assert f"{ENVIRONMENT_VARIABLE}={order} is not NAME:PASSING" in stderr
