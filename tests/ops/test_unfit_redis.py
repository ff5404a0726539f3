"""A Redis that will never do ends an API server and an engine with one line and status 78: waiting would not mend it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.ops.test_redis_url import OldRedis, Server

SAID = {
    "too old": "the server is Redis 6.2.14; Redis 7.0 or newer is needed, or Valkey",
    "no channel allowed": "Redis: No permissions to access a channel",
}


@pytest.fixture(params=SAID)
def unfit(request: pytest.FixtureRequest, redis_url: str) -> Iterator[tuple[str, str]]:
    """The URL of one, and what is said of it."""
    said = SAID[request.param]
    if request.param == "too old":
        with Server(OldRedis) as server:
            yield f"redis://127.0.0.1:{server.server_address[1]}/0", said
        return
    with redis.Redis.from_url(redis_url) as admin:
        admin.acl_setuser("deaf", enabled=True, passwords=["+p"], commands=["+@all"], keys=["*"], reset_channels=True)
        yield redis_url.replace("redis://", "redis://deaf:p@"), said
        admin.acl_deluser("deaf")


@pytest.mark.parametrize("role", ["api", "engine"])
def test_a_redis_that_will_never_do_ends_the_role(role: str, unfit: tuple[str, str], smollm2_gguf: Path) -> None:
    url, said = unfit
    options = {"api": ["--port", "0"], "engine": [str(smollm2_gguf), "--load-format", "null"]}[role]
    command = [sys.executable, "-P", "-m", "ops.cli", role, *options, "--redis-url", url, "--log-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == os.EX_CONFIG, done.stderr
    (error,) = [line["message"] for line in map(json.loads, done.stderr.splitlines()) if line["level"] == "error"]
    assert error == said
