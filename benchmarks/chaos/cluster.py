"""The processes of a run: Redis, engines, API servers and maintenance. Each one that ends is started again at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from benchmarks.chaos.redis import RedisServer, free_port
from engine.bus import records
from engine.bus.call import BusUnavailable
from engine.bus.connection import AsyncBus
from engine.fault_points import ENVIRONMENT_VARIABLE, FaultPoint
from ops.parent_death import bound_to_parent

START_SECONDS = 120.0
STOP_SECONDS = 30.0
RECOVERY_SECONDS = 180.0  # for a request to get on after an engine's death; one that takes longer is stuck
FAULT_POINT_SECONDS = 8.0  # for a process under load to reach a named point
EXPLAINED_SECONDS = 30.0  # within which the end of a process follows from a fault
HEADRACE = (sys.executable, "-P", "-m", "ops.cli")
NAME = "chaos"  # the served model


@dataclass
class Role:
    """One process of the server, and those that follow it when it ends."""

    name: str
    arguments: Sequence[str]
    environment: dict[str, str]
    log: Path
    process: asyncio.subprocess.Process | None = None
    touched: float = 0.0  # when a fault last acted on it, time.monotonic()
    own_ends: list[str] = field(default_factory=list)  # ends that no fault explains
    starts: int = 0
    _keeper: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._keeper = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            await self._start()
            assert self.process is not None
            code = await self.process.wait()
            if code not in (-signal.SIGKILL, os.EX_TEMPFAIL) and time.monotonic() - self.touched > EXPLAINED_SECONDS:
                self.own_ends.append(f"{self.name} (process {self.process.pid}) ended by itself with {code}")
                await asyncio.sleep(0.5)

    async def _start(self) -> None:
        self.starts += 1
        command = bound_to_parent([*HEADRACE, *self.arguments])
        with open(self.log, "ab") as log:
            log.write(f"--- start {self.starts} {time.strftime('%H:%M:%S')}\n".encode())
            log.flush()
            self.process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=self.environment)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def tree(self) -> list[psutil.Process]:
        """The process and its children; empty where it just ended."""
        if not self.is_running:
            return []
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        return []

    async def dies_at(self, point: FaultPoint, passing: int) -> bool:
        """Whether a process of this role reached the point so often within FAULT_POINT_SECONDS, and died there. Else the order is
        withdrawn."""
        order = Path(self.environment[ENVIRONMENT_VARIABLE])
        draft = order.with_suffix(".draft")
        draft.write_text(f"{point}:{passing}")
        draft.rename(order)  # whole at once: the process reads it at any time
        deadline = time.monotonic() + FAULT_POINT_SECONDS
        try:
            while order.exists():  # the process that obeys removes it
                if time.monotonic() > deadline:
                    return False
                await asyncio.sleep(0.05)
        finally:
            order.unlink(missing_ok=True)
        return True

    def send(self, number: signal.Signals) -> None:
        self.touched = time.monotonic()
        if self.is_running:
            assert self.process is not None
            self.process.send_signal(number)

    async def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if not self.is_running:
            return
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), STOP_SECONDS)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


@dataclass(frozen=True)
class ClusterOptions:
    model: str  # a file or directory
    is_null: bool
    num_engines: int
    num_api_servers: int
    retention: int  # seconds for which records are kept
    redis_binary: str
    folder: Path  # for logs and Redis' files


class Cluster:
    def __init__(self, options: ClusterOptions) -> None:
        self.options = options
        self.redis = RedisServer(options.redis_binary, options.folder / "redis")
        ports = [free_port() for _ in range(options.num_api_servers)]
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.engines = [self._engine(number) for number in range(options.num_engines)]
        self.api_servers = [self._api_server(number, port) for number, port in enumerate(ports)]
        self.maintenance = self._role("maintenance", ["maintenance"])
        self._http = httpx.AsyncClient(timeout=5.0)
        self._bus = AsyncBus(self.redis.url)

    @property
    def roles(self) -> list[Role]:
        return [*self.engines, *self.api_servers, self.maintenance]

    def _engine(self, number: int) -> Role:
        options = self.options
        arguments = ["engine", options.model, "--served-model-name", NAME, "--max-model-len", "1024", "--max-num-seqs", "16"]
        arguments += ["--num-threads", "1", "--num-gpu-blocks-override", "400", "--logprobs-mode", "processed_logprobs"]
        arguments += ["--load-format", "null"] if options.is_null else []
        return self._role(f"engine-{number}", arguments)

    def _api_server(self, number: int, port: int) -> Role:
        arguments = ["api", "--port", str(port), "--record-retention", str(self.options.retention)]
        return self._role(f"api-{number}", [*arguments, "--sse-keep-alive-interval", "2"])

    def _role(self, name: str, arguments: list[str]) -> Role:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HEADRACE_NULL_RUNNER": "step_seconds=0.02"}
        environment[ENVIRONMENT_VARIABLE] = str(self.options.folder / f"{name}.fault")
        command = [*arguments, "--redis-url", self.redis.url, "--log-format", "text"]
        if name != "maintenance":
            command += ["--shutdown-timeout", "60"]  # a drain ends when all answers are whole
        return Role(name, command, environment, self.options.folder / f"{name}.log")

    async def start(self) -> None:
        await self.redis.start()
        for role in self.roles:
            role.begin()
        await self.until_whole()

    async def until_whole(self) -> None:
        """Until every API server is healthy and knows all engines. Raises TimeoutError."""
        async with asyncio.timeout(START_SECONDS):
            for url in self.urls:
                while await self.num_engines(url) < len(self.engines):
                    await asyncio.sleep(0.2)

    async def until_recovered(self) -> None:
        """Until it is whole, and each request that an engine died with has ended or cleared itself. Raises TimeoutError."""
        await self.until_whole()
        async with asyncio.timeout(RECOVERY_SECONDS):
            while await self._blamed_requests():
                await asyncio.sleep(0.5)

    async def _blamed_requests(self) -> list[str]:
        """Ids of those that another death may end with an error."""
        with contextlib.suppress(BusUnavailable):
            return [record.id for record in await self._bus.run(records.live_requests(NAME)) if record.attempts]
        return ["unknown: no answer"]

    async def num_engines(self, url: str) -> int:
        """Living engines that an API server knows."""
        found = await self.metric(url, "kv_cache_usage_perc")
        return len(found)

    async def engine_numbers(self) -> list[str]:
        """Of the living engines, as an API server knows them."""
        for url in self.urls:
            if series := await self.metric(url, "kv_cache_usage_perc"):
                return sorted(found[1] for labels in series if (found := re.search(r'engine="(\d+)"', labels)))
        return []

    async def metric(self, url: str, name: str) -> dict[str, float]:
        """The series of a gauge, by their labels. Empty while the server is away."""
        with contextlib.suppress(httpx.HTTPError):
            response = await self._http.get(f"{url}/metrics")
            lines = [line.rpartition(" ") for line in response.text.splitlines() if line.startswith(f"headrace:{name}{{")]
            return {labels: float(value) for labels, _, value in lines}
        return {}

    async def live_requests(self) -> list[str]:
        """Ids of requests that have not ended."""
        with contextlib.suppress(httpx.HTTPError):
            response = await self._http.get(f"{self.urls[0]}/v1/requests", params={"state": "live"})
            return [each["id"] for each in response.json()["data"]]
        return ["unknown: no answer"]

    async def stop(self) -> None:
        await asyncio.gather(*(role.stop() for role in self.roles))
        await self._http.aclose()
        await self._bus.close()
        await self.redis.stop()
