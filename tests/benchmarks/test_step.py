"""The benchmark of a model's steps, small: its bound is that of the threads together."""

import pytest

from benchmarks import step
from tests.gpu.tiny_models import VARIANTS, save_model


@pytest.mark.parametrize(("threads", "seconds"), [(1, 1.0), (2, 1 / 1.5)])
def test_the_bound_of_two_threads_reads_memory_at_their_joint_speed(tmp_path, monkeypatch, threads, seconds):
    """One thread reads all weights in a second; two together read 1.5 times as fast."""
    monkeypatch.setitem(VARIANTS, "words", ("Llama", {"vocab_size": 10_000}))
    monkeypatch.setattr("gpu.runner.core_lock.FIRST_BYTE", 1 << 40)  # cores that no engine of this machine uses
    save_model("words", tmp_path)
    model = step.Model(str(tmp_path), "float32", threads, 1)
    num_bytes = model.count(step.decodes(1)).weight_bytes
    monkeypatch.setattr(step, "Model", lambda *_: model)
    monkeypatch.setattr(step, "available_cores", lambda: 2)
    monkeypatch.setattr(step, "measure_bandwidth", lambda num_threads=1: num_bytes * (1 if num_threads == 1 else 1.5))
    monkeypatch.setattr(step, "measure_rate", lambda runner, num_rows: 1e15)
    table = step.measure_model(str(tmp_path), ["float32"], [threads], [1], 1)
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["step"] == ["decode 1", "prompt 128"]
    assert columns["bound ms"] == [f"{1e3 * seconds:.1f}"] * 2
