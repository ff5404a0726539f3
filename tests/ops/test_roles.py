"""A role that runs alone says when it is up, at which address and on which Redis."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["api", "--port", "0"], "the API server answers at http://127.0.0.1:"),
        (["maintenance"], "the maintenance process is up, with Redis at redis://"),
    ],
)
def test_a_role_tells_once_that_it_is_up_without_the_password(command: list[str], said: str, redis_url: str) -> None:
    url = redis_url.replace("redis://", "redis://default:secret@")  # the default user takes any password
    arguments = [sys.executable, "-P", "-m", "ops.cli", *command, "--redis-url", url, "--log-format", "json"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            record = next(line for line in map(json.loads, process.stderr) if line["message"].startswith(said))
        finally:
            process.terminate()
            rest = process.stderr.read()
    assert record["level"] == "info"
    assert record["message"].endswith(f"with Redis at {redis_url.replace('redis://', 'redis://default:***@')}")
    assert said not in rest and "secret" not in rest
