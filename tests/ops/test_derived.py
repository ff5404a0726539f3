"""`serve` shows the values that its engines chose."""

from __future__ import annotations

import pytest

from engine.config import ServeConfig
from engine.protocol import EngineInfo
from ops.derived import Row, common_values, derived_values


def test_values_that_differ_between_engines_are_shown_for_each() -> None:
    first: list[Row] = [("device", "cpu", "there is no GPU"), ("max_num_batched_tokens", 512, "default on cpu")]
    second: list[Row] = [("device", "cpu", "there is no GPU"), ("max_num_batched_tokens", 256, "measured")]
    device = ("device", [("cpu", "there is no GPU")])
    assert common_values([first, first]) == [device, ("max_num_batched_tokens", [(512, "default on cpu")])]
    differing = ("max_num_batched_tokens", [(512, "default on cpu"), (256, "measured")])
    assert common_values([first, second]) == [device, differing]
    assert common_values([]) == []


@pytest.mark.parametrize(
    ("given", "device", "chosen", "expected"),
    [
        (
            {}, "cpu", "gguf-float16",
            {
                "quantization": (
                    "gguf",
                    "the file's own blocks are fastest on a CPU; perplexity +0.4 % against float32; --dtype chooses another class",
                ),
                "dtype": ("float16", "for weights that are not quantized"),
            },
        ),
        (
            {}, "cpu", "bfloat16",
            {
                "quantization": ("none", "the file has no quantized blocks that a kernel can use"),
                "dtype": ("bfloat16", "default on cpu; perplexity less than 0.1 % against float32"),
            },
        ),
        ({"dtype": "float16"}, "cpu", "float16", {"quantization": ("none", "dtype is given")}),
        (
            {"quantization": "int8"}, "cpu", "int8-float16", {"dtype": ("float16", "for weights that are not quantized")},
        ),
        ({"dtype": "bfloat16"}, "cuda", "bfloat16", {"quantization": ("none", "for CPUs only")}),
    ],
)  # fmt: skip
def test_the_numeric_class_is_told_with_its_reason_and_cost(
    given: dict[str, str], device: str, chosen: str, expected: dict[str, tuple[str, str]]
) -> None:
    config = ServeConfig()
    for name, value in given.items():
        setattr(config.model, name, value)
    info = EngineInfo(
        slot="0", incarnation=1, model="m", served_names=["m"], fingerprint="f", protocol_versions=[2], tokenizer="t",
        max_model_len=8, max_num_seqs=1, max_num_batched_tokens=8, block_size=8, num_blocks=8, vocab_size=8, max_logprobs=1,
        dtype=chosen, device=device, tensor_parallel_size=1, pid=1, host="h", started=0.0,
    )  # fmt: skip
    rows = {name: (value, reason) for name, value, reason in derived_values(config, info, {}) if name in ("dtype", "quantization")}
    assert rows == expected
