"""The benchmark of what headrace adds to a step, small: its parts and its engine process run and tell plausible figures."""

from __future__ import annotations

import contextlib
import os

import pytest

from benchmarks import overhead
from benchmarks.overhead import OTHERS, PARTS, embedded_valkey, measure_parts, measure_process


def test_parts_and_processes_are_measured() -> None:
    with embedded_valkey() as url:
        parts = measure_parts(url, size=4, num_steps=20)
        assert parts.keys() == {*PARTS, *OTHERS, "sum", "calm"}
        assert all(value > 0 for value in parts.values())
        assert 0 < parts["calm"] <= parts["sum"] < sum(parts.values())
        steps_a_second, engine, main_thread, worker, valkey = map(float, measure_process(url, 4, 50, "mp"))
    assert steps_a_second > 0 and valkey > 0
    tick = 1000 / os.sysconf("SC_CLK_TCK") / 50  # ms a step: the system counts a process's time in ticks, and each count by itself
    assert engine + 1.01 * tick >= main_thread >= 0 and worker >= 0


def test_a_worker_in_the_engine_s_process_has_no_time_of_its_own() -> None:
    with embedded_valkey() as url:
        assert measure_process(url, 4, 50, "uni")[3] == "0.000"


def test_every_column_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "embedded_valkey", lambda: contextlib.nullcontext("redis://nowhere"))
    monkeypatch.setattr(overhead, "measure_parts", lambda *_: dict.fromkeys((*PARTS, *OTHERS, "sum", "calm"), 1.0))
    monkeypatch.setattr(overhead, "measure_process", lambda *_: ["1"] * 5)
    for table in overhead.measure_overhead([4], 20):
        names = [column.header for column in table.columns]
        assert len(set(names)) == len(names)
