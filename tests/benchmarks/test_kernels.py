"""Timing of the CPU's kernels: every case runs, and its counted work is that of its shapes."""

import torch

from benchmarks.device_timing import Roofline, Timer, measure_roofline
from benchmarks.kernel_cases import TINY, Sizes, cpu_products, timings
from benchmarks.kernels import HEADER, time_cases
from benchmarks.text_table import text_table

CPU = torch.device("cpu")


def test_every_case_is_timed_beside_its_bound():
    timer = Timer(CPU, budget=0.0)
    roofline = measure_roofline(timer, 1 << 20, 64, [torch.float32])
    cases = list(timings(TINY, torch.float32, torch.float16, [1, 3], context=40, prompt=20, float8=False))
    cases += cpu_products(TINY, [1, 3])
    found = list(time_cases(cases, timer, roofline))
    assert len(found) == len(cases)
    assert all(timed.seconds > 0 and timed.bound > 0 for timed in found)
    lines = text_table(HEADER, [timed.row() for timed in found]).splitlines()
    assert len(lines) == len(cases) + 2 and lines[0].startswith("operation")


def test_bytes_and_flops_are_counted():
    sizes = Sizes(hidden=64, intermediate=128, num_heads=4, num_kv_heads=2, head_dim=16, vocab=1000, group=32)
    cases = list(timings(sizes, torch.float32, torch.float16, [2], context=40, prompt=20, float8=False))

    def work(operation, name):
        (trial,) = [case.make(CPU) for case in cases if (case.operation, case.name) == (operation, name)]
        return trial.num_bytes, trial.flops

    # keys and values of 2 heads in 2 bytes each, queries and answers of 4 heads in 4
    assert work("attention", "2 decodes at 40") == (2 * 40 * 2 * 2 * 16 * 2 + 2 * 2 * 4 * 16 * 4, 2 * 40 * 4 * 4 * 16)
    assert work("attention", "a prompt of 20") == (20 * 2 * 2 * 16 * 2 + 2 * 20 * 4 * 16 * 4, 4 * (20 * 21 // 2) * 4 * 16)
    assert work("add_rms_norm", "2 tokens") == (4 * 2 * 64 * 4, 0)
    assert work("w4a16", "2 rows") == (2 * 64 * 4 + 128 * 32 + 2 * 128 * 4 + 2 * 128 * 4, 2 * 2 * 64 * 128)
    assert work("gumbel", "2 x 1000") == (2 * 1000 * 4, 0)


def test_the_bound_is_the_slower_of_bytes_and_products():
    roofline = Roofline(bandwidth=100.0, rates={torch.float32: 10.0})
    assert roofline.seconds(200, 10, torch.float32) == 2
    assert roofline.seconds(200, 50, torch.float32) == 5
    assert roofline.seconds(200, 50, torch.int8) == 2  # not measured


def test_changed_arguments_are_restored_before_each_run():
    cases = timings(TINY, torch.float32, torch.float32, [3], context=40, prompt=20, float8=False)
    trial = next(case for case in cases if case.operation == "min_p").make(CPU)
    logits = trial.arguments[0].clone()
    restore = trial.restore()
    trial.run()
    assert not torch.equal(trial.arguments[0], logits)
    restore()
    assert torch.equal(trial.arguments[0], logits)
