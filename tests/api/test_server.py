"""The process's end: signals, drain, last words; several processes on one socket."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from api.server import run_api
from engine.config import ApiConfig, RedisConfig
from tests.api.conftest import NULL_ENGINE
from tests.api.live_server import LiveServer, listen, sse_events
from tests.api.request_states import until_loaded
from tests.waiting import wait_for_async

EXIT_SECONDS = 15.0


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[LiveServer]:
    """The engine of all these tests; each starts API servers of its own."""
    with LiveServer(smollm2_gguf, NULL_ENGINE, null="step_seconds=0.02") as server:
        yield server


async def stream_until_signal(url: str, process: subprocess.Popen[bytes], max_tokens: int, number: int) -> list[object]:
    """The events of a stream during which the server is told to stop."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        body = {"prompt": "x", "max_tokens": max_tokens, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            first = await anext(lines)
            process.send_signal(number)
            return sse_events([first, *[line async for line in lines]])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_without_a_shutdown_timeout_streams_are_aborted_and_get_their_end(server: LiveServer, number: int) -> None:
    process, url = server.start_api()
    server.wait_until_healthy(url)
    events = await stream_until_signal(url, process, 1500, number)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "abort"  # type: ignore[index]
    assert server.ended(process) == 0


@pytest.mark.parametrize(("number", "timeout"), [(signal.SIGTERM, "20"), (signal.SIGUSR2, "0")])
async def test_a_server_that_leaves_answers_on_its_connections_and_accepts_no_more(
    server: LiveServer, number: signal.Signals, timeout: str
) -> None:
    process, url = server.start_api("--shutdown-timeout", timeout, "--keep-alive-timeout", "1")
    server.wait_until_healthy(url)
    body = {"prompt": "x", "max_tokens": 60}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http, httpx.AsyncClient(base_url=url, timeout=60) as kept:
        (await kept.get("/live")).raise_for_status()
        work = asyncio.create_task(http.post("/v1/completions", json=body))
        await until_loaded(http)
        process.send_signal(number)
        await until_refused(url)
        late = await kept.post("/v1/completions", json=body)
        assert (late.status_code, late.headers["connection"]) == (200, "close")
        assert (await work).json()["usage"]["completion_tokens"] == 60
    assert server.ended(process) == 0


async def until_refused(url: str) -> None:
    """New connections are."""

    async def refused() -> bool:
        async with httpx.AsyncClient(base_url=url) as stranger:
            try:
                await stranger.get("/live")
            except httpx.ConnectError:
                return True
            return False

    await wait_for_async(refused, "refused connections")


async def test_after_the_shutdown_timeout_requests_are_refused_and_aborted(server: LiveServer) -> None:
    process, url = server.start_api("--shutdown-timeout", "1")
    server.wait_until_healthy(url)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        work = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1500}))
        await until_loaded(http)
        process.send_signal(signal.SIGTERM)
        assert (await work).json()["choices"][0]["finish_reason"] == "abort"
    assert server.ended(process) == 0


async def test_a_second_signal_ends_the_shutdown_timeout(server: LiveServer) -> None:
    process, url = server.start_api("--shutdown-timeout", "60")
    server.wait_until_healthy(url)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        work = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1500}))
        await until_loaded(http)
        process.send_signal(signal.SIGTERM)
        await until_refused(url)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert server.ended(process) == 0
        assert time.monotonic() - started < EXIT_SECONDS
        await asyncio.gather(work, return_exceptions=True)


def test_several_processes_share_a_socket(server: LiveServer) -> None:
    with listen() as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        processes = [server.start_api_on(listener) for _ in range(2)]
        server.wait_until_healthy(url)
        answers = [httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}) for _ in range(8)]
        assert {answer.status_code for answer in answers} == {200}
        processes[0].send_signal(signal.SIGTERM)
        assert server.ended(processes[0]) == 0
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


class DyingService:
    """Stands for a server of which a background task dies as soon as it runs: no real one can be made to on demand."""

    config = ApiConfig()
    metrics = SimpleNamespace(client_dropped=lambda reason: None)
    on_failure: Callable[[BaseException], None]

    metrics = SimpleNamespace(client_dropped=None)
    draining = False

    def leave(self) -> None:
        return

    def abort_open(self) -> None:
        return


@pytest.mark.parametrize("dies", [True, False])
def test_a_server_with_a_dead_part_ends_with_an_error(monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    service = DyingService()

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        if dies:
            asyncio.get_running_loop().call_later(0.1, service.on_failure, RuntimeError("a task died"))
        else:
            asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
        yield

    app = FastAPI(lifespan=life)
    app.state.service = service
    monkeypatch.setattr("api.server.create_app", lambda config, redis_config: app)
    told: list[str] = []
    assert run_api(ApiConfig(), RedisConfig(), listen(), lambda: told.append("up")) == (1 if dies else 0)
    assert told == ["up"]


@pytest.mark.parametrize(
    "config",
    [
        ApiConfig(host="0.0.0.0"),
        ApiConfig(api_key=["nonsense"]),
        ApiConfig(api_key_file="/no/such/file"),
        ApiConfig(chat_template="/no/such/file"),
        ApiConfig(default_chat_template_kwargs="[1]"),
        ApiConfig(default_chat_template_kwargs="{"),
    ],
)
def test_unusable_settings_end_the_server_with_status_78(config: ApiConfig) -> None:
    with listen() as listener:
        assert run_api(config, RedisConfig(), listener, lambda: pytest.fail("it is not up")) == os.EX_CONFIG
