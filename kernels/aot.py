"""Compiles the Triton kernels for real chips on any machine, and checks what came out: `python -m kernels.aot --help`.

A file `kernels/triton/<operation>.py` lists in `AOT_VARIANTS` examples of the launches that a server makes, on meta tensors
(`kernels.triton.variant.Variant`). The launches are recorded and compiled with Triton's own specialisation (dtypes, divisibility
by 16, arguments equal to 1), so what is checked is what would run. For each kernel and chip:

- it compiles, and its shared memory is within what the chip allows a block;
- it spills no register: the local memory that `cuobjdump --dump-resource-usage` reports is zero;
- a kernel named in `Variant.matrix` uses the chip's matrix instructions: mma.sync on sm_80, wgmma on sm_90, tcgen05 on sm_100.

No GPU, no CUDA toolkit: the Triton wheel brings its assembler. `TRITON_INTERPRET` must not be set.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import kernels.triton
from kernels.triton.variant import ALL_CHIPS, Variant

# Bytes of shared memory that one block may use (CUDA C++ Programming Guide, technical specifications per compute capability).
SHARED_MEMORY_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# A smaller tile than the chip's newest instruction takes goes through the one before, which the chip has too.
MATRIX_INSTRUCTIONS = {80: ("mma.sync",), 90: ("wgmma", "mma.sync"), 100: ("tcgen05.mma", "mma.sync")}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
DEFAULT_DOCUMENT = Path("docs/kernels.md")
TABLE_BEGIN, TABLE_END = "<!-- made by python -m kernels.aot --all --write -->", "<!-- end -->"


@dataclass(frozen=True)
class Launch:
    kernel: JITFunction
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True)
class Compiled:
    """What one kernel became on one chip. Shared memory and spills in bytes (spills a thread)."""

    operation: str
    variant: str
    kernel: str
    chip: int
    num_warps: int
    shared: int
    registers: int
    spills: int
    matrix: str  # the matrix instructions in it, "" for none
    needs_matrix: bool

    @property
    def faults(self) -> list[str]:
        faults = []
        limit = SHARED_MEMORY_LIMIT[self.chip]
        if self.shared > limit:
            faults.append(f"{self.shared} bytes of shared memory, {limit} is the limit")
        if self.spills:
            faults.append(f"{self.spills} bytes of registers spilled")
        if self.needs_matrix and not self.matrix:
            faults.append("no matrix instructions")
        return faults


def operations() -> dict[str, list[Variant]]:
    """Every operation that lists variants."""
    found = {}
    for module in pkgutil.iter_modules(kernels.triton.__path__):
        variants = getattr(importlib.import_module(f"kernels.triton.{module.name}"), "AOT_VARIANTS", None)
        if variants:
            found[module.name] = variants
    return found


def record(variant: Variant) -> list[Launch]:
    """The launches that the variant's example makes."""
    launches = []

    def note(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        launches.append(Launch(kernel, arguments, keywords))

    with mock.patch.object(JITFunction, "run", note):
        variant.example(**variant.arguments)
    if not launches:
        raise ValueError(f"variant {variant.name!r} launches no kernel")
    return launches


def compile_launch(launch: Launch, chip: int) -> Any:
    """As `JITFunction.run` compiles on a device of this kind: triton's CompiledKernel."""
    kernel, target = launch.kernel, GPUTarget("cuda", chip, 32)
    backend = make_backend(target)
    keywords = launch.keywords
    if "enable_fp_fusion" not in keywords:
        raise ValueError(f"{kernel.__name__} is launched without enable_fp_fusion")
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*launch.arguments, **keywords)
    options, signature, constants, attributes = kernel._pack_args(backend, keywords, bound, specialization, options)
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options.__dict__)


def compile_variant(operation: str, variant: Variant, chip: int, seen: set[str] | None = None) -> Iterator[Compiled]:
    """Each kernel that the variant launches, compiled; kernels launched twice in the same way, or in `seen`, once."""
    seen = set() if seen is None else seen
    for launch in record(variant):
        name = launch.kernel.__name__.removeprefix("_").removesuffix("_kernel")
        compiled = compile_launch(launch, chip)
        if compiled.hash in seen:
            continue
        seen.add(compiled.hash)
        registers, spills = resource_usage(compiled.asm["cubin"])
        yield Compiled(
            operation=operation,
            variant=variant.name,
            kernel=name,
            chip=chip,
            num_warps=compiled.metadata.num_warps,
            shared=compiled.metadata.shared,
            registers=registers,
            spills=spills,
            matrix=next((x for x in MATRIX_INSTRUCTIONS[chip] if x in compiled.asm["ptx"]), ""),
            needs_matrix=launch.kernel.__name__ in variant.matrix,
        )


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes a thread that do not fit them and go to local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    return used["REG"], max(used["STACK"], used["LOCAL"])


def table(results: list[Compiled]) -> str:
    """Markdown: a line a kernel and variant, per chip shared memory / registers / spills."""
    chips = sorted({x.chip for x in results})
    lines = ["| operation | variant | kernel | warps | " + " | ".join(f"sm_{chip}" for chip in chips) + " | matrix instructions |"]
    lines.append("|---" * (5 + len(chips)) + "|")
    by_kernel: dict[tuple[str, str, str, int], dict[int, list[Compiled]]] = {}
    for x in results:
        by_kernel.setdefault((x.operation, x.variant, x.kernel, x.num_warps), {}).setdefault(x.chip, []).append(x)
    for key, per_chip in by_kernel.items():
        cells = []
        for chip in chips:
            compiled = per_chip.get(chip, [])
            cells.append("; ".join(f"{x.shared} / {x.registers} / {x.spills}" for x in compiled) or "-")
        matrix = ", ".join(dict.fromkeys(x.matrix for group in per_chip.values() for x in group if x.matrix))
        lines.append("| " + " | ".join([*map(str, key), *cells, matrix]) + " |")
    return "\n".join(lines)


def write_table(path: Path, results: list[Compiled]) -> None:
    """Puts the table between the two marks in the document."""
    text = path.read_text()
    before, _, rest = text.partition(TABLE_BEGIN)
    _, _, after = rest.partition(TABLE_END)
    path.write_text(f"{before}{TABLE_BEGIN}\n{table(results)}\n{TABLE_END}{after}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("operations", nargs="*", help="files of kernels/triton, without .py")
    parser.add_argument("--all", action="store_true", help="every operation")
    parser.add_argument("--chip", type=int, action="append", choices=ALL_CHIPS, help="compute capability, repeatable; default: all")
    parser.add_argument("--first", action="store_true", help="only the first variant of each operation")
    parser.add_argument("--write", type=Path, nargs="?", const=DEFAULT_DOCUMENT, help="put the table into this document")
    options = parser.parse_args(arguments)
    known = operations()
    chosen = list(known) if options.all else options.operations
    unknown = [x for x in chosen if x not in known]
    if unknown or not chosen:
        parser.error(f"--all, or operations out of {', '.join(known)}" + "".join(f"; unknown: {x}" for x in unknown))
    results: list[Compiled] = []
    for operation in chosen:
        for variant in known[operation][: 1 if options.first else None]:
            for chip in options.chip or ALL_CHIPS:
                if chip in variant.chips:
                    results += compile_variant(operation, variant, chip)
    print(table(results))
    if options.write:
        write_table(options.write, results)
    faulty = [x for x in results if x.faults]
    for x in faulty:
        print(f"{x.operation}, {x.variant}, {x.kernel}, sm_{x.chip}: {'; '.join(x.faults)}", file=sys.stderr)
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
