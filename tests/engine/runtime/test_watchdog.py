"""The watchdog: what counts as standing still, and how a real engine process ends that does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from engine.bus import leases, records
from engine.bus.alarms import alarms
from engine.bus.connection import Bus
from engine.client.client import AsyncClient
from engine.runtime import watchdog
from engine.runtime.watchdog import FIRST_STEPS, STOPPED_SECONDS, Watchdog
from tests.engine.conftest import MODEL
from tests.engine.runtime.null_requests import add, make_request
from tests.waiting import wait_for

REPOSITORY = Path(__file__).parents[3]
LATE = FIRST_STEPS + 2  # a step that compiles nothing any more


class Engine:
    """An engine as the watchdog sees it: it computes a step, of which the first ones are over, and nothing moves."""

    def __init__(self, timeout: float = 10.0) -> None:
        scheduler = SimpleNamespace(
            rows=SimpleNamespace(num_running=0), waiting=["one"], kv=SimpleNamespace(pool=SimpleNamespace(num_free=7))
        )
        self.stopped: list[str] = []
        executor = SimpleNamespace(stopped_ranks=lambda: self.stopped)
        self.core: Any = SimpleNamespace(
            has_work=True, num_submitted=LATE, num_returned=LATE - 1, step_forecast=0.1, scheduler=scheduler, executor=executor
        )
        self.output = SimpleNamespace(is_blocked=False)
        self.watchdog = Watchdog(self.core, self.output, timeout)
        self.watchdog.look(0.0)

    def kind_after(self, seconds: float) -> str | None:
        alarm = self.watchdog.look(seconds)
        return alarm.kind if alarm else None


def test_a_step_is_stuck_after_the_timeout_and_ten_times_its_forecast() -> None:
    engine = Engine()
    assert [engine.kind_after(9.0), engine.kind_after(1.5)] == [None, "step"]
    engine.core.step_forecast = 2.0
    assert [engine.kind_after(1.0), engine.kind_after(9.0)] == [None, "step"]
    engine.core.num_returned += 1
    assert engine.kind_after(30.0) is None, "it got on"


def test_the_first_steps_may_compile_kernels() -> None:
    engine = Engine()
    engine.core.num_submitted, engine.core.num_returned, engine.core.step_forecast = 1, 0, 0.0
    engine.watchdog.look(0.0)
    assert [engine.kind_after(200.0), engine.kind_after(101.0)] == [None, "step"]


def test_work_for_which_no_step_is_planned_is_an_alarm_from_the_first_one_on() -> None:
    engine = Engine()
    engine.core.num_submitted = engine.core.num_returned = 0
    engine.watchdog.look(0.0)
    engine.watchdog.turns += 1000  # the loop spins
    alarm = engine.watchdog.look(10.0)
    assert alarm is not None and alarm.kind == "schedule"
    assert alarm.reason == "no step was planned for 10 s, though 0 choices run, 1 wait and 7 KV blocks are free"


def test_a_loop_without_work_must_turn() -> None:
    engine = Engine()
    engine.core.has_work = False
    engine.watchdog.look(0.0)
    for _ in range(3):
        engine.watchdog.turns += 1
        assert engine.kind_after(8.0) is None
    assert engine.kind_after(10.0) == "loop"


def test_an_engine_that_waits_for_redis_is_not_late() -> None:
    engine = Engine()
    engine.output.is_blocked = True
    assert engine.kind_after(1000.0) is None


def test_a_worker_may_be_stopped_for_a_moment() -> None:
    engine = Engine()
    engine.stopped = ["rank 0 (process 12)"]
    assert engine.kind_after(STOPPED_SECONDS - 1) is None
    engine.stopped = []
    engine.core.num_returned += 1
    assert engine.kind_after(1.0) is None
    engine.stopped = ["rank 0 (process 12)"]
    assert [engine.kind_after(STOPPED_SECONDS - 1), engine.kind_after(1.0)] == [None, "rank"]


def test_seconds_in_which_the_engine_itself_was_stopped_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(timeout=3.0)
    jumps = iter([0.0, 1000.0])
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: next(jumps)))
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(engine.watchdog, "_tell_alive", engine.watchdog.stop)
    engine.watchdog._run()
    assert engine.watchdog.gets_on()


@pytest.mark.parametrize(("timeout", "interval"), [(20.0, 1.0), (0.5, 0.125)])
def test_looks_are_seldom_but_not_for_a_short_timeout(timeout: float, interval: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` gives an engine as long to show a sign of life, and each look is one."""
    engine = Engine(timeout)
    waits: list[float] = []
    monkeypatch.setattr(engine.watchdog, "_end", SimpleNamespace(wait=lambda seconds: waits.append(seconds) or len(waits) > 2))
    engine.watchdog._run()
    assert waits == [interval] * 3


