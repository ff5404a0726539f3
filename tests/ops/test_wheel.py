"""The wheel by itself: built from the repository, installed into a clean environment elsewhere, serving from there."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
def test_a_wheel_serves_from_a_clean_environment(smollm2_gguf: Path, tmp_path: Path) -> None:
    def run(*command: str | Path) -> None:
        subprocess.run(list(map(str, command)), cwd=tmp_path, check=True, timeout=900)

    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path / "dist", ROOT)
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    (wheel,) = (tmp_path / "dist").glob("headrace-*.whl")
    run(tmp_path / "venv/bin/pip", "install", "--quiet", wheel, "--constraint", ROOT / "constraints.txt")

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [
        tmp_path / "venv/bin/headrace",
        "serve",
        smollm2_gguf,
        "--port",
        "0",
        "--data-dir",
        tmp_path / "data",
        "--max-model-len",
        "1k",
    ]
    server = subprocess.Popen(list(map(str, command)), cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        announced = re.search(r"on (http://\S+);", server.stdout.readline())
        assert announced
        body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 4}
        answer = httpx.post(f"{announced[1]}/v1/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["text"].startswith(" Paris")
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()
        server.wait()
        server.stdout.close()
