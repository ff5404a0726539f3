"""How many engines `serve` starts, with how many threads, and why."""

from __future__ import annotations

from typing import Any

import pytest

from ops.errors import CommandError
from ops.progress import Slowest
from ops.replicas import Replicas
from ops.settings import resolve


def settle(monkeypatch: pytest.MonkeyPatch, cores: int, **values: Any) -> tuple[int, int, Replicas]:
    """(engines, threads of each, and what settled them) where these values are given; the device is a CPU by default."""
    monkeypatch.setattr("ops.replicas.available_cores", lambda: cores)
    resolved = resolve({"model": "demo", "device": "cpu", **values}, {})
    replicas = Replicas(resolved)
    return resolved.config.parallel.data_parallel_size, resolved.config.parallel.num_threads, replicas


@pytest.mark.parametrize(
    ("cores", "engines", "threads"), [(1, 1, 1), (2, 2, 2), (3, 1, 2), (4, 2, 2), (6, 3, 2), (8, 4, 2), (16, 4, 4), (64, 4, 16)]
)
def test_the_cores_of_a_cpu_decide(monkeypatch: pytest.MonkeyPatch, cores: int, engines: int, threads: int) -> None:
    *settled, replicas = settle(monkeypatch, cores)
    assert settled == [engines, threads]
    assert replicas.reasons["data_parallel_size"].startswith(f"{cores} core")
    assert replicas.reasons["num_threads"].startswith(f"{engines} engine")


@pytest.mark.parametrize(
    ("values", "settled"),
    [
        ({"data_parallel_size": 1}, (1, 7)),
        ({"data_parallel_size": 2}, (2, 4)),
        ({"num_threads": 3}, (4, 3)),
        ({"tensor_parallel_size": 2}, (1, 3)),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, (2, 2)),
        ({"device": "cuda"}, (1, 0)),
        ({"load_format": "null"}, (1, 0)),
    ],
)
def test_configured_numbers_stand_and_the_others_follow(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], settled: tuple[int, int]
) -> None:
    *found, replicas = settle(monkeypatch, 8, **values)
    assert tuple(found) == settled
    assert replicas.are_chosen == ("data_parallel_size" not in values)
    assert replicas.reasons.keys().isdisjoint(values)


def test_one_engine_after_all_has_its_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.replicas.available_cores", lambda: 8)
    resolved = resolve({"model": "demo", "device": "cpu"}, {})
    replicas = Replicas(resolved)
    replicas.fall_back("4 could not start")
    assert (resolved.config.parallel.data_parallel_size, resolved.config.parallel.num_threads) == (1, 7)
    assert replicas.reasons["data_parallel_size"] == "4 could not start"


def test_engines_on_gpus_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"device": "cuda", "tensor_parallel_size": 2, "data_parallel_size": 2}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    *_, replicas = settle(monkeypatch, 8, **values)
    gpus = {"CUDA_VISIBLE_DEVICES": "2,3", "HEADRACE_DEVICE": "cuda"}
    assert replicas.environment(1) == {"HEADRACE_DATA_PARALLEL_RANK": "1", **gpus}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert replicas.environment(0)["CUDA_VISIBLE_DEVICES"] == "4,5"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    with pytest.raises(CommandError, match=r"^4 GPUs are needed, 2 for each engine, and CUDA_VISIBLE_DEVICES names 3$"):
        replicas.environment(0)


def test_engines_of_several_know_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, several = settle(monkeypatch, 8, data_parallel_size=2)
    assert [several.environment(number) for number in (0, 1)] == [{"HEADRACE_DATA_PARALLEL_RANK": str(rank)} for rank in (0, 1)]
    for device in ("cpu", "cuda"):
        *_, alone = settle(monkeypatch, 1, device=device)
        assert alone.environment(0) == {}


def test_progress_is_the_slowest_ones() -> None:
    slowest = Slowest(["engine-0", "engine-1"])
    assert slowest.report("engine-0", "load", 0.5) == ("start", 0.0)
    assert slowest.report("engine-1", "load", 0.2) == ("load", 0.2)
    assert slowest.report("engine-1", "profile", None) == ("load", 0.5)
    assert slowest.report("engine-0", "ready", None) == ("profile", 0.0)
    assert slowest.report("engine-1", "failed", None) == ("profile", 0.0)
    assert slowest.report("engine-1", "ready", None) is None
