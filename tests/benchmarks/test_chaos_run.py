"""The short form of the chaos command: the real model, two engines, two API servers, and faults that come within seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = "kill-engine,kill-api,at-flush-sent,redis-restart,redis-rollback,cut-pubsub"


@pytest.mark.timeout(400)
def test_nothing_is_lost_repeated_changed_or_left_under_faults(smollm2_gguf: Path, tmp_path: Path) -> None:
    options: dict[str, object] = {"minutes": 0.7, "seed": 1, "mean-pause": 4, "cases": 24, "clients": 8, "retention": 10}
    options |= {"model": smollm2_gguf, "faults": FAULTS, "folder": tmp_path}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run([sys.executable, "-m", "benchmarks.chaos", *words], capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
