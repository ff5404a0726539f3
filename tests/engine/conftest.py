"""A whole engine on a thread of the test, over a real Redis: null model, real scheduler, real bus, real client."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from engine.bus import leases
from engine.bus.clock import BusClock
from engine.bus.connection import AsyncBus, Bus
from engine.client.client import AsyncClient
from engine.config import EngineConfig, RedisConfig, SchedulerConfig
from engine.runtime.core import EngineCore
from engine.runtime.loop import EngineLoop
from engine.runtime.serving import connect, engine_info
from engine.runtime.slot_owner import SlotOwner
from gpu.config import CacheConfig, ModelConfig, ParallelConfig

MODEL = "null-model"


class RunningEngine:
    """An engine loop on a thread. `stop` ends it in order; `error` is what ended it otherwise."""

    def __init__(self, url: str, config: EngineConfig, model: str = MODEL, tokenizer: str = "no-tokenizer") -> None:
        self.bus = Bus(url)
        clock = BusClock()
        clock.ask(self.bus)
        self.core = EngineCore(config, clock=clock)
        self.info = engine_info(config, self.core, model, tokenizer)
        self.info.slot, self.info.incarnation = self.bus.run(leases.claim_slot(model, self.info))
        self.loop: EngineLoop = connect(self.core, SlotOwner(self.bus, self.info), clock)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self.loop.stop()
        self.join()
        self.core.shutdown()
        self.bus.close()

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()


def null_config(backend: str = "uni", num_blocks: int = 513, **scheduler: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model="null", device="cpu", load_format="null", max_model_len=512),
        cache=CacheConfig(block_size=16, num_gpu_blocks_override=num_blocks),
        parallel=ParallelConfig(distributed_executor_backend=backend),
        scheduler=SchedulerConfig(**{"max_num_batched_tokens": 256, "max_num_seqs": 16, **scheduler}),
        redis=RedisConfig(),
    )


@pytest.fixture(params=["uni", "mp"])
def start_engine(redis_url: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., RunningEngine]]:
    """With the worker in this process, a step at a time; and with a worker process, one step planned ahead."""
    started: list[RunningEngine] = []

    def start(num_blocks: int = 513, **scheduler: int) -> RunningEngine:
        started.append(RunningEngine(redis_url, null_config(request.param, num_blocks, **scheduler)))
        return started[-1]

    yield start
    for engine in started:
        engine.stop()


@pytest.fixture
def engine(start_engine: Callable[..., RunningEngine]) -> RunningEngine:
    return start_engine()


@pytest.fixture
def slow_engine(start_engine: Callable[..., RunningEngine], monkeypatch: pytest.MonkeyPatch) -> RunningEngine:
    """A request for 450 tokens runs on it for 9 seconds: it is there whatever comes meanwhile."""
    monkeypatch.setenv("HEADRACE_NULL_RUNNER", "step_seconds=0.02")
    return start_engine()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[AsyncClient]:
    failures: list[BaseException] = []
    async with AsyncBus(redis_url) as bus:
        client = AsyncClient(bus, failures.append)
        await client.start()
        yield client
        await client.close()
    assert not failures