@contextmanager
def engine_process(model: Path, redis_url: str, log: Path, null: str, patch: str) -> Iterator[subprocess.Popen[bytes]]:
    """An engine with a worker process, in which `patch` has run, and which is ready."""
    options = ["--load-format", "null", "--served-model-name", MODEL, "--redis-url", redis_url, "--watchdog-timeout", "0.5"]
    code = f"import sys; from ops.cli import main; {patch or 'pass'}\nmain(sys.argv[1:])"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "engine", str(model), *options],
            env={**os.environ, "HEADRACE_NULL_RUNNER": null},
            cwd=REPOSITORY,
            stdout=output,
            stderr=output,
        )
    try:
        with Bus(redis_url) as bus:
            wait_for(lambda: bus.run(leases.engines(MODEL)), log.read_text, 60)
        yield process
    finally:
        process.kill()
        process.wait()


PLANS_NOTHING = """
from engine.scheduling.scheduler import Scheduler
Scheduler._schedule_waiting = lambda scheduler, draft: None
"""
STANDS_STILL = """
import threading
from engine.runtime.loop import EngineLoop
EngineLoop._admit = lambda *_: threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("kind", "null", "patch", "reason", "stack"),
    [
        ("step", f"hang_step={LATE}", "", f"step {LATE} has run for", "gpu/stand_in/runner.py"),
        ("schedule", "", PLANS_NOTHING, "0 choices run, 1 wait", "engine/runtime/loop.py"),
        ("loop", "", STANDS_STILL, "outside of a step", "engine/runtime/loop.py"),
    ],
)
async def test_an_engine_that_stands_still_tells_where_and_ends(
    smollm2_gguf: Path,
    redis_url: str,
    client: AsyncClient,
    tmp_path: Path,
    kind: str,
    null: str,
    patch: str,
    reason: str,
    stack: str,
) -> None:
    log = tmp_path / "log"
    with engine_process(smollm2_gguf, redis_url, log, null, patch) as process:
        await add(client, make_request(client, max_tokens=2 * LATE))
        assert await asyncio.to_thread(process.wait, 20) == 1, log.read_text()
    assert reason in log.read_text() and stack in log.read_text()
    with Bus(redis_url) as bus:
        assert bus.run(alarms(MODEL)) == {kind: 1}
        (record,) = bus.run(records.live_requests(MODEL))
        assert record.state != "ended", "its request waits for another engine"


def test_an_engine_ends_whose_worker_was_stopped(smollm2_gguf: Path, redis_url: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with engine_process(smollm2_gguf, redis_url, log, "", "") as process:
        (worker,) = psutil.Process(process.pid).children()
        worker.send_signal(signal.SIGSTOP)
        assert process.wait(20) == 1, log.read_text()
        assert psutil.wait_procs([worker], 5)[1] == []
    assert f"rank 0 (process {worker.pid}) stopped" in log.read_text()
    assert "gpu/worker.py" in log.read_text(), "the stack of the worker"
    with Bus(redis_url) as bus:
        assert bus.run(alarms(MODEL)) == {"rank": 1}
