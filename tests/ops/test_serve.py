"""`headrace serve` as a whole: real processes, most of them around a model that computes nothing, one with the real model."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.bus import leases
from engine.bus.connection import Bus
from gpu.machine import available_cores, available_memory
from ops.embedded import redis_url as running_redis
from tests.gpu.checkpoint.gguf_files import write_gguf
from tests.ops.serving import Serving, left, serving, shared_memory
from tests.waiting import wait_for

SLOW_STEPS = {"HEADRACE_NULL_RUNNER": "step_seconds=0.02"}
SECRET = "xylophone quartz"  # a prompt, which no log may hold


@pytest.fixture(scope="module")
def null_model(smollm2_gguf: Path) -> tuple[str, ...]:
    return (str(smollm2_gguf), "--load-format", "null", "--served-model-name", "null")


@pytest.fixture(scope="module")
def calm_server(null_model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server for tests that leave it unchanged."""
    with serving(*null_model, data_dir=tmp_path_factory.mktemp("calm"), **SLOW_STEPS) as server:
        yield server


@pytest.fixture(scope="module")
def battered_server(null_model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server for tests that kill parts of it. It replaces them, and stops in order afterwards."""
    with serving(*null_model, data_dir=tmp_path_factory.mktemp("battered"), **SLOW_STEPS) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture
def server(battered_server: Serving) -> Serving:
    """Whole again after the test before."""
    wait_for_health(battered_server, 200)
    return battered_server


@pytest.fixture(scope="module")
def doubled_server(null_model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Two engines and two API servers, which replace each other while tests kill one of them."""
    several = ("--data-parallel-size", "2", "--api-server-count", "2")
    with serving(*null_model, *several, data_dir=tmp_path_factory.mktemp("doubled"), **SLOW_STEPS) as server:
        yield server
        assert server.stop() == 0


def events(stream: httpx.Response) -> Iterator[Any]:
    for line in stream.iter_lines():
        if line.startswith("data: "):
            yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])


def open_stream(server: Serving, prompt: str = "Hello") -> Any:
    body = {"prompt": prompt, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    return httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30)


def wait_for_health(server: Serving, status: int, seconds: float = 20.0) -> None:
    def turned() -> bool:
        return httpx.get(f"{server.url}/health", timeout=5).status_code == status

    wait_for(turned, lambda: f"/health turns {status}:\n{server.log}", seconds)


def wait_for_blocks(server: Serving, free: bool, seconds: float) -> None:
    """Until the engine's snapshot says that all KV blocks are free, or that some are not."""

    with Bus(running_redis("", str(server.data_dir))) as bus:

        def seen() -> bool:
            (engine,) = bus.run(leases.engines("null"))
            return free == (engine.stats.num_free_blocks == engine.num_blocks - 1)

        wait_for(seen, lambda: f"{'all' if free else 'not all'} blocks are free:\n{server.log}", seconds)


def test_the_announced_command_streams_and_the_tools_show_it(calm_server: Serving) -> None:
    server = calm_server
    command = shlex.split(server.curl.replace('"max_tokens": 200', '"max_tokens": 8'))
    answer = subprocess.run([*command, "-sS"], capture_output=True, text=True, timeout=30)
    assert answer.stdout.rstrip().endswith("data: [DONE]"), answer.stderr + answer.stdout
    listed = server.headrace("ps", "-a")[0]
    assert (listed["state"], listed["reason"], listed["output_tokens"], listed["model"]) == ("ended", "length", 8, "null")
    shown = server.headrace("inspect", listed["id"])
    marks = [row["mark"] for row in shown["timeline"]]
    assert marks == ["enqueued", "received", "scheduled", "first_token", "last_token", "finished"]
    assert sum(row["seconds"] for row in shown["timeline"][:-1]) == pytest.approx(listed["finished"] - listed["enqueued"])
    (engine,) = server.headrace("engines")
    assert engine["pid"] == server.child("engine").pid
    (used,) = server.headrace("usage")
    assert used["requests"] >= 1 and used["output_tokens"] >= 8


