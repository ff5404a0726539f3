"""Numbers of engines and queues for Prometheus: what each engine writes into its slot twice a second, and what waits in Redis.

Gauges follow aborts and idleness, because snapshots do not wait for steps; an engine that died is gone from the scrape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.bus.queue_depth import QueueDepth
from engine.protocol import ITERATION_TOKENS_BOUNDS, STEP_SECONDS_BOUNDS, EngineInfo

_LABELS = ("model_name", "engine")
QUEUE = "queue"  # stands for the engine of what waits in Redis, where no engine has it yet

# name, help, field of EngineStats
GAUGES = (
    ("num_requests_running", "Choices that run", "num_running"),
    ("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1", "kv_cache_usage"),
    ("step_slowdown", "Time of recent steps over the time that the worker measured when the engine started", "step_slowdown"),
)
COUNTERS = (
    ("prompt_tokens", "Prompt tokens of requests that had a first token", "prompt_tokens"),
    ("generation_tokens", "Tokens generated", "generation_tokens"),
    ("prompt_tokens_cached", "Of those, tokens answered by the prefix cache", "prompt_tokens_cached"),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", "prefix_cache_queries"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache", "prefix_cache_hits"),
    ("num_preemptions", "Preemptions", "preemptions"),
)


class EngineCollector(Collector):
    """`engines`: the live ones. By canonical name of the model, as they are at the scrape: `queues`, what waits in Redis, and
    `alarms`, the engines that a watchdog ended, by kind."""

    def __init__(
        self,
        prefix: str,
        engines: Sequence[EngineInfo],
        queues: Mapping[str, QueueDepth],
        alarms: Mapping[str, Mapping[str, int]],
    ) -> None:
        self._prefix = prefix
        self._engines = engines
        names = {engine.model: _model_name(engine) for engine in engines}
        self._alarms = {names.get(model, model): counts for model, counts in alarms.items()}
        self._queues = {names.get(model, model): depth for model, depth in queues.items()}

    def collect(self) -> Iterator[Metric]:
        for name, help, field in GAUGES:
            gauge = self._gauge(name, help)
            for engine in self._engines:
                gauge.add_metric(_values(engine), float(getattr(engine.stats, field)))
            yield gauge
        for name, help, field in COUNTERS:
            counter = CounterMetricFamily(f"{self._prefix}:{name}", help, labels=_LABELS)
            for engine in self._engines:
                counter.add_metric(_values(engine), float(getattr(engine.stats, field)))
            yield counter
        yield self._waiting()
        yield self._waiting_by_reason()
        yield self._waiting_tokens()
        yield self._prompt_tokens_by_source()
        yield self._iteration_tokens()
        yield self._step_seconds()
        yield self._cache_config()
        yield self._ended_by_watchdogs()

    def _gauge(self, name: str, help: str, labels: Sequence[str] = _LABELS) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{self._prefix}:{name}", help, labels=labels)

    def _waiting(self) -> Metric:
        gauge = self._gauge("num_requests_waiting", f'Choices that wait, in an engine or in Redis (engine="{QUEUE}")')
        for engine in self._engines:
            gauge.add_metric(_values(engine), engine.stats.num_waiting)
        for model, depth in self._queues.items():
            gauge.add_metric([model, QUEUE], depth.waiting_choices)
        return gauge

    def _waiting_by_reason(self) -> Metric:
        help = "Choices that wait: for capacity, or again after a preemption"
        gauge = self._gauge("num_requests_waiting_by_reason", help, (*_LABELS, "reason"))
        for engine in self._engines:
            stats = engine.stats
            gauge.add_metric([*_values(engine), "capacity"], stats.num_waiting - stats.num_preempted_waiting)
            gauge.add_metric([*_values(engine), "preempted"], stats.num_preempted_waiting)
        for model, depth in self._queues.items():
            gauge.add_metric([model, QUEUE, "capacity"], depth.waiting_choices)
        return gauge

    def _waiting_tokens(self) -> Metric:
        gauge = self._gauge("num_prompt_tokens_queued", "Prompt tokens of requests that wait in Redis", ("model_name",))
        for model, depth in self._queues.items():
            gauge.add_metric([model], depth.waiting_tokens)
        return gauge

    def _prompt_tokens_by_source(self) -> Metric:
        counter = CounterMetricFamily(
            f"{self._prefix}:prompt_tokens_by_source", "Prompt tokens by origin", labels=(*_LABELS, "source")
        )
        for engine in self._engines:
            stats = engine.stats
            counter.add_metric([*_values(engine), "local_compute"], stats.prompt_tokens - stats.prompt_tokens_cached)
            counter.add_metric([*_values(engine), "local_cache_hit"], stats.prompt_tokens_cached)
        return counter

    def _iteration_tokens(self) -> Metric:
        help = "Prompt tokens computed and tokens generated in a step"
        histogram = HistogramMetricFamily(f"{self._prefix}:iteration_tokens_total", help, labels=_LABELS)
        for engine in self._engines:
            buckets = _buckets(ITERATION_TOKENS_BOUNDS, engine.stats.iteration_tokens_buckets)
            histogram.add_metric(_values(engine), buckets, engine.stats.iteration_tokens_sum)
        return histogram

    def _step_seconds(self) -> Metric:
        help = "Time of a step in the workers: the tokens of all running requests come at this pace"
        histogram = HistogramMetricFamily(f"{self._prefix}:step_time_seconds", help, labels=_LABELS)
        for engine in self._engines:
            buckets = _buckets(STEP_SECONDS_BOUNDS, engine.stats.step_seconds_buckets)
            histogram.add_metric(_values(engine), buckets, engine.stats.step_seconds_sum)
        return histogram

    def _ended_by_watchdogs(self) -> Metric:
        help = "Engines that a watchdog ended, by kind of alarm"
        counter = CounterMetricFamily(f"{self._prefix}:engine_alarms", help, labels=("model_name", "kind"))
        for model, counts in self._alarms.items():
            for kind, count in counts.items():
                counter.add_metric([model, kind], count)
        return counter

    def _cache_config(self) -> Metric:
        info = InfoMetricFamily(f"{self._prefix}:cache_config", "KV cache of an engine", labels=_LABELS)
        for engine in self._engines:
            tokens = engine.num_blocks * engine.block_size
            facts = {
                "block_size": str(engine.block_size),
                "num_gpu_blocks": str(engine.num_blocks),
                "kv_cache_size_tokens": str(tokens),
                "kv_cache_max_concurrency": f"{tokens / engine.max_model_len:.2f}",
            }
            info.add_metric(_values(engine), facts)
        return info


def _model_name(engine: EngineInfo) -> str:
    return engine.served_names[0] if engine.served_names else engine.model


def _values(engine: EngineInfo) -> list[str]:
    return [_model_name(engine), engine.slot]


def _buckets(bounds: Sequence[float], counts: list[int]) -> list[tuple[str, float]]:
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, map(float, counts or [0] * len(names)), strict=True))
