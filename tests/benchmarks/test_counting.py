"""Bounds by hand: a model of few numbers, on a machine that does so many products and reads so many bytes a second."""

import pytest

from benchmarks.counting import Load, Machine, Work, count_step, count_weights, serve_at_best
from gpu.checkpoint.architecture import ArchitectureConfig

CONFIG = ArchitectureConfig(
    "llama", vocab_size=100, hidden_size=8, intermediate_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=2,
    rms_norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip
LAYERS, HEAD = 2 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16), 800
BYTES = 1000.0
STREAM = Load(concurrency=1, requests=1, prompt=10, output=3)


def test_weights_are_those_of_products():
    assert count_weights(CONFIG) == (LAYERS, HEAD)


def test_a_step_counts_products_attention_and_the_heads_of_those_that_sample():
    attention = 4 * 2 * 8 * 50  # two products of 8 numbers with each of 50 tokens, in two layers
    assert count_step(CONFIG, 3, 2, 50, BYTES) == Work(3 * (2 * LAYERS + attention) + 2 * 2 * HEAD, BYTES)


def test_the_slower_of_products_and_bytes_bounds():
    assert Work(100, 10).bound(50, 1) == 10
    assert Work(100, 10).bound(5, 1) == 20


def test_rates_lie_between_measured_rows_and_cores_share_the_memory():
    machine = Machine({1: 10.0, 3: 30.0}, bandwidth=100.0, shared_bandwidth=150.0, cores=2.0)
    assert machine.seconds(Work(400, 0), rows=2) == pytest.approx(10)
    assert machine.seconds(Work(400, 0), rows=128) == pytest.approx(400 / 60)
    assert machine.seconds(Work(0, 300), rows=1) == pytest.approx(2)


def test_a_stream_is_a_prompt_and_its_decodes():
    machine = Machine({1: 1e3, 10: 1e4}, bandwidth=1e12, shared_bandwidth=1e12)
    best = serve_at_best(STREAM, CONFIG, BYTES, machine)
    prompt = count_step(CONFIG, 10, 1, 5, BYTES).flops / 1e4
    decode = count_step(CONFIG, 1, 1, 11.5, BYTES).flops / 1e3
    assert best.ttft == pytest.approx(1e3 * prompt)
    assert best.tpot == pytest.approx(1e3 * decode)
    assert best.output == pytest.approx(3 / (prompt + 2 * decode))
    assert best.total == pytest.approx(13 / (prompt + 2 * decode))


def test_decodes_read_the_weights_once_a_batch_and_engines_batch_apart():
    machine = Machine({1: 1e12}, bandwidth=BYTES, shared_bandwidth=1e12)  # a second for the weights
    load = Load(concurrency=8, requests=8, prompt=10, output=11)
    assert serve_at_best(load, CONFIG, BYTES, machine).output == pytest.approx(88 / (8 + 10))
    halves = serve_at_best(load, CONFIG, BYTES, machine, engines=2)
    assert halves.output == pytest.approx(88 / (8 + 20))
    assert halves.tpot == pytest.approx(2e3)  # each has half of the machine
    assert serve_at_best(STREAM, CONFIG, BYTES, machine, engines=2).tpot == pytest.approx(1e3)


def test_a_shared_prefix_is_computed_once_an_engine():
    machine = Machine({1: 1e4}, bandwidth=1e12, shared_bandwidth=1e12)
    load = Load(concurrency=2, requests=4, prompt=10, output=1, prefix=30)
    own = count_step(CONFIG, 10, 1, 35, BYTES).flops / 1e4
    prefix = count_step(CONFIG, 30, 0, 15, BYTES).flops / 1e4
    for engines in (1, 2):
        best = serve_at_best(load, CONFIG, BYTES, machine, engines)
        assert best.total == pytest.approx(4 * 41 / (engines * prefix + 4 * own))
