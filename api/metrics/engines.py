"""Engines' numbers for Prometheus, out of the snapshot that each writes into its slot twice a second.

Gauges follow aborts and idleness, because snapshots do not wait for steps; an engine that died is gone from the scrape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.protocol import ITERATION_TOKENS_BOUNDS, EngineInfo, EngineStats

_LABELS = ("model_name", "engine")

# name, help, field of EngineStats
GAUGES = (
    ("num_requests_running", "Choices that run", "num_running"),
    ("num_requests_waiting", "Choices that wait in the engine", "num_waiting"),
    ("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1", "kv_cache_usage"),
)
COUNTERS = (
    ("prompt_tokens", "Prompt tokens computed or answered by the prefix cache", "prompt_tokens"),
    ("generation_tokens", "Tokens generated", "generation_tokens"),
    ("prompt_tokens_cached", "Prompt tokens answered by the prefix cache", "prefix_cache_hits"),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", "prefix_cache_queries"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache", "prefix_cache_hits"),
    ("num_preemptions", "Preemptions", "preemptions"),
)


class EngineCollector(Collector):
    """`engines`: the live ones, as they are at the scrape."""

    def __init__(self, prefix: str, engines: Sequence[EngineInfo]) -> None:
        self._prefix = prefix
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        for name, help, field in GAUGES:
            gauge = GaugeMetricFamily(f"{self._prefix}:{name}", help, labels=_LABELS)
            for engine in self._engines:
                gauge.add_metric(_values(engine), float(getattr(engine.stats, field)))
            yield gauge
        for name, help, field in COUNTERS:
            counter = CounterMetricFamily(f"{self._prefix}:{name}", help, labels=_LABELS)
            for engine in self._engines:
                counter.add_metric(_values(engine), float(getattr(engine.stats, field)))
            yield counter
        yield self._waiting_by_reason()
        yield self._prompt_tokens_by_source()
        yield self._iteration_tokens()
        yield self._cache_config()

    def _waiting_by_reason(self) -> Metric:
        name, help = (
            f"{self._prefix}:num_requests_waiting_by_reason",
            "Choices that wait: for capacity, or again after a preemption",
        )
        gauge = GaugeMetricFamily(name, help, labels=(*_LABELS, "reason"))
        for engine in self._engines:
            stats = engine.stats
            gauge.add_metric([*_values(engine), "capacity"], stats.num_waiting - stats.num_preempted_waiting)
            gauge.add_metric([*_values(engine), "preempted"], stats.num_preempted_waiting)
        return gauge

    def _prompt_tokens_by_source(self) -> Metric:
        counter = CounterMetricFamily(
            f"{self._prefix}:prompt_tokens_by_source", "Prompt tokens by origin", labels=(*_LABELS, "source")
        )
        for engine in self._engines:
            stats = engine.stats
            counter.add_metric([*_values(engine), "local_compute"], max(stats.prompt_tokens - stats.prefix_cache_hits, 0))
            counter.add_metric([*_values(engine), "local_cache_hit"], stats.prefix_cache_hits)
        return counter

    def _iteration_tokens(self) -> Metric:
        histogram = HistogramMetricFamily(f"{self._prefix}:iteration_tokens_total", "Tokens computed in a step", labels=_LABELS)
        for engine in self._engines:
            histogram.add_metric(_values(engine), _buckets(engine.stats), engine.stats.iteration_tokens_sum)
        return histogram

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


def _values(engine: EngineInfo) -> list[str]:
    return [engine.served_names[0] if engine.served_names else engine.model, engine.slot]


def _buckets(stats: EngineStats) -> list[tuple[str, float]]:
    bounds = [*(str(float(bound)) for bound in ITERATION_TOKENS_BOUNDS), "+Inf"]
    counts = stats.iteration_tokens_buckets or [0] * len(bounds)
    return list(zip(bounds, map(float, counts), strict=True))
