"""Which requests the API server lets into the queue: early refusals, limits, the weights of tenants, and errors of refusals."""

from __future__ import annotations

from collections.abc import Sequence

from api.errors import RETRY_AFTER, ApiError, BadRequest, ConfigurationError, ServiceUnavailable, TooManyRequests
from api.model_registry import NO_ENGINE
from engine.bus.enqueue import QUEUE_LIMITS, AdmissionLimits, Refused
from engine.bus.queue_depth import QueueDepth
from engine.client.admission import estimated_wait, foresee, limits_by_pace, retry_after
from engine.client.client import AsyncClient
from engine.client.discovery import ModelHandle
from engine.config import ApiConfig
from engine.protocol import PROTOCOL_VERSION, EngineInfo

POSITION_HEADER = "X-Headrace-Queue-Position"
WAIT_HEADER = "X-Headrace-Queue-Wait"
NO_COMMON_VERSION = "An engine of this model and this API server have no protocol version in common. Replace the older one of them."


class Admission:
    """Raises ConfigurationError. `model` is canonical in all methods."""

    def __init__(self, config: ApiConfig) -> None:
        self._limits = AdmissionLimits(config.max_num_queued_reqs, config.max_num_queued_tokens)
        self._max_queue_seconds = config.max_queue_seconds
        self._weights = tenant_weights(config.tenant_weight)
        self._by_pace: dict[str, tuple[ModelHandle | None, AdmissionLimits]] = {}  # by model, with what they were made of
        self._full: dict[tuple[str, str], tuple[QueueDepth, Refused]] = {}  # by model and tenant: refusals since these numbers

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def limits(self, client: AsyncClient, model: str) -> AdmissionLimits:
        handle = client.directory.handles.get(model)
        known = self._by_pace.get(model)
        if known is None or known[0] is not handle:  # of an engine that died too: its requests, and new ones, wait for the next
            engines = [] if handle is None else handle.engines
            known = self._by_pace[model] = (handle, limits_by_pace(self._limits, engines, self._max_queue_seconds))
        return known[1]

    def check(self, client: AsyncClient, model: str, tenant: str) -> None:
        """Raises Refused where the queue is full by the last numbers, or refused this tenant since."""
        depth = client.directory.queues.get(model)
        if depth is None:
            return
        seen, refusal = self._full.get((model, tenant), (None, None))
        if seen is not depth or refusal is None:
            refusal = foresee(depth, self.limits(client, model), tenant, self.weight(tenant), self._weights)
        if refusal is not None:
            raise refusal

    def note_refusal(self, client: AsyncClient, model: str, tenant: str, refusal: Refused) -> None:
        """The script refused: until there are new numbers, a further request of the tenant would be too."""
        depth = client.directory.queues.get(model)
        if depth is not None and refusal.reason in QUEUE_LIMITS:
            self._full[model, tenant] = (depth, refusal)


def tenant_weights(entries: Sequence[str]) -> dict[str, float]:
    """`NAME=WEIGHT` each. Raises ConfigurationError."""
    weights: dict[str, float] = {}
    for entry in entries:
        name, _, value = entry.partition("=")
        try:
            weights[name] = float(value)
        except ValueError:
            weights[name] = 0.0
        if not name or not 0.001 <= weights[name] <= 1000:
            raise ConfigurationError(f"a tenant's weight must be NAME=WEIGHT with a weight from 0.001 to 1000, not {entry!r}")
    return weights


def engines_of(client: AsyncClient, model: str) -> list[EngineInfo]:
    """That live."""
    handle = client.directory.handles.get(model)
    return handle.engines if handle is not None and handle.is_live else []


def protocol_version(client: AsyncClient, model: str) -> int:
    """In which new requests are written. Raises ServiceUnavailable where this server and the engines have none in common."""
    handle = client.directory.handles.get(model)
    if handle is None:  # no engine any more: the queue refuses, or a new engine has come
        return PROTOCOL_VERSION
    if handle.protocol_version is None:
        raise ServiceUnavailable(NO_COMMON_VERSION, headers=RETRY_AFTER)
    return handle.protocol_version


def queue_headers(num_before: int, engines: Sequence[EngineInfo]) -> dict[str, str]:
    """Where a request stands that was just enqueued, and for how long, where that can be told."""
    wait = estimated_wait(num_before, engines)
    told = {} if wait is None else {WAIT_HEADER: f"{wait:.1f}"}
    return {POSITION_HEADER: str(num_before), **told}


def refusal_error(refusal: Refused, engines: Sequence[EngineInfo]) -> ApiError:
    if refusal.reason in QUEUE_LIMITS:
        headers = {"Retry-After": str(retry_after(refusal, engines))}
        if refusal.of_tenant:
            return TooManyRequests(f"Too many requests of this key: {refusal}. Try again later.", headers=headers)
        return ServiceUnavailable(f"The server is overloaded: {refusal}. Try again later.", headers=headers)
    match refusal.reason:
        case "no_engine":
            message = NO_ENGINE
        case "memory":
            message = "The request queue is out of memory. Try again later."
        case "aborted":
            return BadRequest("The request was aborted before it began.")
        case _:
            message = "The request could not be queued. Try again."
    return ServiceUnavailable(message, headers=RETRY_AFTER)
