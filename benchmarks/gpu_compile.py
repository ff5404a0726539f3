"""Compiles for a real chip, on any machine, every kernel that `benchmarks.gpu_check` would launch there, and checks what came out.

    python -m benchmarks.gpu_compile --chip 90 [attention moe ...]

As `kernels.aot` does it, whose examples are what a server launches; these are all shapes of the check, odd sizes and all types.
Exit status 1 where a launch does not compile or takes more shared memory than the chip has. Registers spilled, in bytes a thread,
cost time alone: odd sizes may.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch

from benchmarks.kernel_cases import Case
from benchmarks.kernels import gpu_checks, gpu_timings
from benchmarks.text_table import text_table
from kernels import aot
from kernels.triton.variant import ALL_CHIPS, Variant


def compile_cases(cases: list[Case], chip: int) -> Iterator[tuple[Case, aot.Compiled | str]]:
    """Each kernel of each case, or why there is none; the same launch once."""
    seen: set[str] = set()
    for case in cases:
        trial = case.make(torch.device("meta"))
        try:
            for compiled in aot.compile_variant(case.operation, Variant(case.name, trial.run), chip, seen):
                yield case, compiled
        except Exception as error:
            yield case, f"{type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_compile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("operations", nargs="*", help="default: all")
    parser.add_argument("--chip", type=int, choices=ALL_CHIPS, default=90, help="compute capability")
    options = parser.parse_args()
    float8 = options.chip >= 90
    cases = [*gpu_checks(float8), *gpu_timings(float8)]
    rows, faults = [], []
    for case, found in compile_cases(
        [x for x in cases if not options.operations or x.operation in options.operations], options.chip
    ):
        name = (case.operation, case.name, str(case.dtype)[6:])
        if isinstance(found, str):
            faults.append(f"{', '.join(name)}: {found}")
            continue
        if found.shared > aot.SHARED_MEMORY_LIMIT[found.chip]:
            faults.append(f"{', '.join(name)}, {found.kernel}: {found.shared} bytes of shared memory")
        rows.append((*name, found.kernel, str(found.shared), str(found.registers), str(found.spills), found.matrix))
    print(text_table(("operation", "case", "type", "kernel", "shared", "registers", "spills", "matrix instructions"), rows))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