def test_abort_shows_the_tokens_made_and_ends_the_stream(calm_server: Serving) -> None:
    server = calm_server
    with open_stream(server) as stream:
        following = events(stream)
        first = next(following)
        (aborted,) = server.headrace("abort", first["id"])
        texts = [first, *(event for event in following if event != "[DONE]")]
    assert aborted["state"] == "ended" and aborted["output_tokens"] > 0
    assert texts[-1]["choices"][0]["finish_reason"] == "abort"
    assert server.headrace("ps") == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_all_processes_and_open_streams(
    null_model: tuple[str, ...], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    with serving(*null_model, data_dir=tmp_path / "data", **SLOW_STEPS) as server:
        with open_stream(server, SECRET) as stream:
            following = events(stream)
            next(following)
            family = server.family()
            memory = shared_memory(family)
            began = time.monotonic()
            server.process.send_signal(number)
            last = list(following)[-2:]
        assert last[-1] == "[DONE]" and last[0]["choices"][0]["finish_reason"] == "abort", last
        assert server.wait() == status
        assert time.monotonic() - began < 15
        assert left(family, timeout=0) == []
        assert [path for path in memory if os.path.exists(path)] == []
        assert "did not stop" not in server.log and "Traceback" not in server.log
        assert not any(word in server.log for word in SECRET.split())


def test_kill_9_of_the_supervisor_leaves_nothing_and_the_data(null_model: tuple[str, ...], tmp_path: Path) -> None:
    with serving(*null_model, data_dir=tmp_path / "data") as first:
        assert first.complete().status_code == 200
        family = first.family()
        memory = shared_memory(family)
        assert len(family) >= 5  # valkey, engine, its worker, API server, celery
        first.process.kill()
        assert left(family) == []
        assert [path for path in memory if os.path.exists(path)] == []
    with serving(*null_model, data_dir=tmp_path / "data") as second:
        assert [request["state"] for request in second.headrace("ps", "-a")] == ["ended"]
        assert second.stop() == 0


def test_a_killed_engine_is_replaced_and_its_streams_go_on(server: Serving) -> None:
    with open_stream(server) as stream:
        following = events(stream)
        next(following)
        killed = server.child("engine")
        family = killed.children(recursive=True)
        killed.kill()
        wait_for_health(server, 503)
        assert server.complete().status_code == 200, "it waits for the next engine"
        server.wait_for("is ready again")
        for _ in range(3):
            assert "error" not in next(following)
    wait_for_health(server, 200)
    assert server.child("engine").pid != killed.pid
    assert "died with 1 requests in flight; they wait for the next engine" in server.log
    assert left(family, timeout=0) == []


def test_a_killed_replica_is_replaced_while_the_other_serves(doubled_server: Serving) -> None:
    server = doubled_server
    assert sorted(engine["slot"] for engine in server.headrace("engines")) == ["0", "1"]
    with open_stream(server) as one, open_stream(server) as other:
        following = {stream: events(stream) for stream in (one, other)}
        running = {next(following[stream])["id"].removeprefix("cmpl-"): stream for stream in following}
        owners = {entry["engine"]: running[entry["external_id"]] for entry in server.headrace("ps")}
        assert sorted(owners) == ["0", "1"], "one each"
        processes = {engine["slot"]: engine["pid"] for engine in server.headrace("engines")}
        os.kill(processes["0"], signal.SIGKILL)
        for stream in (one, other):  # the other engine has both now
            for _ in range(3):
                assert "error" not in next(following[stream])
        assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
        assert server.complete().status_code == 200, "by the other one"
        server.wait_for("is ready again")
        assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
        assert "error" not in next(following[owners["1"]])
    now = {engine["slot"]: engine["pid"] for engine in server.headrace("engines")}
    assert now["1"] == processes["1"] and now["0"] != processes["0"]


@pytest.mark.skipif(available_cores() < 2, reason="several engines are started on two cores or more")
def test_one_engine_serves_if_memory_does_not_suffice_for_several(tiny_llama: Path, tmp_path: Path) -> None:
    """A share of the memory that holds the KV of one long request, but not half of it."""
    token_bytes = 4 * 2 * 2 * 16 * 2  # layers, keys and values, heads, dimensions, bytes
    share = 1.5 * 2048 * token_bytes / available_memory()
    arguments = (str(tiny_llama), "--served-model-name", "tiny", "--gpu-memory-utilization", f"{share:.12f}")
    with serving(*arguments, data_dir=tmp_path / "data") as server:
        assert server.complete().status_code == 200
        assert len(server.headrace("engines")) == 1
        assert "engines cannot start" in server.log
        assert server.stop() == 0
    with serving(*arguments, "--data-parallel-size", "2", data_dir=tmp_path / "data", ready=False) as server:
        assert server.wait() == os.EX_CONFIG
        assert server.lines[-1].startswith("headrace: The KV cache of one request of 2048 tokens needs"), (
            "as many as were asked for"
        )


@pytest.mark.parametrize("role", ["valkey", "maintenance"])
def test_any_other_process_that_dies_is_replaced(server: Serving, role: str) -> None:
    killed = server.child(role)
    assert server.complete().status_code == 200
    killed.kill()
    server.wait_for(f"{role} died")
    wait_for(lambda: server.complete().status_code == 200, lambda: f"an answer:\n{server.log}")
    assert server.child(role).pid != killed.pid
    assert len(server.headrace("ps", "-a")) >= 2, "what was recorded before is still there"


def test_requests_of_a_killed_api_server_end_and_free_their_blocks(server: Serving) -> None:
    with open_stream(server) as stream:
        following = events(stream)
        identity = next(following)["id"].removeprefix("cmpl-")
        wait_for_blocks(server, free=False, seconds=5)
        server.child("api").kill()
        wait_for_blocks(server, free=True, seconds=15)
        with pytest.raises(httpx.HTTPError):
            list(following)
    (request,) = [entry for entry in server.headrace("ps", "-a") if entry["external_id"] == identity]
    assert (request["state"], request["reason"]) == ("ended", "abort")


def test_a_killed_api_server_is_replaced_while_the_other_serves(doubled_server: Serving) -> None:
    server = doubled_server
    servers = server.children("api")
    assert len(servers) == 2
    servers[0].kill()
    server.wait_for("restarting it")
    assert server.complete().status_code == 200
    wait_for(lambda: len(server.children("api")) == 2, "the replacement")


def test_any_of_several_api_servers_answers_for_all_metrics(doubled_server: Serving) -> None:
    server = doubled_server

    def scraped() -> set[tuple[float, float]]:
        """(requests that succeeded, HTTP requests in hand), as told by 16 connections, which reach both servers."""
        told = set()
        for _ in range(16):
            lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
            ended, in_hand = (
                sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"headrace:{name}"))
                for name in ("request_success_total", "api_requests_in_flight")
            )
            told.add((ended, in_hand))
        return told

    def expect_scraped(*expected: float) -> None:
        """From every server, soon: a client has its answer a moment before the server has put the request down."""
        wait_for(lambda: scraped() == {expected}, lambda: f"{expected} from all, not {scraped()}")

    def settled() -> set[tuple[float, float]]:
        told = scraped()
        return told if len(told) == 1 and {in_hand for _, in_hand in told} == {1} else set()

    ((before, _),) = wait_for(settled, "one count of what other tests have sent")
    for _ in range(6):
        assert server.complete().status_code == 200
    expect_scraped(before + 6, 1)  # the scrape itself is in hand
    with open_stream(server) as stream:
        following = events(stream)
        next(following)
        expect_scraped(before + 6, 2)
        for each in server.children("api"):
            each.kill()
            server.wait_for("restarting it")
        with pytest.raises(httpx.HTTPError):
            list(following)
    wait_for_health(server, 200)
    expect_scraped(before + 6, 1)


