"""Times every kernel on this machine beside what it must read, write and multiply at least, and what torch has for the same.

    python -m benchmarks.kernels                    # the CPU's kernels, one thread, at the sizes of SmolLM2-135M
    python -m benchmarks.kernels --device cuda      # the Triton kernels at the sizes of Llama-3.1-8B, replayed from a CUDA graph
    python -m benchmarks.kernels attention gumbel   # of these operations alone

"of bound": the least time by the bandwidth of a large copy and the FLOP/s of a large product, both measured in this process just
before, over the time taken. A CPU finds small tensors in its caches and multiplies bytes faster than floats, hence more than 100 %;
a GPU's L2 is emptied before each run. Times are medians on a GPU, the fastest of several runs on a CPU. On a CPU, w4a16, w8a8 and
moe are the plain-torch twins: it has no kernels of its own for them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch

from benchmarks.device_timing import Roofline, Timer, measure_roofline
from benchmarks.kernel_cases import LLAMA_8B, ODD, SMOLLM2_135M, Case, checks, cpu_products, timings
from benchmarks.text_table import text_table
from kernels.cpu.crew import Crew

HEADER = ("operation", "case", "type", "us", "GB/s", "GFLOP/s", "of bound", "torch", "us")


@dataclass
class Timed:
    case: Case
    seconds: float
    num_bytes: int
    flops: int
    bound: float  # seconds
    torch_name: str = ""
    torch_seconds: float | None = None

    def row(self) -> tuple[str, ...]:
        return (
            self.case.operation,
            self.case.name,
            str(self.case.dtype).removeprefix("torch."),
            f"{self.seconds * 1e6:.1f}",
            f"{self.num_bytes / self.seconds / 1e9:.1f}",
            f"{self.flops / self.seconds / 1e9:.1f}" if self.flops else "",
            f"{self.bound / self.seconds:.0%}",
            self.torch_name,
            "" if self.torch_seconds is None else f"{self.torch_seconds * 1e6:.1f}",
        )


@torch.inference_mode()
def time_case(case: Case, timer: Timer, roofline: Roofline) -> Timed:
    trial = case.make(timer.device)
    restore = trial.restore()
    if restore is None:
        seconds = timer.seconds(trial.run)
    else:  # what it changed is brought back before each run, and the time of that taken off
        seconds = max(1e-9, timer.seconds(lambda: (restore(), trial.run())) - timer.seconds(restore))
    bound = roofline.seconds(trial.num_bytes, trial.flops, trial.multiplies or case.dtype)
    timed = Timed(case, seconds, trial.num_bytes, trial.flops, bound)
    if trial.torch_has is not None:
        timed.torch_name, work = trial.torch_has
        with suppress(RuntimeError):  # of what a graph cannot capture
            timed.torch_seconds = timer.seconds(work)
    return timed


def time_cases(cases: Iterable[Case], timer: Timer, roofline: Roofline) -> Iterator[Timed]:
    for case in cases:
        yield time_case(case, timer, roofline)


def cpu_timings() -> Iterator[Case]:
    batches, prompt = [1, 16, 64], 128
    yield from timings(SMOLLM2_135M, torch.float32, torch.float16, batches, context=256, prompt=prompt, float8=False)
    yield from cpu_products(SMOLLM2_135M, [*batches, prompt])


def gpu_timings(float8: bool) -> Iterator[Case]:
    return timings(LLAMA_8B, torch.bfloat16, torch.bfloat16, [1, 16, 64], context=2048, prompt=2048, float8=float8)


def gpu_checks(float8: bool) -> Iterator[Case]:
    """Shapes that fit no tile in every type, and a real model's in its own."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield from checks(ODD, dtype, float8)
    yield from checks(LLAMA_8B, torch.bfloat16, float8)


def has_float8() -> bool:
    return torch.cuda.get_device_capability() >= (9, 0)


def measure_device(timer: Timer) -> Roofline:
    if timer.device.type == "cpu":
        return measure_roofline(timer, 256 << 20, 1024, [torch.float32])
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int8, *([torch.float8_e4m3fn] if has_float8() else [])]
    return measure_roofline(timer, 4 << 30, 8192, dtypes)


def describe_roofline(roofline: Roofline) -> str:
    rates = ", ".join(f"{str(dtype)[6:]} {rate / 1e12:.3g} TFLOP/s" for dtype, rate in roofline.rates.items())
    return f"a large copy: {roofline.bandwidth / 1e9:.1f} GB/s read and written; large products: {rates}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("operations", nargs="*", help="default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU's kernels")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds for the runs of one case")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    timer = Timer(torch.device(options.device), options.budget)
    roofline = measure_device(timer)
    print(describe_roofline(roofline), flush=True)
    cases = cpu_timings() if options.device == "cpu" else gpu_timings(has_float8())
    chosen = (case for case in cases if not options.operations or case.operation in options.operations)
    with Crew(options.threads).gather(options.threads):
        print(text_table(HEADER, [timed.row() for timed in time_cases(chosen, timer, roofline)]))


if __name__ == "__main__":
    main()
