"""Models with their live engines, and the engines that this observer may declare dead."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cached_property

from engine.bus import failover, leases
from engine.bus.alarms import alarms as alarms_of
from engine.bus.call import BusUnavailable, Trouble
from engine.bus.connection import AsyncBus
from engine.bus.deadlines import expire_late
from engine.bus.enqueue import accepts, make_room
from engine.bus.queue_depth import QueueDepth, queue_depth
from engine.protocol import WRITTEN_VERSIONS, EngineInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelHandle:
    """A model with a live engine, or one that lived within the failover time: requests may wait for the next.

    What its engines have in common is found once, for all requests until the next `refresh`.
    """

    name: str  # canonical: what its keys are made of
    tokenizer: str  # content hash of its TokenizerBundle
    engines: list[EngineInfo] = field(default_factory=list)  # at least one; the one that was heard of last where none lives
    is_live: bool = True  # an engine lives

    @cached_property
    def max_model_len(self) -> int:
        """Tokens that every engine can take."""
        return min(engine.max_model_len for engine in self.engines)

    @cached_property
    def protocol_version(self) -> int | None:
        """The newest version of requests that this process writes and every engine reads; None: there is none."""
        return max(set(WRITTEN_VERSIONS).intersection(*(engine.protocol_versions for engine in self.engines)), default=None)

    @cached_property
    def takes_priorities(self) -> bool:
        """Whether requests wait in the order of their priorities; engines of one queue have one policy."""
        return all(engine.scheduling_policy == "priority" for engine in self.engines)

    @property
    def vocab_size(self) -> int:
        return self.engines[0].vocab_size

    @cached_property
    def max_logprobs(self) -> int:
        return min((engine.max_logprobs for engine in self.engines), key=lambda most: most if most >= 0 else 1 << 30)


class Directory:
    """Models and engines as Redis knew them at the owner's last successful `refresh`."""

    def __init__(self, bus: AsyncBus, failover_timeout: float = leases.FAILOVER_TIMEOUT) -> None:
        self.models: dict[str, ModelHandle] = {}  # by served name
        self.handles: dict[str, ModelHandle] = {}  # by canonical name, which another model may serve as an alias
        self.engines: list[EngineInfo] = []
        self.known_models: set[str] = set()  # with an engine alive or not
        self.queues: dict[str, QueueDepth] = {}  # by canonical name
        self.alarms: dict[str, dict[str, int]] = {}  # engines that a watchdog ended, by canonical name and kind of alarm
        self.trouble: Trouble | None = Trouble.AWAY  # of Redis; None: it serves
        self.refusal = ""  # why Redis takes no new requests, where it serves otherwise
        self._bus = bus
        self._failover_timeout = failover_timeout  # seconds
        self._unwritable: set[str] = set()  # models of which an engine reads no version of requests that this process writes

    async def refresh(self) -> None:
        """Raises BusUnavailable."""
        self.known_models = set(await self._bus.run(leases.models()))
        served: dict[str, ModelHandle] = {}
        handles: dict[str, ModelHandle] = {}
        everyone: list[EngineInfo] = []
        queues: dict[str, QueueDepth] = {}
        alarms: dict[str, dict[str, int]] = {}
        for name in sorted(self.known_models):
            engines = await self._bus.run(leases.engines(name))
            everyone += engines
            queues[name] = await self._bus.run(queue_depth(name))
            alarms[name] = await self._bus.run(alarms_of(name))
            is_live = bool(engines)
            if not is_live and (last := await self._bus.run(leases.last_engine(name))) is not None:
                engines = [last]
            if engines:
                handle = handles[name] = ModelHandle(name, engines[0].tokenizer, engines, is_live)
                for served_name in [name, *(alias for engine in engines for alias in engine.served_names)]:
                    served.setdefault(served_name, handle)
        self.models, self.handles = served, handles
        self.engines, self.queues, self.alarms, self.trouble = everyone, queues, alarms, None
        self._tell_unwritable()

    def _tell_unwritable(self) -> None:
        """Log a model once when it can get no requests from this process any more."""
        unwritable = {name: handle for name, handle in self.handles.items() if handle.protocol_version is None}
        for name in sorted(unwritable.keys() - self._unwritable):
            read = "; ".join(f"engine {each.slot} reads {each.protocol_versions}" for each in unwritable[name].engines)
            logger.error("%s gets no requests: this process writes protocol versions %s, %s", name, list(WRITTEN_VERSIONS), read)
        self._unwritable = set(unwritable)

    async def check_admission(self) -> None:
        """See whether Redis would take a new request. Old results give way to new requests."""
        try:
            self.refusal = await self._refusal()
            if self.refusal and await self._make_room():
                self.refusal = await self._refusal()
        except BusUnavailable as error:
            self.refusal = f"Redis {error.trouble}."

    async def _refusal(self) -> str:
        """Raises BusUnavailable where Redis does not answer."""
        try:
            refused = await self._bus.run(accepts())
        except BusUnavailable as error:
            if error.trouble is not Trouble.MEMORY:
                raise
            return f"Redis {error.trouble}."
        return f"{refused}." if refused is not None else ""

    async def _make_room(self) -> int:
        """Returns how many results gave way."""
        return sum([await self._bus.run(make_room(name)) for name in sorted(self.known_models)])

    async def expire_late_requests(self) -> None:
        """End requests that are past their deadline. Raises BusUnavailable."""
        for name in sorted(self.known_models):
            late = await self._bus.run(expire_late(name))
            if any(late):
                logger.info("%s: %d requests were late in the queue, %d while they ran", name, *late)

    async def take_over_dead_engines(self) -> None:
        """Let the requests of engines that had no heartbeat for a whole time to live, while Redis was up, wait for the next engine;
        and end those for which none came within the failover time. Raises BusUnavailable."""
        for name in sorted(self.known_models):
            for dead in await self._bus.run(leases.dead_engines(name)):
                left = await self._bus.run(failover.takeover(name, dead.slot, dead.incarnation))
                if left.orphaned or left.ended:
                    logger.error("engine %s of %s is dead: %d requests wait for the next engine, %d ended", dead.slot, name, *left)
            ended = await self._bus.run(failover.expire_orphans(name, self._failover_timeout))
            if ended:
                logger.error("%d requests of %s ended: no engine came to continue them", ended, name)