def test_a_stop_during_the_load_is_obeyed(null_model: tuple[str, ...], tmp_path: Path) -> None:
    slow = {"HEADRACE_NULL_RUNNER": "load_seconds=60"}
    with serving(*null_model, data_dir=tmp_path / "data", ready=False, **slow) as server:
        engine = server.child("engine")
        wait_for(engine.children, lambda: f"the engine's worker:\n{server.log}")
        family = server.family()
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 10
        assert left(family, timeout=0) == []


def test_a_configuration_that_cannot_work_is_one_line(null_model: tuple[str, ...], tmp_path: Path) -> None:
    arguments = (*null_model, "--num-gpu-blocks-override", "4", "--max-model-len", "4k")
    with serving(*arguments, data_dir=tmp_path / "data", ready=False) as server:
        family = server.family()
        assert server.wait() == os.EX_CONFIG
        last = server.lines[-1]
        assert last.startswith("headrace: The KV cache of one request of 4000 tokens needs") and "48 tokens" in last
        assert "Traceback" not in server.log and "restarting it" not in server.log
        assert left(family, timeout=0) == []


def test_a_broken_model_file_ends_the_start_at_once(smollm2_gguf: Path, tmp_path: Path) -> None:
    key = b"llama.attention.head_count"
    head = smollm2_gguf.read_bytes()
    place = head.index(len(key).to_bytes(8, "little") + key) + 8 + len(key) + 4  # behind the key and the value's type
    (tmp_path / "wrong.gguf").write_bytes(head[:place] + bytes(4) + head[place + 4 :])
    with serving(str(tmp_path / "wrong.gguf"), data_dir=tmp_path / "data", ready=False) as server:
        assert server.wait() == os.EX_CONFIG
        assert server.lines[-1].startswith("headrace: ") and "wrong.gguf: llama.attention.head_count is 0" in server.lines[-1]
        assert "Traceback" not in server.log
        assert "restarting it" not in server.log and "starting one" not in server.log


