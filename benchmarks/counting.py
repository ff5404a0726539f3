"""The least that a model must compute and read, and from it the highest speed at which a machine can serve it.

Counted are the products of weights and of attention, and each weight once a step; what a machine does of both is measured by
`benchmarks.rates`. Norms, activations, KV traffic, sampling and all that is no model are left out: a bound, not a forecast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gpu.checkpoint.architecture import ArchitectureConfig


@dataclass(frozen=True)
class Work:
    """The least work of a step."""

    flops: float
    weight_bytes: float

    def bound(self, flops_a_second: float, bytes_a_second: float) -> float:
        """Seconds: the slower of the two."""
        return max(self.flops / flops_a_second, self.weight_bytes / bytes_a_second)


def count_step(config: ArchitectureConfig, num_tokens: float, num_sampled: float, context: float, weight_bytes: float) -> Work:
    """A step of `num_tokens`, each of which attends to `context` tokens on average, with logits for `num_sampled`."""
    layers, head = count_weights(config)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * context
    return Work(num_tokens * (2 * layers + attention) + num_sampled * 2 * head, weight_bytes)


def count_weights(config: ArchitectureConfig) -> tuple[int, int]:
    """Elements of the layers' matrices, and of the output head's."""
    shapes = config.tensor_shapes()
    layers = sum(shape[0] * shape[1] for name, shape in shapes.items() if name.startswith("model.layers.") and len(shape) == 2)
    return layers, config.vocab_size * config.hidden_size


@dataclass(frozen=True)
class Machine:
    """The measured speed of a machine, with one numeric class on a number of its cores."""

    rates: Mapping[int, float]  # rows of a product -> FLOP a second of one thread
    bandwidth: float  # bytes a second that one thread reads
    shared_bandwidth: float  # that a thread on every core read together
    cores: float = 1.0

    def seconds(self, work: Work, rows: float) -> float:
        """Seconds of a step whose products have this many rows, shared evenly by all cores."""
        known = sorted(self.rates)
        rate = float(np.interp(rows, known, [self.rates[each] for each in known]))
        return work.bound(rate * self.cores, min(self.bandwidth * self.cores, self.shared_bandwidth))


@dataclass(frozen=True)
class Load:
    """Requests of one shape, `concurrency` of them at any time."""

    concurrency: int
    requests: int
    prompt: int  # tokens of each prompt's own
    output: int
    prefix: int = 0  # tokens that all prompts share


@dataclass(frozen=True)
class Served:
    """Figures of a load under the names that `benchmarks.served` gives what it measures."""

    ttft: float  # milliseconds
    tpot: float
    output: float  # tokens a second
    total: float


def serve_at_best(load: Load, config: ArchitectureConfig, weight_bytes: float, machine: Machine, engines: int = 1) -> Served:
    """The bound of a load on a machine that works all the time.

    Requests spread evenly over `engines`, which batch their own decodes only and each compute a shared prefix once. A prompt is
    taken whole, its weights read once. Time to first token is that of a prompt alone, without a queue: a bound for one stream.
    """
    before = load.prefix + load.prompt
    prompt = machine.seconds(count_step(config, load.prompt, 1, load.prefix + load.prompt / 2, weight_bytes), load.prompt)
    prefix = 0.0
    if load.prefix:
        prefix = machine.seconds(count_step(config, load.prefix, 0, load.prefix / 2, weight_bytes), load.prefix)
    batch = max(1.0, load.concurrency / engines)
    step = machine.seconds(count_step(config, batch, batch, before + load.output / 2, weight_bytes), batch)
    busy = engines * prefix + load.requests * (prompt + (load.output - 1) * step / batch)
    made = load.requests * load.output
    return Served(
        ttft=1e3 * prompt,
        tpot=1e3 * step * min(engines, load.concurrency),
        output=made / busy,
        total=(load.requests * before + made) / busy,
    )
