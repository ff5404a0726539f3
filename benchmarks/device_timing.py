"""How long work takes on a device, and how fast the device copies and multiplies: what times are held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

CACHE_BYTES = 256 << 20  # written before each run, so that nothing is found in a GPU's L2 cache
MOST_RUNS = 30


class Timer:
    """Times several runs, which all together take about `budget` seconds."""

    def __init__(self, device: torch.device, budget: float = 0.2) -> None:
        self.device = device
        self.budget = budget
        on_gpu = device.type == "cuda"
        self._cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device=device) if on_gpu else None

    def seconds(self, work: Callable[[], object]) -> float:
        """The median on a GPU, which no other process uses; the fastest on a CPU."""
        return statistics.median(self._runs(work)) if self.device.type == "cuda" else self.fastest(work)

    def fastest(self, work: Callable[[], object]) -> float:
        return min(self._runs(work))

    def _runs(self, work: Callable[[], object]) -> list[float]:
        work()
        return self._on_gpu(work) if self.device.type == "cuda" else self._on_cpu(work)

    def _on_cpu(self, work: Callable[[], object]) -> list[float]:
        taken: list[float] = []
        begun = time.perf_counter()
        while not taken or (len(taken) < MOST_RUNS and time.perf_counter() - begun < self.budget):
            started = time.perf_counter()
            work()
            taken.append(time.perf_counter() - started)
        return taken

    def _on_gpu(self, work: Callable[[], object]) -> list[float]:
        """Replayed from a graph: the device's time alone, without that of a CPU which launches."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        first = self._replay(graph, 3)
        return self._replay(graph, min(MOST_RUNS, 3 + int(self.budget / max(first))))

    def _replay(self, graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for begin, end in events:
            self._cache.zero_()
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in events]


@dataclass
class Roofline:
    bandwidth: float  # bytes a second, read and written, of a copy
    rates: dict[torch.dtype, float]  # FLOP a second of a large square product

    def seconds(self, num_bytes: float, flops: float, dtype: torch.dtype) -> float:
        """The least that so much work can take; products in a type that was not measured are taken for free."""
        rate = self.rates.get(dtype)
        return max(num_bytes / self.bandwidth, flops / rate if rate else 0.0)


def measure_roofline(timer: Timer, copied_bytes: int, side: int, dtypes: list[torch.dtype]) -> Roofline:
    """Time a copy of so many bytes, and products of matrices of side x side. A type that torch does not multiply is left out."""
    device, rates = timer.device, {}
    bandwidth = _measure_copy(timer, copied_bytes)
    for dtype in dtypes:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        try:
            rates[dtype] = 2 * side**3 / timer.fastest(lambda a=a, b=b: _multiply(a, b))
        except (RuntimeError, NotImplementedError):
            continue
    return Roofline(bandwidth, rates)


def _measure_copy(timer: Timer, num_bytes: int) -> float:
    source = torch.ones(num_bytes // 4, device=timer.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / timer.fastest(lambda: target.copy_(source))


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype == torch.int8:
        return torch._int_mm(a, b)
    if a.dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=a.device)
        return torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16)
    return a @ b
