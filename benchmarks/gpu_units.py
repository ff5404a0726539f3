"""The parts of `benchmarks.gpu_check`, run one after the other in a process of their own; events as JSON lines on standard output.

    python -m benchmarks.gpu_units cuda "check attention" "time model"

A part's exception is an event too, and the next part runs, unless the device has failed with it: then the process ends with
status 3.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.stand_ins import stand_ins

with stand_ins() as absent_packages:
    from benchmarks import gpu_model, kernel_cases, kernels
    from benchmarks.device_timing import Roofline, Timer, measure_roofline
    from benchmarks.kernel_cases import Case
    from gpu.models import decoder  # noqa: F401 (imported late elsewhere, when nothing stands in any more)
    from kernels import device as kernel_device

DEVICE_FAILED = 3
Event = dict[str, Any]


class Units:
    """Each part yields events: checks, times and notes. On a CPU the Triton kernels are interpreted, at tiny sizes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        if not self.on_gpu:
            kernel_device.on_accelerator = lambda x: True
        self.float8 = self.on_gpu and kernels.has_float8()

    def machine(self) -> Iterator[Event]:
        import triton

        facts = {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__}
        facts |= {"numpy": np.__version__, "device": self.device.type}
        if self.on_gpu:
            properties = torch.cuda.get_device_properties(self.device)
            capability = f"{properties.major}.{properties.minor}"
            facts |= {"device": properties.name, "capability": capability, "multiprocessors": properties.multi_processor_count}
            facts |= {"memory_gb": round(properties.total_memory / 1e9, 1), "cuda": torch.version.cuda}
        yield {"event": "machine", **facts}
        if absent_packages:
            yield _note(f"not installed, and not needed here: {', '.join(absent_packages)}")
        if not self.on_gpu:
            yield _note("bfloat16, float8 and speed are not checked: Triton's interpreter computes and rounds them otherwise")

    def check(self, operation: str) -> Iterator[Event]:
        for case in self._checks():
            if case.operation == operation:
                difference = case.make(self.device).difference()
                yield _check(operation, case.name, case.dtype, difference, case.tolerance)

    def _checks(self) -> Iterator[Case]:
        if not self.on_gpu:
            for dtype in (torch.float32, torch.float16):
                yield from kernel_cases.checks(kernel_cases.TINY, dtype, False)
            return
        yield from kernels.gpu_checks(self.float8)

    def check_model(self) -> Iterator[Event]:
        """Logits of whole steps: by kernels, padded (from graphs on a GPU), and by plain torch."""
        config, lengths = (gpu_model.SMALL, [37, 700, 1, 16, 90]) if self.on_gpu else (gpu_model.TINY, [18, 5, 1])
        for dtype, tolerance in (("float32", 1e-3), ("bfloat16", 0.2)) if self.on_gpu else (("float32", 1e-3),):
            model = gpu_model.Model(config, self.device, dtype, 8 if self.on_gpu else 4, 1024 if self.on_gpu else 64)
            logits = gpu_model.compare_logits(model, lengths)
            for way, other in (("kernels", "twins"), ("padded", "kernels")):
                difference = kernel_cases.largest_difference(logits[way], logits[other])
                yield _check("model", f"{way} against {other}", getattr(torch, dtype), difference, tolerance)

    @functools.cached_property
    def timer(self) -> Timer:
        return Timer(self.device, 0.1 if self.on_gpu else 0.0)

    @functools.cached_property
    def limits(self) -> Roofline:
        if self.on_gpu:
            return kernels.measure_device(self.timer)
        return measure_roofline(self.timer, 1 << 20, 64, [torch.float32])

    def roofline(self) -> Iterator[Event]:
        rates = {_name(dtype): rate for dtype, rate in self.limits.rates.items()}
        yield {"event": "roofline", "bytes_a_second": self.limits.bandwidth, "flops_a_second": rates}

    def time(self, operation: str) -> Iterator[Event]:
        if self.on_gpu:
            cases = kernels.gpu_timings(self.float8)
        else:
            cases = kernel_cases.timings(kernel_cases.TINY, torch.float32, torch.float32, [2], 20, 9, float8=False)
        chosen = [case for case in cases if case.operation == operation]
        if not self.on_gpu:  # one is enough to try the way
            del chosen[1:]
        for timed in kernels.time_cases(chosen, self.timer, self.limits):
            yield {
                "event": "time", "operation": operation, "name": timed.case.name, "dtype": _name(timed.case.dtype),
                "seconds": timed.seconds, "bytes": timed.num_bytes, "flops": timed.flops, "bound_seconds": timed.bound,
                "torch": timed.torch_name, "torch_seconds": timed.torch_seconds,
            }  # fmt: skip

    def time_model(self) -> Iterator[Event]:
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        config, steps = self._model_steps()
        room = steps["prompt"] + steps["context"] + 8 * steps["num_steps"]
        model = gpu_model.Model(config, self.device, _name(dtype), max(steps["batches"]), room)
        for step in gpu_model.time_steps(model, **steps, bandwidth=self.limits.bandwidth, rate=self.limits.rates[dtype]):
            yield _step("headrace", step)

    def time_transformers(self) -> Iterator[Event]:
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        config, steps = self._model_steps()
        try:
            for step in gpu_model.time_transformers(config, self.device, dtype, **steps):
                yield _step("transformers", step)
        except ModuleNotFoundError:
            yield _note("transformers is not installed here: nothing stands beside the model's times")

    def _model_steps(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.on_gpu:
            return gpu_model.LLAMA_8B, {"batches": [1, 16, 64], "context": 1024, "prompt": 2048, "num_steps": 24}
        return gpu_model.TINY, {"batches": [1, 2], "context": 18, "prompt": 20, "num_steps": 1}

    def find(self, name: str) -> Callable[[], Iterator[Event]]:
        method = getattr(self, name.replace(" ", "_"), None)
        if method is not None:
            return method
        kind, _, operation = name.partition(" ")
        return functools.partial(getattr(self, kind), operation)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _note(text: str) -> Event:
    return {"event": "note", "text": text}


def _check(operation: str, name: str, dtype: torch.dtype, difference: float, tolerance: float) -> Event:
    passed = difference <= tolerance
    facts = {"operation": operation, "name": name, "dtype": _name(dtype), "difference": min(difference, 1e30)}
    return {"event": "check", **facts, "tolerance": tolerance, "passed": passed}


def _step(engine: str, step: gpu_model.StepTime) -> Event:
    facts = {"engine": engine, "name": step.name, "seconds": step.seconds, "tokens": step.tokens, "bound_seconds": step.bound}
    return {"event": "step", **facts}


def _run(units: Units, name: str, tell: Callable[[Event], None]) -> bool:
    """Run a part. Returns whether the device can still run others."""
    tell({"event": "begin", "unit": name})
    torch.manual_seed(0)
    try:
        with torch.inference_mode():
            for event in units.find(name)():
                tell(event)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(where.filename)}:{where.lineno}"
        tell({"event": "error", "text": f"{type(error).__name__} at {place}: {' '.join(str(error).split())[:500]}"})
        traceback.print_exc()
    try:
        if units.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except RuntimeError:
        return False
    tell({"event": "end"})
    return True


def main() -> int:
    device, *names = sys.argv[1:]
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what others print is no event

    def tell(event: Event) -> None:
        print(json.dumps(event), file=stream, flush=True)

    if device == "cpu":
        torch.set_num_threads(1)
    units = Units(torch.device(device))
    for name in names:
        if not _run(units, name, tell):
            return DEVICE_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
