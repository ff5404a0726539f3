"""The state of one API server process: its client of the bus, models, keys, counters. No request's state outlives the request."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from fastapi import Request

from api.admission import Admission
from api.errors import RedisTrouble, ServiceUnavailable
from api.http.key_ring import EVERYBODY, KeyRing, Principal
from api.metrics.metrics import Metrics, shared
from api.model_files import ServedModel
from api.model_registry import ServedModels
from api.preparation.readers import HeldBody, Readers
from api.preparation.rules import RequestRules
from api.request.limits import RequestLimits
from api.response.pending_output import OutputBudget
from api.response.request_metrics import AttachedObserver, RequestObserver
from engine.bus.call import BusUnavailable, Trouble
from engine.bus.connection import AsyncBus
from engine.client.client import AsyncClient
from engine.config import ApiConfig, RedisConfig

B = TypeVar("B")
R = TypeVar("R")
logger = logging.getLogger("headrace.api")

RETRY_SECONDS = 1.0
MAX_READERS = 2  # processes for large bodies
LOOK_SECONDS = 0.5  # that a scrape waits for Redis
SEEK_SECONDS = 0.1  # between two such looks of probes, of which there may be many
SETTLE_SECONDS = 0.5  # that another process's view of this one's metrics may be behind


class Service:
    """`on_failure` is called when a background task died: the process must end then, with an error. Raises ConfigurationError."""

    def __init__(self, config: ApiConfig, redis_config: RedisConfig) -> None:
        self.config = config
        self.redis_config = redis_config
        self.keys = KeyRing(config.api_key, config.api_key_file)
        self.metrics = Metrics(config.metrics_prefix)
        self.metrics.engines = lambda: self._client.directory.engines if self._client is not None else []
        self.metrics.queues = lambda: self._client.directory.queues if self._client is not None else {}
        self.metrics.alarms = lambda: self._client.directory.alarms if self._client is not None else {}
        self.pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="text")
        self.models = ServedModels(config, self.pool)
        self.readers = Readers(min(MAX_READERS, os.cpu_count() or 1))
        self.rules = RequestRules(
            RequestLimits.of(config),
            config.trust_request_chat_template,
            config.special_tokens_in_messages,
            self.models.template_defaults,
            config.enable_force_include_usage,
            config.enable_prompt_tokens_details,
            config.return_tokens_as_token_ids,
            config.tool_call_parser,
            config.reasoning_parser,
        )
        self.admission = Admission(config)
        self.output_budget = OutputBudget(config.max_pending_bytes)
        self.draining = False  # new requests should go elsewhere
        self.closing = False  # and are refused
        self.observer = RequestObserver(self.metrics)
        self.attached_observer = AttachedObserver(self.observer)
        self.on_failure: Callable[[BaseException], None] | None = None
        self._client: AsyncClient | None = None
        self._first_trouble = Trouble.AWAY  # until there is a client
        self._background: asyncio.Task[None] | None = None
        self._settling: asyncio.TimerHandle | None = None
        self._seeking: asyncio.Task[None] | None = None
        self._next_seek = 0.0  # event loop's time

    async def start(self) -> None:
        """Begin to connect; returns once connected, or at the first failure, after which it goes on trying behind."""
        first_try = asyncio.Event()
        self.bus = AsyncBus(self.redis_config.redis_url)
        self._background = asyncio.create_task(self._run(first_try))
        self._background.add_done_callback(self._background_done)
        if shared():
            self._settle()
        await first_try.wait()

    async def _run(self, first_try: asyncio.Event) -> None:
        """Connect, then make ready each model that appears."""
        await self._connect(first_try)
        while True:
            await self.models.prepare(self.client)
            await asyncio.sleep(RETRY_SECONDS)

    def _settle(self) -> None:
        """Another process may be asked for this one's numbers at any time."""
        self._settling = asyncio.get_running_loop().call_later(SETTLE_SECONDS, self._settle)
        self.metrics.settle()

    async def _connect(self, first_try: asyncio.Event) -> None:
        while self._client is None:
            client = AsyncClient(self.bus, self.on_failure)
            try:
                await client.start()
            except BusUnavailable as error:
                logger.warning("the API server is not connected to Redis, trying again: %s", error)
                self._first_trouble = error.trouble
                await client.close()
            else:
                self._client = client
                return
            finally:  # whatever happened: what ends this task must not leave `start` waiting
                first_try.set()
            await asyncio.sleep(RETRY_SECONDS)

    def _background_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self.on_failure is not None:
            self.on_failure(error)

    @property
    def client(self) -> AsyncClient:
        """Raises ServiceUnavailable before the first contact with Redis."""
        if self._client is None:
            raise RedisTrouble(self._first_trouble)
        return self._client

    @property
    def redis_trouble(self) -> Trouble | None:
        """The trouble that the last call to Redis met; None: none."""
        return self._first_trouble if self._client is None else self._client.directory.trouble

    async def look(self) -> None:
        """The newest numbers of engines and queues, where Redis gives them at once; else those of the last half second stay."""
        if self._client is not None and self.redis_trouble is None:
            with suppress(BusUnavailable, TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._client.directory.refresh()

    async def seek_engines(self) -> None:
        """One may just have come, if none is known: Redis is asked, without waiting for the next round of housekeeping. All who
        want to know wait for one answer."""
        if self._client is None or self._client.directory.engines:
            return
        now = asyncio.get_running_loop().time()
        if self._seeking is None or (self._seeking.done() and now >= self._next_seek):
            self._next_seek = now + SEEK_SECONDS
            self._seeking = asyncio.create_task(self.look())
        await asyncio.shield(self._seeking)

    async def resolve(self, name: str | None) -> ServedModel:
        """As `ServedModels.resolve`; an engine that has just come is known."""
        await self.seek_engines()
        return await self.models.resolve(self.client, name)

    async def prepare(self, request: Request, work: Callable[[B, ServedModel, RequestRules], R], body: B, model: ServedModel) -> R:
        """`work` on a body off the event loop: on a thread, or in the reader process that holds it because it is large."""
        held: HeldBody | None = getattr(request.state, "held_body", None)
        if held is not None:
            return await held.work(work, body, model, self.rules)
        return await self.models.in_thread(work, body, model, self.rules)

    def leave(self) -> None:
        """New requests should go elsewhere. Streams that can be continued at another API server break off at once."""
        self.draining = True
        for generation in list(self.observer.open):
            if generation.grace and (generation.task.stream or generation.task.background):
                generation.fail(ServiceUnavailable("The server is shutting down. Continue the stream at another one."))

    def abort_open(self) -> None:
        """Admit nothing more, and abort what runs."""
        self.closing = True
        for generation in list(self.observer.open):
            generation.abort()

    async def close(self) -> None:
        for task in (self._background, self._seeking):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for generation in list(self.observer.open):
            generation.close()
        if self._client is not None:
            await self._client.close()
        await self.bus.close()
        await self.readers.close()
        if self._settling is not None:
            self._settling.cancel()
        self.metrics.settle()
        self.pool.shutdown(wait=False, cancel_futures=True)


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def principal_of(request: Request) -> Principal:
    principal: Principal = getattr(request.state, "principal", EVERYBODY)
    return principal
