"""Maintenance by real Celery workers: requests of dead processes end, and each is counted once, whichever process is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from msgspec.structs import replace

from engine.bus import control, keys, leases, records
from engine.bus.attachments import attach
from engine.bus.call import Call
from engine.bus.connection import Bus
from engine.bus.enqueue import AdmissionLimits, enqueue
from engine.bus.queue_depth import queue_depth
from engine.protocol import Abort, RequestFacts
from ops import tasks
from ops.usage import usage_rows
from tests.engine.bus.ledger_world import World
from tests.redis_server import RedisServer
from tests.waiting import wait_for

MODEL = "model-a"


@contextmanager
def worker(url: str, lines: list[str] | None = None) -> Iterator[psutil.Process]:
    """A worker with beat, as `serve` starts it. Whatever the test did to it, nothing of it is left. `lines` gets what it logs."""
    command = [sys.executable, "-m", "celery", "-A", "ops.celery_app", "worker", "-B", "--pool", "solo"]
    command += ["--without-gossip", "--without-mingle", "--loglevel", "warning"]
    environment = {**os.environ, "HEADRACE_REDIS_URL": url, "C_FORCE_ROOT": "1"}
    process = subprocess.Popen(command, env=environment, stderr=None if lines is None else subprocess.PIPE, text=True)
    reader = threading.Thread(target=lambda: lines is None or lines.extend(process.stderr or ()))
    reader.start()
    try:
        yield psutil.Process(process.pid)
    finally:
        family = psutil.Process(process.pid).children() if process.poll() is None else []
        process.kill()
        process.wait(20)
        psutil.wait_procs(family, timeout=20)
        reader.join()
        if process.stderr is not None:
            process.stderr.close()


@pytest.fixture
def world(redis_url: str) -> Iterator[World]:
    with World(redis_url, MODEL) as world:
        yield world


@pytest.fixture
def task_bus(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bus]:
    """Tasks called in this process use this bus."""
    with Bus(redis_url, patience=0.2) as bus:
        monkeypatch.setattr(tasks, "process_bus", lambda: bus)
        yield bus


@contextmanager
def beating(bus: Bus, name: str) -> Iterator[None]:
    """An API server that lives."""
    stopped = threading.Event()

    def beat() -> None:
        while not stopped.wait(0.3):
            bus.run(leases.beat_api(name))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def test_requests_of_dead_processes_end_within_15_seconds(world: World) -> None:
    """An API server killed with requests waiting and running, beside living ones. An engine's death ends none."""
    living, dead = world.bus.run(leases.announce_api()), world.bus.run(leases.announce_api())
    engine, dying = world.engine(), world.engine(ttl=2.0)
    world.enqueue(world.request("running", client=dead), world.request("kept", client=living))
    world.take(engine, 2)
    world.enqueue(world.request("lost", client=living))
    world.take(dying)
    world.enqueue(world.request("waiting", client=dead), world.request("waiting too", client=living))
    with beating(world.bus, living), worker(world.url):
        began = time.monotonic()
        wait_for(lambda: world.record("waiting").state == "ended", "the waiting request's end", 15)
        wait_for(lambda: world.record("lost").state == "queued", "the lost request waits again", 15 - (time.monotonic() - began))
        place = (world.model, engine.slot, engine.incarnation)
        commands = wait_for(
            lambda: world.bus.run(control.read_control(*place)).commands, "a command", 15 - (time.monotonic() - began)
        )
        assert commands[0] == Abort("running")
        world.end(engine, "running")
        wait_for(lambda: world.usage_lines() == [] and len(usage_rows(world.bus)) == 1, "the usage of the day")
    assert (world.record("waiting").reason, world.record("waiting").error) == ("abort", tasks.API_GONE)
    assert [world.record(name).state for name in ("kept", "waiting too")] == ["running", "queued"]
    (row,) = usage_rows(world.bus)
    assert (row.totals.requests, row.totals.reasons) == (2, {"abort": 1, "stop": 1})


def test_a_request_of_a_dead_api_server_gets_its_grace_time(world: World, task_bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "api_absent", lambda client: Call(lambda answers: client == "dead", commands=(("TIME",),)))
    world.engine()
    limits = AdmissionLimits(require_engine=False)
    for name, grace in (("none", 0.0), ("short", 0.05), ("long", 60.0), ("attached", 0.05)):
        request = replace(world.request(name, client="dead"), facts=RequestFacts(grace=grace))
        world.bus.run(enqueue(world.model, [request], limits))
    assert tasks.reap_api_servers() == 1
    world.bus.run(attach(world.model, "alive", [("attached", 1)]))
    wait_for(tasks.reap_api_servers, "the end of the short grace time")
    assert tasks.reap_api_servers() == 0
    states = {name: world.record(name).state for name in ("none", "short", "long", "attached")}
    assert states == {"none": "ended", "short": "ended", "long": "queued", "attached": "queued"}
    world.check_integrity()


