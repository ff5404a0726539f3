"""The random model for benchmarks, small: it is the same for the same seed, and headrace computes finite numbers with it."""

from pathlib import Path

import torch

from benchmarks.random_model import Shape, write_model
from tests.gpu.engine_stub import Driver, make_config, make_runner


def test_a_seed_makes_one_model_that_can_be_computed(smollm2_gguf: Path, tmp_path: Path) -> None:
    shape = Shape(layers=2, hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32)
    files = [tmp_path / name for name in ("a.gguf", "b.gguf", "c.gguf")]
    for file, seed in zip(files, (0, 0, 1), strict=True):
        write_model(file, smollm2_gguf, shape, seed)
    whole = [file.read_bytes()[-100_000:] for file in files]
    assert whole[0] == whole[1] != whole[2]
    runner = make_runner(make_config(files[0], dtype="float16"))
    config = runner.model.config
    assert (config.num_layers, config.hidden_size, config.num_kv_heads, config.vocab_size) == (2, 128, 2, 49152)
    driver = Driver(runner)
    driver.add(0, [5, 6, 7])
    driver.generate(3)
    assert len(driver.tokens[0]) == 6
    assert runner.model.logits(runner.model.embedding(torch.arange(4))).isfinite().all()