def test_a_missing_part_of_a_split_model_ends_the_start_at_once(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "tiny.gguf", tensors_a_part=8)
    (tmp_path / "tiny-00002-of-00003.gguf").unlink()
    with serving(str(first), data_dir=tmp_path / "data", ready=False) as server:
        assert server.wait() == os.EX_CONFIG
        assert server.lines[-1].startswith("headrace: ")
        assert server.lines[-1].endswith("is the first of 3 parts of a model; tiny-00002-of-00003.gguf is missing beside it")
        assert "Traceback" not in server.log and "restarting it" not in server.log


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        with serving("demo", "--port", port, data_dir=tmp_path / "data", ready=False) as server:
            assert server.wait() == 1
            (line,) = server.lines
            assert line == (
                f"headrace: cannot listen on 127.0.0.1:{port}: address already in use; choose another with --port or --host"
            )


def test_a_second_serve_on_the_same_data_is_refused(calm_server: Serving, null_model: tuple[str, ...]) -> None:
    server = calm_server
    with serving(*null_model, data_dir=server.data_dir, ready=False) as second:
        assert second.wait() == 1
        assert f"is in use by `headrace serve` (process {server.process.pid})" in second.lines[-1]
    assert server.complete().status_code == 200, "the first one goes on"


def test_serve_uses_a_given_redis_and_starts_no_valkey(null_model: tuple[str, ...], redis_url: str, tmp_path: Path) -> None:
    with serving(*null_model, "--redis-url", redis_url, data_dir=tmp_path / "data") as server:
        assert server.complete().status_code == 200
        assert server.children("valkey") == []
        assert server.stop() == 0
    away = "redis://:secret@127.0.0.1:1/0"
    with serving(*null_model, "--redis-url", away, data_dir=tmp_path / "data", ready=False) as server:
        assert server.wait() == 1
        assert server.lines[-1].startswith("headrace: cannot use Redis at redis://:***@127.0.0.1:1/0: ")


def test_logs_are_json_with_request_ids_and_without_prompts(calm_server: Serving) -> None:
    server = calm_server
    identity = server.complete(prompt=SECRET).json()["id"].removeprefix("cmpl-")
    server.wait_for(identity)
    records = [json.loads(line) for line in server.lines]
    assert {"time", "level", "message", "role"} <= set.intersection(*(set(record) for record in records))
    assert any(record.get("request_id") == identity for record in records)
    assert not any(word in server.log for word in SECRET.split())
    (settled,) = [record["config"] for record in records if record["message"] == "values chosen by the engine"]
    assert settled["max_model_len"] == {"value": 8192, "reason": "the model's own"}
    (configuration,) = [record["config"] for record in records if record["message"] == "configuration"]
    assert configuration["load_format"] == {"value": "null", "source": "command line --load-format"}
    assert configuration["redis_url"]["source"] == "embedded Valkey" and ":***@" in configuration["redis_url"]["value"]
    assert configuration["weights_cache_dir"] == {"value": None, "source": "default"}
    assert not any(record["logger"] == "ops.roles" for record in records), "of the processes that are up `serve` tells alone"


def test_the_real_model_answers(smollm2_gguf: Path, tmp_path: Path) -> None:
    with serving("demo", data_dir=tmp_path / "data") as server:
        answer = server.complete(prompt="The capital of France is", temperature=0, max_tokens=2).json()
        assert (answer["choices"][0]["text"], answer["model"]) == (" Paris.", "SmolLM2-135M-Instruct")
        assert server.stop(signal.SIGINT) == 130
