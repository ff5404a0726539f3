"""What `serve` tells of values that its engines settled."""

from __future__ import annotations

from ops.derived import Row, common_values


def test_what_engines_settled_differently_is_told_of_each() -> None:
    first: list[Row] = [("device", "cpu", "no GPU is there"), ("max_num_batched_tokens", 512, "default on cpu")]
    second: list[Row] = [("device", "cpu", "no GPU is there"), ("max_num_batched_tokens", 256, "measured")]
    device = ("device", [("cpu", "no GPU is there")])
    assert common_values([first, first]) == [device, ("max_num_batched_tokens", [(512, "default on cpu")])]
    differing = ("max_num_batched_tokens", [(512, "default on cpu"), (256, "measured")])
    assert common_values([first, second]) == [device, differing]
    assert common_values([]) == []
