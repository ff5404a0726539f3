"""Metrics: vLLM's names and buckets, right numbers, engines out of their snapshots, several processes as one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.metrics.engines import EngineCollector
from api.metrics.metrics import TTFT_BUCKETS, EndedPrompt, Metrics
from engine.bus.queue_depth import QueueDepth
from engine.protocol import ITERATION_TOKENS_BOUNDS, STEP_SECONDS_BOUNDS, EngineInfo, EngineStats, FinishReason, RequestTimes
from tests.api.live_server import LiveServer

REQUEST_HISTOGRAMS = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_num_preemptions",
    "request_prefill_kv_computed_tokens",
]
ENGINE_METRICS = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "iteration_tokens_total": "histogram",
    "step_time_seconds": "histogram",
    "step_slowdown": "gauge",
}


def engine(**stats: object) -> EngineInfo:
    info = EngineInfo(
        slot="3",
        incarnation=1,
        model="m",
        served_names=["served"],
        fingerprint="f",
        protocol_versions=[2],
        tokenizer="t",
        max_model_len=100,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=16,
        num_blocks=50,
        vocab_size=1000,
        max_logprobs=20,
        dtype="float32",
        device="cpu",
        tensor_parallel_size=1,
        pid=1,
        host="h",
        started=0.0,
    )
    info.stats = EngineStats(**stats)  # type: ignore[arg-type]
    return info


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def waiting(found: dict[tuple[str, frozenset[tuple[str, str]]], float], model: str) -> float:
    """As a scaler sums it up: over all engines, and what waits in Redis for any of them."""
    return sum(
        value for (name, labels), value in found.items() if name == "vllm:num_requests_waiting" and ("model_name", model) in labels
    )


def test_an_engines_snapshot_becomes_metrics() -> None:
    buckets = list(range(1, len(ITERATION_TOKENS_BOUNDS) + 2))
    info = engine(
        num_running=4,
        num_waiting=3,
        num_preempted_waiting=1,
        kv_cache_usage=0.25,
        prompt_tokens=100,
        prompt_tokens_cached=32,
        prefix_cache_hits=48,
        iteration_tokens_buckets=buckets,
        iteration_tokens_sum=77,
        step_seconds_buckets=list(range(len(STEP_SECONDS_BOUNDS) + 1)),
        step_seconds_sum=1.5,
        step_slowdown=1.25,
    )
    metrics = Metrics("vllm")
    metrics.engines = lambda: [info]
    metrics.queues = lambda: {"m": QueueDepth(80, 84, 4200, 90, 94), "without an engine": QueueDepth(1, 2, 3, 1, 2)}
    found = samples(metrics.render().decode())
    labels = frozenset({("model_name", "served"), ("engine", "3")})
    assert found["vllm:num_requests_running", labels] == 4
    assert found["vllm:kv_cache_usage_perc", labels] == 0.25
    assert found["vllm:prompt_tokens_total", labels] == 100
    assert found["vllm:prompt_tokens_by_source_total", labels | {("source", "local_compute")}] == 68
    assert found["vllm:prompt_tokens_cached_total", labels] == 32
    assert found["vllm:num_requests_waiting_by_reason", labels | {("reason", "preempted")}] == 1
    assert waiting(found, "served") == 3 + 84 and waiting(found, "without an engine") == 2
    assert found["vllm:num_prompt_tokens_queued", frozenset({("model_name", "served")})] == 4200
    assert found["vllm:iteration_tokens_total_count", labels] == buckets[-1]
    assert found["vllm:iteration_tokens_total_sum", labels] == 77
    assert found["vllm:step_time_seconds_bucket", labels | {("le", "0.5")}] == 10
    assert found["vllm:step_time_seconds_sum", labels] == 1.5
    assert found["vllm:step_slowdown", labels] == 1.25
    assert found["vllm:iteration_tokens_total_bucket", labels | {("le", "8.0")}] == 2
    assert found["vllm:cache_config_info", labels | {
        ("block_size", "16"), ("num_gpu_blocks", "50"), ("kv_cache_size_tokens", "800"), ("kv_cache_max_concurrency", "8.00")
    }] == 1  # fmt: skip


def test_an_engine_that_has_not_stepped_has_metrics() -> None:
    assert list(EngineCollector("x", [engine()], {}, {}).collect())


def test_buckets_are_vllms() -> None:
    metrics = Metrics("headrace")
    metrics.ttft.labels("m", "0").observe(0.03)
    metrics.settle()
    bounds = re.findall(r'time_to_first_token_seconds_bucket\{[^}]*le="([^"]+)"', metrics.render().decode())
    assert [float(bound) for bound in bounds] == [*map(float, TTFT_BUCKETS), float("inf")]


def test_durations_come_from_the_requests_marks() -> None:
    metrics = Metrics("headrace")
    times = RequestTimes(enqueued=9.0, received=10.0, scheduled=12.0, first_token=15.0, last_token=25.0, num_preemptions=2)
    metrics.prompt_ended(("m", "0"), EndedPrompt(40, 16, n=2, max_tokens=20, output_lens=[11, 3], latency=17.0, times=times))
    metrics.choice_ended("m", "0", FinishReason.ABORT)
    metrics.settle()
    found = samples(metrics.render().decode())
    labels = frozenset({("model_name", "m"), ("engine", "0")})
    for name, expected in {"queue": 3.0, "prefill": 3.0, "decode": 10.0, "inference": 13.0}.items():
        assert found[f"headrace:request_{name}_time_seconds_sum", labels] == expected
    assert found["headrace:request_time_per_output_token_seconds_sum", labels] == 1.0
    assert found["headrace:request_prefill_kv_computed_tokens_sum", labels] == 24
    assert found["headrace:request_num_preemptions_sum", labels] == 2
    assert found["headrace:request_prompt_tokens_sum", labels] == 40
    assert found["headrace:request_generation_tokens_sum", labels] == 14
    assert found["headrace:e2e_request_latency_seconds_sum", labels] == 17.0
    assert found["headrace:request_success_total", labels | {("finished_reason", "abort")}] == 1


def test_a_prompt_without_a_first_token_does_not_count() -> None:
    metrics = Metrics("headrace")
    for times in (None, RequestTimes(), RequestTimes(enqueued=1.0, received=2.0, scheduled=3.0, finished=4.0)):
        metrics.prompt_ended(("m", "0"), EndedPrompt(40, 0, n=1, max_tokens=20, output_lens=[0], latency=3.0, times=times))
    scored = RequestTimes(enqueued=1.0, received=2.0, scheduled=3.0, first_token=4.0, last_token=4.0, finished=4.0)
    metrics.prompt_ended(("m", "0"), EndedPrompt(7, 0, n=1, max_tokens=0, output_lens=[0], latency=3.0, times=scored))
    metrics.settle()
    found = samples(metrics.render().decode())
    labels = frozenset({("model_name", "m"), ("engine", "0")})
    for name in ("request_prompt_tokens", "request_prefill_kv_computed_tokens"):
        assert found[f"headrace:{name}_sum", labels] == 7
    assert found["headrace:e2e_request_latency_seconds_count", labels] == 4


def test_all_metrics_exist_after_a_request(null_server: LiveServer) -> None:
    assert null_server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 5}).status_code == 200
    assert null_server.http.get("/no/such/path").status_code == 404
    answer = null_server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    kinds = {family.name: family.type for family in text_string_to_metric_families(answer.text)}
    for name in REQUEST_HISTOGRAMS:
        assert kinds[f"headrace:{name}"] == "histogram"
    for name, kind in ENGINE_METRICS.items():
        assert kinds[f"headrace:{name}"] == kind
    found = samples(answer.text)
    answered = frozenset({("handler", "/v1/completions"), ("method", "POST"), ("status", "2xx")})
    assert found["http_requests_total", answered] >= 1
    assert found["http_requests_total", frozenset({("handler", "none"), ("method", "none"), ("status", "4xx")})] >= 1
    assert not any("/metrics" in str(labels) for _, labels in found)


MULTIPROCESS = """
import os, sys
from api.metrics.metrics import Metrics
metrics = Metrics("headrace")
metrics.ttft.labels("m", "0").observe(0.5)
metrics.settle()
if sys.argv[1] == "scrape":
    sys.stdout.write(metrics.render().decode())
"""


def test_several_processes_are_summed(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-c", MULTIPROCESS]
    subprocess.run([*command, "count"], env=environment, check=True)
    done = subprocess.run([*command, "scrape"], env=environment, check=True, capture_output=True, text=True)
    labels = frozenset({("model_name", "m"), ("engine", "0")})
    assert samples(done.stdout)["headrace:time_to_first_token_seconds_count", labels] == 2


@pytest.mark.parametrize("prefix", ["headrace", "vllm"])
def test_the_prefix_is_free(prefix: str) -> None:
    text = Metrics(prefix).render().decode()
    assert f"{prefix}:time_to_first_token_seconds" in text
