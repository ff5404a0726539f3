"""Checks the GPU's code on the machine it is run on, then times it: one command, one table, one exit status.

    python -m benchmarks.gpu_check --out gpu_check.json               # some minutes on a GPU
    python -m benchmarks.gpu_check --device cpu                       # the command itself, tiny, by Triton's interpreter

Needs torch, Triton and numpy alone. First every Triton kernel against its plain-torch twin, in float32, float16 and bfloat16, and a
small model's logits by kernels, from CUDA graphs and by plain torch. Then what the device copies and multiplies, beside it every
kernel's time, and a model of Llama-3.1-8B's shape with random weights: decodes and a prompt through the runner, beside
transformers' generate where that is installed.

Parts run in a process of their own, so that one that dies or hangs costs its own results alone. Exit status 1: a check has failed,
or was not made.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from benchmarks.text_table import text_table

OPERATIONS = (
    "rms_norm", "add_rms_norm", "silu_mul", "rope", "kv_write", "rope_kv_write", "attention", "gumbel", "penalties", "logit_bias",
    "token_mask", "min_p", "top_k_top_p", "logprobs", "w4a16", "w8a8", "moe",
)  # fmt: skip
CHECKS = [*(f"check {operation}" for operation in OPERATIONS), "check model"]
TIMES = ["roofline", "time model", *(f"time {operation}" for operation in OPERATIONS), "time transformers"]
SILENCE = 120.0  # seconds without an event after which a part is given up
ROOT = Path(__file__).parents[1]


@dataclass
class Report:
    machine: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    roofline: dict[str, Any] = field(default_factory=dict)
    times: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[dict[str, str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def take(self, unit: str, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "machine":
            self.machine = event
        elif kind == "roofline":
            self.roofline = event
        elif kind == "note":
            self.notes.append(event["text"])
        elif kind == "error":
            self.errors.append({"unit": unit, "text": event["text"]})
        else:
            {"check": self.checks, "time": self.times, "step": self.steps}[kind].append(event)

    @property
    def is_correct(self) -> bool:
        undone = {error["unit"] for error in self.errors} | set(self.skipped)
        return all(check["passed"] for check in self.checks) and not undone & set(CHECKS)


class Runner:
    """Runs parts in a process, and the rest of them in another one where that dies, hangs or loses its device."""

    def __init__(self, device: str, deadline: float, silence: float = SILENCE) -> None:
        self.device = device
        self.deadline = deadline  # of time.monotonic()
        self.silence = silence
        self.report = Report()

    def command(self, units: list[str]) -> list[str]:
        return [sys.executable, "-m", "benchmarks.gpu_units", self.device, *units]

    def run(self, units: list[str]) -> None:
        left = list(units)
        while left and time.monotonic() < self.deadline:
            begun = len(left)
            self._run_process(left)
            if len(left) == begun:  # not one: no other process would fare better
                self.report.errors.append({"unit": left.pop(0), "text": "the process of the parts did not start"})
                break
        self.report.skipped += left

    def _run_process(self, left: list[str]) -> None:
        """Takes off `left` what has been done, well or not."""
        environment = os.environ | ({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if self.device == "cpu" else {})
        process = subprocess.Popen(self.command(left), stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        lines: SimpleQueue[str | None] = SimpleQueue()
        reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        reader.start()
        unit, started = None, time.monotonic()
        try:
            while True:
                wait = min(self.silence, self.deadline - time.monotonic())
                line = lines.get(timeout=max(0.0, wait))
                if line is None:
                    self._died(unit, left, f"the process ended with status {process.wait()}")
                    return
                event = json.loads(line)
                if event["event"] == "begin":
                    unit, started = event["unit"], time.monotonic()
                elif event["event"] == "end":
                    print(f"{unit}: {self._summary(unit)}, {time.monotonic() - started:.1f} s", flush=True)
                    left.remove(unit)
                    unit = None
                else:
                    self.report.take(unit, event)
        except Empty:
            if time.monotonic() < self.deadline:
                self._died(unit, left, f"no sign of life for {self.silence:.0f} s")
        finally:
            process.kill()
            process.wait()
            reader.join()

    def _died(self, unit: str | None, left: list[str], reason: str) -> None:
        if unit is None:  # between two parts: all of them were done, or none began
            return
        if all(error["unit"] != unit for error in self.report.errors):
            self.report.errors.append({"unit": unit, "text": reason})
        print(f"{unit}: {reason}", flush=True)
        left.remove(unit)

    def _summary(self, unit: str) -> str:
        errors = [error["text"] for error in self.report.errors if error["unit"] == unit]
        if errors:
            return "; ".join(errors)
        kind, _, operation = unit.partition(" ")
        checks = [check for check in self.report.checks if kind == "check" and check["operation"] == operation]
        if not checks:
            return "done"
        failed = [check for check in checks if not check["passed"]]
        return f"{len(checks) - len(failed)} of {len(checks)} as their twins"


def _read(process: subprocess.Popen[str], lines: SimpleQueue[str | None]) -> None:
    with process.stdout as stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def check_table(report: Report) -> str:
    """The worst case of each operation and type, and every case that failed."""
    worst: dict[tuple[str, str], dict[str, Any]] = {}
    for check in report.checks:
        key = (check["operation"], check["dtype"])
        if key not in worst or check["difference"] > worst[key]["difference"]:
            worst[key] = check
    shown = list(worst.values()) + [x for x in report.checks if not x["passed"] and all(x is not y for y in worst.values())]
    rows = [
        (x["operation"], x["dtype"], x["name"], f"{x['difference']:.1e}", f"{x['tolerance']:.1e}", "" if x["passed"] else "FAILED")
        for x in shown
    ]
    return text_table(("operation", "type", "worst case", "difference", "allowed", ""), rows)


def time_table(report: Report) -> str:
    rows = [
        (
            x["operation"], x["name"], x["dtype"], f"{x['seconds'] * 1e6:.1f}", f"{x['bytes'] / x['seconds'] / 1e9:.0f}",
            f"{x['flops'] / x['seconds'] / 1e12:.1f}" if x["flops"] else "", f"{x['bound_seconds'] / x['seconds']:.0%}", x["torch"],
            f"{x['torch_seconds'] * 1e6:.1f}" if x["torch_seconds"] else "",
        )
        for x in report.times
    ]  # fmt: skip
    return text_table(("operation", "case", "type", "us", "GB/s", "TFLOP/s", "of bound", "torch", "us"), rows)


def step_table(report: Report) -> str:
    rows = [
        (
            x["engine"], x["name"], f"{x['seconds'] * 1e3:.2f}", f"{x['tokens'] / x['seconds']:.0f}",
            f"{x['bound_seconds'] / x['seconds']:.0%}" if x["bound_seconds"] else "",
        )
        for x in report.steps
    ]  # fmt: skip
    return text_table(("engine", "step", "ms", "tokens/s", "of bound"), rows)


def print_report(report: Report) -> None:
    print("\n" + ", ".join(f"{name} {value}" for name, value in report.machine.items()))
    for note in report.notes:
        print(note)
    if report.roofline:
        rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in report.roofline["flops_a_second"].items())
        print(f"a large copy: {report.roofline['bytes_a_second'] / 1e9:.1f} GB/s read and written; large products: {rates}")
    for rows, table in ((report.checks, check_table), (report.times, time_table), (report.steps, step_table)):
        if rows:
            print("\n" + table(report))
    for error in report.errors:
        print(f"\n{error['unit']} failed: {error['text']}")
    if report.skipped:
        print(f"\nout of time for: {', '.join(report.skipped)}")
    verdict = "every check passed" if report.is_correct else "NOT every check passed"
    print(f"\n{verdict}; {len(report.checks)} checks, {report.seconds:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=480.0, help="after which what is not done is left out")
    parser.add_argument("--out", type=Path, help="a file for everything measured, as JSON")
    parser.add_argument("--units", nargs="+", help="these parts alone, such as `check attention` or `time model`")
    options = parser.parse_args()
    started = time.monotonic()
    runner = Runner(options.device, started + options.seconds)
    runner.run(["machine", *(options.units or CHECKS + TIMES)])
    report = runner.report
    report.seconds = time.monotonic() - started
    if options.out:
        options.out.write_text(json.dumps(vars(report) | {"is_correct": report.is_correct}, indent=1) + "\n")
    print_report(report)
    return 0 if report.is_correct else 1


if __name__ == "__main__":
    sys.exit(main())
