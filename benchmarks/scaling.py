"""Output tokens a second of headrace by the number of concurrent requests, beside the bound counted for it.

    python -m benchmarks.scaling MODEL --peers-dir DIR [--headrace="--dtype float16"] [--levels 1,2,4,8,16,32,64] [--out FILE]

One server, 128 tokens in and 128 out; three requests for each that runs at once, at least 4 and at most 128. DIR holds the load
generator (`benchmarks.served`), and smollm2-hf's tokenizer unless --tokenizer names another. With --out, every level is a line of
FILE, and the same command goes on where an interrupted one ended.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import records
from benchmarks.counting import Load, serve_at_best
from benchmarks.peers import LOADS, machine_of, rates_of
from benchmarks.served import headrace, put_under, running, stop_on_sigterm
from gpu.checkpoint.architecture import ArchitectureConfig
from gpu.checkpoint.weights import open_checkpoint
from gpu.machine import available_cores

LEVELS = "1,2,4,8,16,32,64"
FEWEST_REQUESTS, MOST_REQUESTS = 4, 128
FIRST_SEED = 50_000  # apart from those of benchmarks.peers


def load_of(level: int) -> Load:
    return Load(level, min(max(FEWEST_REQUESTS, 3 * level), max(MOST_REQUESTS, level)), 128, 128)


def measure(options: argparse.Namespace, levels: list[int], out: Path) -> None:
    """The rates and the levels that `out` does not have yet."""
    if not records.read(out, "rates"):
        records.append(out, {"kind": "rates", **rates_of(options.model, options.headrace)})
    missing = [level for level in levels if level not in {record["level"] for record in records.read(out, "level")}]
    if not missing:
        return
    server = headrace(options.model, options.headrace)
    tokenizer = options.tokenizer or options.peers_dir / "models/smollm2-hf"
    generator = options.peers_dir / "vllm/bin/vllm"
    with running(server) as at:
        put_under(LOADS["warm"], server, at, tokenizer, generator, FIRST_SEED)
        for level in missing:
            run = put_under(load_of(level), server, at, tokenizer, generator, FIRST_SEED + level)
            records.append(out, {"kind": "level", "level": level, "cores": available_cores(), **run})
            print(f"{level} at once: " + ", ".join(f"{name} {value:.1f}" for name, value in run.items()), flush=True)


def beside_bounds(runs: list[dict[str, Any]], rates: dict[str, Any], config: ArchitectureConfig, title: str) -> Table:
    columns = ("concurrent", "requests", "output tok/s", "times one stream", "bound tok/s", "of the bound")
    table = Table(title=title)
    for column in (*columns, "cores taken", "engines", "TTFT p50 ms", "TPOT p50 ms", "peak MB"):
        table.add_column(column, justify="right")
    runs = sorted(runs, key=lambda run: run["level"])
    for run in runs:
        load = load_of(run["level"])
        machine = machine_of(rates, run["cores"] - run["taken"])
        best = serve_at_best(load, config, rates["weight_bytes"], machine, run["engines"]).output
        times = run["output"] / runs[0]["output"] if runs[0]["level"] == 1 else float("nan")
        table.add_row(
            str(load.concurrency), str(load.requests), f"{run['output']:,.1f}", f"{times:.2f}", f"{best:,.1f}",
            f"{run['output'] / best:.0%}", f"{run['taken']:.2f}", str(run["engines"]), f"{run['ttft']:,.0f}", f"{run['tpot']:,.1f}",
            f"{run['memory']:,.0f}",
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a .gguf file or a safetensors directory")
    parser.add_argument("--peers-dir", type=Path, required=True)
    parser.add_argument("--headrace", default="", metavar="OPTIONS", help="options of headrace")
    parser.add_argument("--levels", default=LEVELS, help="concurrent requests, separated by commas")
    parser.add_argument("--tokenizer", type=Path, help="directory of the tokenizer that the load generator makes prompts with")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines: the levels that are done")
    options = parser.parse_args()
    stop_on_sigterm()
    with tempfile.TemporaryDirectory() as folder, open_checkpoint(str(options.model)) as checkpoint:
        out = options.out or Path(folder) / "levels.jsonl"
        measure(options, [int(level) for level in options.levels.split(",")], out)
        rates = records.read(out, "rates")[-1]
        title = f"headrace {options.headrace}".strip() + f", {rates['class']}: 128 tokens in, 128 out"
        table = beside_bounds(records.read(out, "level"), rates, checkpoint.config, title)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


if __name__ == "__main__":
    main()
