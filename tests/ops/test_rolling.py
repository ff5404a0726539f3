"""Processes of a running `serve` are replaced under load, and no request fails."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.ops.serving import HEADRACE, Serving, serving
from tests.waiting import wait_for

NUM_CLIENTS = 6
TOKENS = 40


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Two engines and two API servers around the null model; a request takes 0.8 seconds."""
    options = ("--load-format", "null", "--served-model-name", "null", "--data-parallel-size", "2", "--api-server-count", "2")
    folder, steps = tmp_path_factory.mktemp("rolling"), "step_seconds=0.02"
    with serving(str(smollm2_gguf), *options, "--watchdog-timeout", "3", data_dir=folder, HEADRACE_NULL_RUNNER=steps) as server:
        yield server
        assert server.stop() == 0


def headrace(server: Serving, *arguments: str) -> str:
    done = subprocess.run([*HEADRACE, *arguments], env=server.environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr + server.log
    return done.stdout


class Load:
    """Clients that ask again and again, half of them with streams, on connections that they keep. `answers` has the tokens of
    each request, or what went wrong."""

    def __init__(self, server: Serving) -> None:
        self.answers: list[str] = []
        self._over = threading.Event()
        self._server = server
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(NUM_CLIENTS)]

    def _ask(self, number: int) -> None:
        body = {"prompt": "Hello", "max_tokens": TOKENS, "ignore_eos": True, "seed": 7, "stream": number % 2 == 0}
        with httpx.Client(base_url=self._server.url, timeout=60) as client:
            while not self._over.is_set():
                try:
                    self.answers.append(_text(client.post("/v1/completions", json=body)))
                except Exception as error:
                    self.answers.append(repr(error))

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            wait_for(lambda: len(self.answers) >= NUM_CLIENTS, "the first answers")
            yield
            seen = len(self.answers)
            wait_for(lambda: len(self.answers) >= seen + 2 * NUM_CLIENTS, "answers behind it")
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()


def _text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    if "event-stream" not in answer.headers["content-type"]:
        return str(answer.json()["choices"][0]["text"])
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def pids(server: Serving) -> dict[str, set[int]]:
    return {role: {child.pid for child in server.children(role)} for role in ("engine", "api")}


def test_a_rolling_restart_under_load_fails_no_request(server: Serving) -> None:
    before = pids(server)
    load = Load(server)
    with load.running():
        told = headrace(server, "restart", "engine", "api")
    assert len(set(load.answers)) == 1, f"{sorted(set(load.answers))}\n{server.log}"
    assert [line.split(":")[0] for line in told.splitlines()] == ["engine-0", "engine-1", "api-0", "api-1"]
    after = pids(server)
    for role in ("engine", "api"):
        assert len(after[role]) == 2 and not after[role] & before[role], role


def test_the_only_engine_is_followed_by_one_that_has_started_beside_it(smollm2_gguf: Path, tmp_path: Path) -> None:
    options = ("--load-format", "null", "--served-model-name", "null", "--data-parallel-size", "1")
    with serving(str(smollm2_gguf), *options, data_dir=tmp_path, HEADRACE_NULL_RUNNER="step_seconds=0.02") as server:
        before = pids(server)
        load = Load(server)
        with load.running():
            assert len(headrace(server, "restart").splitlines()) == 3
        assert len(set(load.answers)) == 1, f"{sorted(set(load.answers))}\n{server.log}"
        after = pids(server)
        assert not after["engine"] & before["engine"] and not after["api"] & before["api"]
        ready, ended = (server.log.index(text) for text in ("engine is ready again", "are left to the next engine"))
        assert ready < ended
        assert server.stop() == 0


@pytest.mark.parametrize("how", [(), ("--handover",)])
def test_a_drained_engine_ends_in_order_and_fails_no_request(server: Serving, how: tuple[str, ...]) -> None:
    (first, _) = sorted(server.headrace("engines"), key=lambda engine: str(engine["slot"]))
    load = Load(server)
    with load.running():
        assert headrace(server, "drain", first["slot"], *how) == f"engine {first['slot']} of null: ended\n"
    assert len(set(load.answers)) == 1, f"{sorted(set(load.answers))}\n{server.log}"
    server.wait_for("is ready again")


def test_what_cannot_be_replaced_or_drained_is_one_line(server: Serving) -> None:
    for command, error in (
        (("restart", "engine-7"), "there is no process `engine-7`; there are engine-0, engine-1, api-0, api-1, maintenance"),
        (("drain", "7"), "there is no engine `7`; there are 0 of null, 1 of null"),
        (("restart", "--pid", "1"), "process 1 is no `headrace serve` that can be reached: Connection refused"),
    ):
        done = subprocess.run([*HEADRACE, *command], env=server.environment, capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr) == (1, f"headrace: {error}\n")


def test_an_engine_that_is_stopped_is_replaced(server: Serving) -> None:
    wait_for(lambda: len(server.headrace("engines")) == 2, "two engines")
    stopped = server.children("engine")[0]
    stopped.send_signal(signal.SIGSTOP)
    server.wait_for("has shown no sign of life for 3 s; killing it")
    server.wait_for("is ready again")
    assert stopped.pid not in pids(server)["engine"]
    wait_for(
        lambda: 'engine_alarms_total{kind="silent",model_name="null"} 1.0' in httpx.get(f"{server.url}/metrics").text, "its count"
    )
