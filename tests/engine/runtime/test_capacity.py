"""Defaults by device and the fit of the KV cache: worked numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config import SchedulerConfig
from engine.runtime.capacity import GIB, DoesNotFit, calibrated_budget, fit_kv_cache, step_cost, step_limits
from gpu.config import CacheConfig, Capacity, ModelConfig


def capacity(available: int, seconds_per_token: float = 0.0, seconds_per_context: float = 0.0) -> Capacity:
    return Capacity(
        max_model_len=2048,
        vocab_size=100,
        dtype="float32",
        device="cpu",
        weight_bytes=0,
        block_bytes=1000,
        available_kv_bytes=available,
        fingerprint="f",
        profiled_seconds_per_token=seconds_per_token,
        profiled_seconds_per_context=seconds_per_context,
    )


@pytest.mark.parametrize(
    ("device", "memory", "name", "expected"),
    [
        ("cpu", 0, "", (512, 128)),
        ("cuda", 180 * GIB, "NVIDIA B200", (16384, 1024)),
        ("cuda", 141 * GIB, "NVIDIA H200", (8192, 1024)),
        ("cuda", 80 * GIB, "NVIDIA A100-SXM4-80GB", (2048, 256)),
        ("cuda", 119 * GIB, "NVIDIA GB10", (2048, 256)),
        ("cuda", 24 * GIB, "NVIDIA L4", (2048, 256)),
    ],
)
def test_step_limits_by_device(device: str, memory: int, name: str, expected: tuple[int, int]) -> None:
    assert step_limits(SchedulerConfig(), device, memory, name) == expected


def test_configured_step_limits_stand() -> None:
    config = SchedulerConfig(max_num_batched_tokens=96, max_num_seqs=3)
    assert step_limits(config, "cuda", 180 * GIB) == (96, 3)
    assert calibrated_budget(96, step_cost(config, capacity(0, seconds_per_token=1.0))) == 96


@pytest.mark.parametrize(
    ("seconds_per_token", "seconds_per_context", "budget"),
    [(0.0005, 0.0, 512), (0.002, 0.0, 224), (0.002, 1e-5, 160), (0.1, 0.0, 128), (0.0, 0.0, 512)],
)
def test_a_cpu_step_stays_under_half_a_second(seconds_per_token: float, seconds_per_context: float, budget: int) -> None:
    cost = step_cost(SchedulerConfig(), capacity(0, seconds_per_token, seconds_per_context))
    assert calibrated_budget(512, cost) == budget


def test_the_context_is_the_models_own_length_if_it_fits() -> None:
    assert fit_kv_cache(ModelConfig(), CacheConfig(), capacity(200_000)) == (2048, 200)


def test_max_model_len_minus_one_takes_the_length_that_fits() -> None:
    assert fit_kv_cache(ModelConfig(max_model_len=-1), CacheConfig(), capacity(11_000)) == (160, 11)
    assert fit_kv_cache(ModelConfig(max_model_len=-1), CacheConfig(), capacity(900_000)) == (2048, 900)


def test_one_block_less_than_the_context_needs_is_refused() -> None:
    assert fit_kv_cache(ModelConfig(max_model_len=160), CacheConfig(), capacity(11_000)) == (160, 11)
    with pytest.raises(DoesNotFit) as refusal:
        fit_kv_cache(ModelConfig(max_model_len=161), CacheConfig(), capacity(11_000))
    assert "longest feasible length is 160 tokens" in str(refusal.value)


def test_a_refusal_names_needed_available_and_feasible() -> None:
    with pytest.raises(DoesNotFit) as refusal:
        fit_kv_cache(ModelConfig(), CacheConfig(), replace(capacity(64 << 20), block_bytes=1 << 20))
    assert str(refusal.value).startswith(
        "The KV cache of one request of 2048 tokens needs 129.0 MiB, but 64.0 MiB are available for it. "
        "The longest feasible length is 1008 tokens: use --max-model-len 1008"
    )


def test_less_than_one_block_is_refused() -> None:
    with pytest.raises(DoesNotFit):
        fit_kv_cache(ModelConfig(max_model_len=-1), CacheConfig(), capacity(1_500))


def test_a_context_longer_than_the_models_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="made for: 2048 tokens"):
        fit_kv_cache(ModelConfig(max_model_len=4096), CacheConfig(), capacity(10_000_000))


def test_a_configured_number_of_blocks_replaces_the_memory() -> None:
    assert fit_kv_cache(ModelConfig(max_model_len=-1), CacheConfig(num_gpu_blocks_override=5), capacity(0)) == (64, 5)
