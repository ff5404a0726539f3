"""The embedded Valkey: its data outlives it, other users cannot read it, two never share a directory, leftovers are removed."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import redis.asyncio
import redis.exceptions

from ops.child import Child
from ops.embedded import DataDirectory, EmbeddedValkey, find_running, redis_url
from ops.errors import CommandError


@asynccontextmanager
async def running(directory: DataDirectory) -> AsyncIterator[tuple[EmbeddedValkey, Child]]:
    valkey = EmbeddedValkey(directory)
    child = Child(valkey.command(), on_line=print)
    task = asyncio.create_task(child.run())
    try:
        async with asyncio.timeout(10):
            await child.ready.wait()
        yield valkey, child
    finally:
        await child.stop()
        await task


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "with a space")


async def test_data_outlives_the_server(directory: str) -> None:
    opened = DataDirectory(directory)
    async with running(opened) as (valkey, _), redis.asyncio.Redis.from_url(valkey.url) as client:
        await client.set("kept", "1")
        assert (await client.config_get("maxmemory-policy"))["maxmemory-policy"] == "noeviction"
        assert (await client.config_get("appendfsync"))["appendfsync"] == "everysec"
    async with running(opened) as (again, _), redis.asyncio.Redis.from_url(again.url) as client:
        assert await client.get("kept") == b"1"
        assert again.url != valkey.url
    opened.close()


async def test_the_server_needs_its_password_and_keeps_it_private(directory: str) -> None:
    opened = DataDirectory(directory)
    async with running(opened) as (valkey, child):
        with pytest.raises(redis.exceptions.AuthenticationError):
            async with redis.asyncio.Redis(port=int(valkey.url.rsplit(":", 1)[1].split("/")[0])) as stranger:
                await stranger.ping()
        assert child.pid is not None
        password = valkey.url.split(":")[2].split("@")[0]
        assert password not in " ".join(psutil.Process(child.pid).cmdline())
        assert stat.S_IMODE(os.stat(opened.path / "valkey.conf").st_mode) == 0o600
        assert stat.S_IMODE(os.stat(opened.path / "serve.json").st_mode) == 0o600
        assert stat.S_IMODE(os.stat(opened.path).st_mode) == 0o700
    opened.close()


def test_one_directory_has_one_serve(directory: str) -> None:
    first = DataDirectory(directory)
    with pytest.raises(CommandError, match=rf"is in use by `headrace serve` \(process {os.getpid()}\)"):
        DataDirectory(directory)
    first.close()
    DataDirectory(directory).close()


def test_a_server_that_lost_its_supervisor_is_killed(directory: str, tmp_path: Path) -> None:
    """A supervisor that went without its server being killed: the server holds the lock until the next `serve` ends it."""
    script = """
import os, subprocess, sys
from ops.embedded import DataDirectory, EmbeddedValkey
directory = DataDirectory(sys.argv[1])
command = EmbeddedValkey(directory).command()
server = subprocess.Popen(command.arguments, pass_fds=command.inherited, stdout=subprocess.DEVNULL)
while not (directory.path / "valkey.pid").exists():
    assert server.poll() is None
print(server.pid, flush=True)
os._exit(1)
"""
    done = subprocess.run([sys.executable, "-c", script, directory], stdout=subprocess.PIPE, text=True, timeout=20, cwd=tmp_path)
    leftover = psutil.Process(int(done.stdout))
    opened = DataDirectory(directory)
    assert not leftover.is_running() or leftover.status() == psutil.STATUS_ZOMBIE
    opened.close()


def test_commands_find_the_running_serve(directory: str) -> None:
    assert redis_url("redis://named:1/0", directory) == "redis://named:1/0"
    with pytest.raises(CommandError, match="no `headrace serve` runs on"):
        redis_url("", directory)
    opened = DataDirectory(directory)
    opened.state.redis_url = "redis://127.0.0.1:5/0"
    opened.write_state()
    assert redis_url("", directory) == "redis://127.0.0.1:5/0"
    opened.state.pid = int(subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True).stdout)
    opened.write_state()
    assert find_running(directory) is None, "a state that a dead process left is no running serve"
    opened.close()


def test_an_unusable_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match="cannot use the data directory"):
        DataDirectory(str(tmp_path / "file" / "below"))