def test_killed_in_mid_task_and_two_at_once_every_line_counts_once(world: World) -> None:
    world.engine()
    lines = 60_000
    tokens = {"prompt_tokens": 3, "cached_tokens": 1, "output_tokens": 2}
    with world.raw.pipeline(transaction=False) as pipeline:
        for number in range(lines):
            pipeline.xadd(keys.usage(MODEL), {"day": 20_000, "tenant": f"t{number % 3}", "reason": "stop", **tokens})
        pipeline.execute()

    def left() -> int:
        return int(world.raw.xlen(keys.usage(MODEL)))

    with worker(world.url) as first:
        wait_for(lambda: left() < lines, "the first lines counted", 30, pause=0.001)
        first.kill()
        first.wait(10)
    assert 0 < left() < lines, "it was killed in the middle"
    with worker(world.url), worker(world.url):
        wait_for(lambda: left() == 0, "all lines counted", 30)
    rows = usage_rows(world.bus)
    assert [row.tenant for row in rows] == ["t0", "t1", "t2"]
    for row in rows:
        assert (row.totals.requests, row.totals.prompt_tokens) == (lines // 3, lines)
        assert (row.totals.output_tokens, row.totals.reasons) == (2 * lines // 3, {"stop": lines // 3})


def test_a_killed_worker_leaves_no_process(redis_url: str) -> None:
    with worker(redis_url) as process:

        def beats() -> list[psutil.Process]:  # its first second may see a short-lived child of another kind
            return [child for child in process.children() if time.time() - child.create_time() > 1]

        wait_for(lambda: len(beats()) == 1, "the beat's process", 30)
        family = process.children()
        process.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert alive == []


def test_maintenance_imports_no_model_code() -> None:
    program = "import sys, ops.tasks; print(sorted({'torch', 'fastapi', 'numba', 'transformers', 'api'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_tasks_that_run_twice_or_at_once_count_once(world: World, task_bus: Bus) -> None:
    dead = "17"
    world.enqueue(*(world.request(client=dead) for _ in range(50)))
    world.engine()
    world.raw.set(keys.absent_api(dead), f"{world.raw.info('server')['run_id']} 1")
    threads = [threading.Thread(target=tasks.reap_api_servers) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tasks.reap_api_servers() == 0
    assert world.bus.run(queue_depth(MODEL)).live == 0
    world.check_integrity()
    assert tasks.roll_usage() == 50
    assert tasks.roll_usage() == 0


def test_a_dead_engine_is_taken_over_and_not_its_replacement(world: World, task_bus: Bus) -> None:
    world.enqueue(world.request("old"), world.request("new"))
    first = world.engine()
    world.take(first)
    world.crash(first)
    world.raw.set(keys.absent_engine(MODEL, first.slot), f"{world.raw.info('server')['run_id']} 1")
    assert tasks.take_over_dead_engines() == 1
    second = world.engine()
    assert second.slot == first.slot
    assert world.take(second, 2) == ["old", "new"]
    assert tasks.take_over_dead_engines() == 0
    assert [world.record(name).state for name in ("old", "new")] == ["running", "running"]
    world.check_integrity()


def test_expired_records_leave_the_indexes(world: World, task_bus: Bus) -> None:
    world.engine()
    world.enqueue(world.request("a"), world.request("b"))
    world.finish("a")
    world.finish("b")
    world.raw.delete(keys.record(MODEL, "a"))
    assert tasks.expire_records() == 1
    assert [view.id for view in world.bus.run(records.ended_requests(MODEL))] == ["b"]


def test_where_redis_is_away_a_task_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    server = RedisServer()
    with Bus(server.url, patience=0.1) as bus:
        server.stop()
        monkeypatch.setattr(tasks, "process_bus", lambda: bus)
        every = (tasks.reap_api_servers, tasks.take_over_dead_engines, tasks.expire_records, tasks.roll_usage)
        assert [task() for task in every] == [0, 0, 0, 0]


def test_maintenance_goes_on_after_redis_was_away() -> None:
    server = RedisServer(None, "--appendonly", "yes", "--appendfsync", "always")
    try:
        with World(server.url, MODEL) as world, worker(server.url):
            world.engine()
            for outages in (0, 1):
                line = {"day": 20_000, "tenant": "t", "reason": "stop", "prompt_tokens": 1, "cached_tokens": 0, "output_tokens": 1}
                world.raw.xadd(keys.usage(MODEL), line)
                wait_for(lambda: world.raw.xlen(keys.usage(MODEL)) == 0, "the line counted", 60)
                assert usage_rows(world.bus)[0].totals.requests == outages + 1
                server.kill()
                server.start()
    finally:
        server.stop()


def test_maintenance_waits_for_a_redis_that_cannot_serve_and_goes_on() -> None:
    """It says why, does not end, and counts what comes afterwards."""
    server = RedisServer()
    lines: list[str] = []
    try:
        with World(server.url, MODEL) as world, worker(server.url, lines) as process:
            world.engine()
            for outages in (0, 1):
                line = {"day": 20_000, "tenant": "t", "reason": "stop", "prompt_tokens": 1, "cached_tokens": 0, "output_tokens": 1}
                world.raw.xadd(keys.usage(MODEL), line)
                wait_for(lambda: world.raw.xlen(keys.usage(MODEL)) == 0, lambda: f"the line counted: {lines[-5:]}", 30)
                assert usage_rows(world.bus)[0].totals.requests == outages + 1
                world.raw.replicaof("127.0.0.1", "1")
                said = "consumer: Cannot connect to redis://:**@127.0.0.1:%d/0: Redis is a read-only replica"
                wait_for(
                    lambda said=said: any(said % server.port in line for line in lines), lambda: f"it says so: {lines[-5:]}", 30
                )
                assert process.status() != psutil.STATUS_ZOMBIE
                world.raw.replicaof("NO", "ONE")
        assert not [line for line in lines if "Traceback" in line]
    finally:
        server.stop()
