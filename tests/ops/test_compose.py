"""compose.yaml: each role gets along with its rights in Redis and has no more; the stack starts, chats and stops in Docker."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml

from tests.redis_server import embedded_valkey
from tests.waiting import wait_for

REPOSITORY = Path(__file__).parents[2]
ROLES = ("admin", "api", "engine", "maintenance")


@contextlib.contextmanager
def running(command: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is asked to end, and ends."""
    with (
        log.open("wb") as output,
        subprocess.Popen(command, env={**os.environ, **variables}, stdout=output, stderr=output) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            finally:
                process.kill()


def until(condition: Callable[[], Any], seconds: float, log: Path | None = None) -> None:
    """Waits for what other processes do; one that cannot be reached yet has not done it."""

    def look() -> Any:
        with contextlib.suppress(redis.exceptions.ConnectionError, httpx.TransportError):
            return condition()

    wait_for(look, lambda: log.read_text() if log else "it did not happen", seconds)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The Redis of compose.yaml, started by its own script; the URL of each user."""
    folder = tmp_path_factory.mktemp("guarded-redis")
    (folder / "bin").mkdir()
    (folder / "bin" / "redis-server").symlink_to(embedded_valkey())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    passwords = {f"REDIS_{role.upper()}_PASSWORD": f"{role}-password" for role in ROLES}
    environment = {**passwords, "REDIS_DATA": str(folder), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    script = ["sh", str(REPOSITORY / "ops/docker/redis.sh"), "--port", str(port), "--bind", "127.0.0.1"]
    urls = {role: f"redis://{role}:{role}-password@127.0.0.1:{port}/0" for role in ROLES}
    with running(script, folder / "log", **environment):
        with redis.Redis.from_url(urls["admin"]) as client:
            until(client.ping, 10, folder / "log")
        yield {**urls, "stranger": f"redis://127.0.0.1:{port}/0", "health": f"redis://health:any@127.0.0.1:{port}/0"}


def test_every_role_does_its_work_with_its_own_rights(guarded: dict[str, str], smollm2_gguf: Path, tmp_path: Path) -> None:
    role = [sys.executable, "-P", "-m", "ops.cli"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    engine = [*role, "engine", str(smollm2_gguf), "--load-format", "null", "--served-model-name", "a model: {x}"]
    with (
        running(engine, tmp_path / "engine", HEADRACE_REDIS_URL=guarded["engine"], HEADRACE_NULL_RUNNER="step_seconds=0.02"),
        running([*role, "api", "--port", port], tmp_path / "api", HEADRACE_REDIS_URL=guarded["api"]),
        running([*role, "maintenance"], tmp_path / "maintenance", HEADRACE_REDIS_URL=guarded["maintenance"]),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        until(lambda: client.get("/ready").status_code == 200, 30, tmp_path / "api")
        short = {"prompt": "Hello", "max_tokens": 4}
        answers = [client.post("/v1/completions", json=short, headers={"Idempotency-Key": "one"}) for _ in range(2)]
        assert {each.status_code for each in answers} == {200} and answers[0].text == answers[1].text
        request_id = answers[0].headers["x-headrace-request-id"]
        assert client.get(f"/v1/requests/{request_id}/stream").text.endswith("data: [DONE]\n\n")
        body = {"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            (live,) = answer(guarded["api"], "ps")
            (aborted,) = answer(guarded["api"], "abort", live["id"])
            assert aborted["state"] == "ended" and aborted["output_tokens"] > 0
        assert len(answer(guarded["api"], "engines")) == len(answer(guarded["engine"], "engines")) == 1
        with redis.Redis.from_url(guarded["admin"]) as admin:
            usage = "headrace:{a model: %7Bx%7D}:usage"
            until(lambda: admin.xlen(usage) == 0, 20, tmp_path / "maintenance")
            assert admin.acl_log() == [], "nobody was refused anything"
        (used,) = answer(guarded["maintenance"], "usage")
        assert used["requests"] == 2
    for name in ("engine", "api", "maintenance"):
        assert "Traceback" not in (tmp_path / name).read_text(), (tmp_path / name).read_text()


def answer(redis_url: str, *arguments: str) -> Any:
    command = [sys.executable, "-P", "-m", "ops.cli", *arguments, "--json"]
    done = subprocess.run(command, env={**os.environ, "HEADRACE_REDIS_URL": redis_url}, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("user", "command"),
    [
        ("stranger", ("PING",)),
        ("health", ("GET", "headrace:models")),
        ("api", ("FLUSHALL",)),
        ("api", ("CONFIG", "GET", "*")),
        ("api", ("KEYS", "*")),
        ("api", ("ACL", "LIST")),
        ("api", ("XADD", "headrace:{m}:journal:0:1", "*", "a", "b")),
        ("api", ("SET", "headrace:{m}:tokenizer:x", "y")),
        ("api", ("LPUSH", "headrace:celery:maintenance", "x")),
        ("engine", ("SHUTDOWN",)),
        ("engine", ("SET", "headrace:api:{1}", "x")),
        ("engine", ("DEL", "headrace:{m}:usage:days")),
        ("engine", ("SET", "elsewhere", "x")),
        ("maintenance", ("HSET", "headrace:{m}:progress:0", "call", "1")),
        ("maintenance", ("SET", "headrace:{m}:tokenizer:x", "y")),
        ("maintenance", ("PUBLISH", "elsewhere", "x")),
        ("maintenance", ("SCRIPT", "FLUSH")),
    ],
)
def test_a_role_may_not_do_the_work_of_another(guarded: dict[str, str], user: str, command: tuple[str, ...]) -> None:
    with redis.Redis.from_url(guarded[user]) as client:
        with pytest.raises((redis.exceptions.NoPermissionError, redis.exceptions.AuthenticationError)):
            client.execute_command(*command)


def test_every_service_restarts_and_is_watched() -> None:
    services = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())["services"]
    assert set(services) == {"redis", "proxy", "api", "engine", "engine-gpu", "maintenance"}
    for name, service in services.items():
        assert service["restart"] == "unless-stopped" and "healthcheck" in service, name
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"proxy": ["${HEADRACE_PUBLISH:-127.0.0.1:8000}:8000"]}, "Redis is not published, the API on loopback alone"


PROJECT = {"COMPOSE_PROJECT_NAME": "headrace-test", "HEADRACE_PUBLISH": "127.0.0.1:0"}  # any free port


def compose(*arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    command = ["docker", "compose", "--project-directory", str(REPOSITORY), *arguments]
    environment = {**os.environ, **PROJECT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.docker
def test_the_stack_starts_chats_and_stops() -> None:
    try:
        compose("up", "--build", "--wait", "--detach", timeout=3000)
        with httpx.Client(base_url="http://" + compose("port", "proxy", "8000").stdout.strip(), timeout=120) as client:
            chat_and_lose_the_engine(client)
            replace_everything_under_load(client)
    except BaseException:
        print(compose("logs").stdout)
        raise
    finally:
        compose("down", "--timeout", "60", "--volumes")
    of_the_test = ["--filter", "label=com.docker.compose.project=headrace-test", "--quiet"]
    for kind in (["ps", "--all"], ["volume", "ls"], ["network", "ls"]):
        assert subprocess.run(["docker", *kind, *of_the_test], capture_output=True, text=True).stdout == ""


def chat_and_lose_the_engine(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me the capital of France."}], "max_tokens": 16, "temperature": 0}
    chat = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert "Paris" in chat["choices"][0]["message"]["content"] and chat["model"] == "SmolLM2-135M-Instruct"
    (listed,) = json.loads(compose("exec", "api", "headrace", "ps", "-a", "--json").stdout)
    assert (listed["reason"], listed["output_tokens"]) == (chat["choices"][0]["finish_reason"], chat["usage"]["completion_tokens"])

    tale = {"prompt": "Once upon a time", "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}
    calm, _ = follow(client, tale)
    (engine,) = json.loads(compose("exec", "api", "headrace", "engines", "--json").stdout)

    def kill() -> None:
        # from inside: what `docker compose kill` ends counts as stopped by hand and is not started again
        compose("exec", "engine", "sh", "-c", "kill -9 $(cat /proc/1/task/1/children)")

    struck, pause = follow(client, tale, kill)
    assert struck == calm, "the next engine continued the stream"
    print(f"longest pause of the stream: {pause:.1f} s")
    assert pause < 60, "its heartbeat is missed for 5 seconds, and Docker starts another engine"
    (heir,) = json.loads(compose("exec", "api", "headrace", "engines", "--json").stdout)
    assert heir["incarnation"] > engine["incarnation"]


def replace_everything_under_load(client: httpx.Client) -> None:
    """No request fails, though engine and API servers are replaced."""
    body = {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    answers: list[str] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            answers.append(client.post("/v1/completions", json=body).text)

    before = compose("ps", "--quiet", "api", "engine").stdout.split()
    clients = [threading.Thread(target=ask) for _ in range(4)]
    for each in clients:
        each.start()
    try:
        environment = {**os.environ, **PROJECT}
        subprocess.run(["sh", "ops/docker/rolling.sh"], cwd=REPOSITORY, env=environment, check=True, timeout=600)
    finally:
        over.set()
        for each in clients:
            each.join()
    failed = [answer for answer in answers if '"choices"' not in answer]
    assert not failed, failed[:3]
    assert len({json.loads(answer)["choices"][0]["text"] for answer in answers}) == 1
    after = compose("ps", "--quiet", "api", "engine").stdout.split()
    assert len(after) == len(before) and not set(after) & set(before)


def follow(client: httpx.Client, body: dict[str, Any], strike: Callable[[], None] | None = None) -> tuple[str, float]:
    """The text of a stream, and its longest pause in seconds. `strike` comes after its 50th event."""
    text, longest, last = "", 0.0, time.monotonic()
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        for number, line in enumerate(lines):
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            text += json.loads(line[6:])["choices"][0]["text"]
            if number == 50 and strike is not None:
                strike()
    return text, longest
