"""Prometheus metrics of an API server, under vLLM's names behind a prefix of one's choice: same meanings, same buckets.

Requests are measured here, where they begin and end for the client; engines' own numbers come out of their snapshots
(`api.metrics.engines`). With PROMETHEUS_MULTIPROC_DIR set, several API processes on one socket are summed at the scrape.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from api.metrics.buffered import Counted, Tallied
from api.metrics.engines import EngineCollector
from engine.bus.queue_depth import QueueDepth
from engine.protocol import EngineInfo, FinishReason, RequestTimes

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKEN_BUCKETS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
N_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS = (0, 1, 2, 5, 10)
BODY_BUCKETS = (100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000)
HTTP_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)

_LABELS = ("model_name", "engine")


def shared() -> bool:
    """Any of several processes may be asked for the numbers of all."""
    return bool(os.environ.get("PROMETHEUS_MULTIPROC_DIR"))


@dataclass(frozen=True)
class EndedPrompt:
    """One prompt of a request, with its choices, when the last of them has ended."""

    num_tokens: int
    num_cached: int  # of those, tokens that the prefix cache answered
    n: int
    max_tokens: int
    output_lens: list[int]  # tokens by choice
    latency: float  # seconds since the HTTP request's arrival
    times: RequestTimes | None  # as the engine tells them; None if the API server did not wait for its end

    @property
    def answered(self) -> bool:
        """It had a first token: from then on its prompt counts."""
        return any(self.output_lens) or (self.times is not None and self.times.first_token > 0)


class Metrics:
    """`prefix`: first word of the metrics' names, "headrace" or "vllm"."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.engines: Callable[[], list[EngineInfo]] = list
        self.queues: Callable[[], Mapping[str, QueueDepth]] = dict
        self.alarms: Callable[[], Mapping[str, Mapping[str, int]]] = dict
        self._registry = CollectorRegistry()
        self._tallied: list[Tallied] = []
        self._make_request_metrics()
        self._make_http_metrics()

    def _tally(self, name: str, help: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> Tallied:
        tallied = Tallied(Histogram(name, help, labels, buckets=buckets, registry=self._registry), buckets)
        self._tallied.append(tallied)
        return tallied

    def _request_tally(self, name: str, help: str, buckets: tuple[float, ...]) -> Tallied:
        return self._tally(f"{self.prefix}:{name}", help, _LABELS, buckets)

    def _make_request_metrics(self) -> None:
        make = self._request_tally
        self.ttft = make("time_to_first_token_seconds", "From arrival at the API server to the first token", TTFT_BUCKETS)
        self.itl = make("inter_token_latency_seconds", "Between two outputs of a request", ITL_BUCKETS)
        self.tpot = make("request_time_per_output_token_seconds", "Mean time a token after the first", ITL_BUCKETS)
        self.e2e = make("e2e_request_latency_seconds", "From arrival at the API server to the end", LATENCY_BUCKETS)
        self.queue = make("request_queue_time_seconds", "From the queue in Redis to the first step", LATENCY_BUCKETS)
        self.inference = make("request_inference_time_seconds", "From the first step to the last token", LATENCY_BUCKETS)
        self.prefill = make("request_prefill_time_seconds", "From the first step to the first token", LATENCY_BUCKETS)
        self.decode = make("request_decode_time_seconds", "From the first to the last token", LATENCY_BUCKETS)
        self.prompt_len = make("request_prompt_tokens", "Prompt tokens of a request that had a first token", TOKEN_BUCKETS)
        self.output_len = make("request_generation_tokens", "Output tokens of a request", TOKEN_BUCKETS)
        self.max_output_len = make(
            "request_max_num_generation_tokens", "Output tokens of a request's longest choice", TOKEN_BUCKETS
        )
        self.n = make("request_params_n", "Choices asked for", N_BUCKETS)
        self.max_tokens = make("request_params_max_tokens", "Most output tokens asked for", TOKEN_BUCKETS)
        self.preemptions = make("request_num_preemptions", "Preemptions of a request", PREEMPTION_BUCKETS)
        self.computed = make(
            "request_prefill_kv_computed_tokens", "Prompt tokens that the prefix cache did not answer", TOKEN_BUCKETS
        )
        self.success = Counted(
            Counter(
                f"{self.prefix}:request_success", "Choices ended, by how", (*_LABELS, "finished_reason"), registry=self._registry
            )
        )
        self.rejections = Counter(
            f"{self.prefix}:admission_rejections",
            "Requests refused at admission",
            ("model_name", "reason"),
            registry=self._registry,
        )

        self.dropped_clients = Counter(
            f"{self.prefix}:slow_clients_dropped",
            "Connections cut because the client read too slowly",
            ("reason",),
            registry=self._registry,
        )

    def _make_http_metrics(self) -> None:
        route = ("handler", "method")
        registry = self._registry
        self.http_requests = Counted(Counter("http_requests", "HTTP requests", (*route, "status"), registry=registry))
        self.http_duration = self._tally("http_request_duration_seconds", "Seconds to the end of the response", route, HTTP_BUCKETS)
        self.http_request_size = self._tally("http_request_size_bytes", "Request bodies", ("handler",), BODY_BUCKETS)
        self.http_response_size = self._tally("http_response_size_bytes", "Response bodies", ("handler",), BODY_BUCKETS)
        self.in_flight = Gauge(
            f"{self.prefix}:api_requests_in_flight", "HTTP requests being answered", registry=registry, multiprocess_mode="livesum"
        )

    # What the API server tells

    def refused(self, model: str, reason: str) -> None:
        self.rejections.labels(model, reason).inc()

    def client_dropped(self, reason: str) -> None:
        self.dropped_clients.labels(reason).inc()

    def choice_ended(self, model: str, engine: str, reason: FinishReason) -> None:
        self.success.labels(model, engine, str(reason)).inc()

    def prompt_ended(self, labels: tuple[str, str], ended: EndedPrompt) -> None:
        """One prompt of a request is over."""
        self.n.labels(*labels).observe(ended.n)
        self.max_tokens.labels(*labels).observe(ended.max_tokens)
        self.e2e.labels(*labels).observe(ended.latency)
        self.output_len.labels(*labels).observe(sum(ended.output_lens))
        self.max_output_len.labels(*labels).observe(max(ended.output_lens))
        if ended.answered:
            self.prompt_len.labels(*labels).observe(ended.num_tokens)
        if ended.times is not None:
            self._engines_word(labels, ended, ended.times)

    def _engines_word(self, labels: tuple[str, str], ended: EndedPrompt, times: RequestTimes) -> None:
        self.preemptions.labels(*labels).observe(times.num_preemptions)
        if times.scheduled:
            self.queue.labels(*labels).observe(max(times.scheduled - times.enqueued, 0.0))
        if times.first_token:
            self.computed.labels(*labels).observe(ended.num_tokens - ended.num_cached)
            self.prefill.labels(*labels).observe(max(times.first_token - times.scheduled, 0.0))
        if times.first_token and times.last_token:
            decode = max(times.last_token - times.first_token, 0.0)
            self.decode.labels(*labels).observe(decode)
            self.inference.labels(*labels).observe(max(times.last_token - times.scheduled, 0.0))
            if (longest := max(ended.output_lens)) > 1:
                self.tpot.labels(*labels).observe(decode / (longest - 1))

    def settle(self) -> None:
        """Hand collected observations over. On the event loop: before `render`, and from time to time where other processes answer
        with this one's numbers."""
        for tallied in self._tallied:
            tallied.tell()

    def render(self) -> bytes:
        """Everything, in Prometheus' text format 0.0.4."""
        registry = self._registry
        if shared():
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        engines = CollectorRegistry()
        engines.register(EngineCollector(self.prefix, self.engines(), self.queues(), self.alarms()))
        return generate_latest(registry) + generate_latest(engines)
