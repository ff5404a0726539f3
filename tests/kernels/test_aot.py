"""Ahead-of-time compilation: the first variant of each operation for all chips, and what counts as a fault."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from kernels import aot

ROOT = Path(__file__).parents[2]
FINE = aot.Compiled(
    "attention", "v", "k", chip=80, num_warps=4, shared=1024, registers=64, spills=0, matrix="mma.sync", needs_matrix=True
)


def test_kernels_compile_for_every_chip():
    command = [sys.executable, "-m", "kernels.aot", "--all", "--first"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in run.stdout.splitlines()[2:]]
    assert {row[0] for row in rows} == set(aot.operations())
    chunk = next(row for row in rows if row[2] == "attend_chunk")
    assert chunk[-1] == "mma.sync, wgmma, tcgen05.mma"
    assert all(int(row[5].split(" / ")[1]) > 0 for row in rows)  # registers on sm_90


def test_an_unknown_operation_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        aot.main(["nothing"])
    assert "unknown: nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"shared": 163 * 1024 + 1}, "shared memory"),
        ({"spills": 8}, "spilled"),
        ({"matrix": ""}, "no matrix instructions"),
    ],
)
def test_faults_of_a_compiled_kernel_are_named(change, fault):
    assert FINE.faults == []
    (found,) = replace(FINE, **change).faults
    assert fault in found
    assert replace(FINE, chip=90, shared=163 * 1024 + 1).faults == []


def test_every_operation_has_a_line_in_the_table_of_the_documentation():
    text = (ROOT / aot.DEFAULT_DOCUMENT).read_text()
    table = text.partition(aot.TABLE_BEGIN)[2].partition(aot.TABLE_END)[0]
    for operation, variants in aot.operations().items():
        for variant in variants:
            assert f"| {operation} | {variant.name} |" in table, "run: python -m kernels.aot --all --write"
