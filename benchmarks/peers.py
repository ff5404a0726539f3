"""headrace beside llama.cpp and vLLM, and beside what the machine can do: the same model, the same load, alternating runs.

    python -m benchmarks.peers --peers-dir DIR --out FILE [--rounds 3] [--work W1,W2,W3] [--headrace=OPTIONS ...] [--checkout DIR]
    python -m benchmarks.peers --peers-dir DIR --out FILE --headrace= --headrace="--quantization int8" --only "headrace"
    python -m benchmarks.peers --summarize FILE

DIR is described in `benchmarks.served`. Each server runs alone; a round starts every server once, so that the machine's drift meets
all of them, and gives all of them the same prompts, which no other round or load has. Every run is a line of FILE, and the same
command goes on where an interrupted one ended: a FILE is one sitting, and only ratios of one sitting count. The loads are bounded:

    W1   1 stream,      8 requests,  128 tokens in,                        128 out
    W2  16 concurrent, 48 requests,  128 tokens in,                        128 out
    W3  16 concurrent, 32 requests, 1024 tokens in, 896 of them shared,     32 out

`--model random-1b` takes the model of `benchmarks.random_model` instead, beside llama.cpp with the same file, under other loads:

    L1   1 stream,      4 requests,  512 tokens in,                         64 out
    L8   8 concurrent, 16 requests,  128 tokens in,                         64 out

`--checkout DIR` measures another checkout beside this one, with the same options and the same prompts; DIR has its `.venv`.

The bounds are counted (`benchmarks.counting`) from what a thread does alone, measured before the first server starts, on the cores
that load generator, API, Redis and Celery left in those very runs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import random_model, records
from benchmarks.counting import Load, Machine, Served, serve_at_best
from benchmarks.served import Running, ServedError, Server, headrace, llama_cpp, peers, put_under, running, stop_on_sigterm
from gpu.checkpoint.architecture import ArchitectureConfig
from gpu.checkpoint.weights import open_checkpoint
from gpu.machine import available_cores

LOADS = {"warm": Load(4, 4, 64, 16), "W1": Load(1, 8, 128, 128), "W2": Load(16, 48, 128, 128), "W3": Load(16, 32, 128, 32, 896)}
LOADS |= {"L1": Load(1, 4, 512, 64), "L8": Load(8, 16, 128, 64)}
WORKS = {"smollm2": ("W1", "W2", "W3"), random_model.NAME: ("L1", "L8")}  # by model
FIGURES = {"ttft": "TTFT p50 ms", "tpot": "TPOT p50 ms", "output": "output tok/s", "total": "total tok/s", "memory": "peak MB"}
LESS_IS_BETTER = ("ttft", "tpot", "memory")
BOUNDED = {"W1": ("ttft", "tpot"), "W2": ("output",), "W3": ("total",), "L1": ("ttft", "tpot"), "L8": ("output",)}
ONE_CORE = ("W1", "L1")  # loads whose bound on one core is shown too: a single stream may be served by one thread

Runs = dict[str, dict[str, list[dict[str, Any]]]]  # load -> server -> its runs


def seed_of(work: str, number: int) -> int:
    """The seed of a load's prompts in a round: the same for all servers, and used by no other load or round."""
    return 1000 * list(LOADS).index(work) + number


def model_file(folder: Path, model: str) -> Path:
    """That headrace serves."""
    return folder / "models" / {"smollm2": "smollm2.q4_1.gguf", random_model.NAME: f"{random_model.NAME}.q4_k_m.gguf"}[model]


class Sitting:
    """Measures what FILE does not have yet."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.folder, self.out, self.works, self.rounds = options.peers_dir, options.out, options.works, options.rounds
        self.model = model_file(self.folder, options.model)
        self.failures: list[str] = []
        done = records.read(self.out, "run")
        self._done = {(run["round"], run["server"], run["work"]) for run in done}

    def measure_rates(self, servers: Iterable[Server]) -> None:
        measured = {record["options"] for record in records.read(self.out, "rates")}
        for server in servers:
            if server.options is not None and server.options not in measured:
                found = rates_of(self.model, server.options)
                records.append(self.out, {"kind": "rates", "options": server.options, "model": str(self.model), **found})

    def run(self, servers: list[Server]) -> None:
        for number in range(1, self.rounds + 1):
            for server in servers:
                missing = [work for work in self.works if (number, server.name, work) not in self._done]
                if not missing:
                    continue
                try:
                    with running(server) as at:
                        self._put_under(LOADS["warm"], server, at, seed_of("warm", number))
                        for work in missing:
                            self._measure(number, server, at, work)
                except ServedError as error:
                    self.failures.append(f"round {number}, {server.name}: {error}")
                    print(self.failures[-1], flush=True)

    def _measure(self, number: int, server: Server, at: Running, work: str) -> None:
        seed = seed_of(work, number)
        run = self._put_under(LOADS[work], server, at, seed)
        where = {"round": number, "server": server.name, "options": server.options, "work": work, "seed": seed}
        records.append(self.out, {"kind": "run", **where, "cores": available_cores(), **run})
        print(f"round {number}, {server.name}, {work}: " + ", ".join(f"{k} {v:.1f}" for k, v in run.items()), flush=True)

    def _put_under(self, load: Load, server: Server, at: Running, seed: int) -> dict[str, Any]:
        return put_under(load, server, at, self.folder / "models/smollm2-hf", self.folder / "vllm/bin/vllm", seed)


def rates_of(model: Path, options: str) -> dict[str, Any]:
    """The result of `benchmarks.rates`, run in its own process, for the numeric class that these options of headrace choose."""
    given, _ = numeric_options().parse_known_args(shlex.split(options))
    chosen = [f"--{name}={value}" for name, value in vars(given).items() if value is not None]
    command = [sys.executable, "-m", "benchmarks.rates", str(model), *chosen]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found


def numeric_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dtype")
    parser.add_argument("--quantization")
    return parser


def machine_of(rates: dict[str, Any], cores: float) -> Machine:
    """The machine that a record of kind `rates` describes."""
    by_rows = {int(rows): rate for rows, rate in rates["rates"].items()}
    return Machine(by_rows, rates["bandwidth"], rates["shared_bandwidth"], cores)


def median_of(runs: list[dict[str, Any]], figure: str) -> float:
    return float(statistics.median(run[figure] for run in runs))


def compare(work: str, results: dict[str, list[dict[str, Any]]]) -> Table:
    """Medians, and for headrace the ratio to the best peer of each figure (above 1 is better, for times and memory too)."""
    table = Table(title=f"{work}: medians; in brackets the ratio to the best peer, above 1 is better")
    table.add_column("", no_wrap=True)
    for title in ("runs", *FIGURES.values()):
        table.add_column(title, justify="right")
    rivals = {name: runs for name, runs in results.items() if runs[0]["options"] is None}
    for name, runs in results.items():
        cells = []
        for figure in FIGURES:
            value = median_of(runs, figure)
            ratio = ""
            if name not in rivals and rivals:
                best, theirs = best_peer(figure, rivals)
                ratio = f" ({theirs / value if figure in LESS_IS_BETTER else value / theirs:.2f}x {best})"
            cells.append(f"{value:,.1f}{ratio}")
        table.add_row(name, str(len(runs)), *cells)
    return table


def best_peer(figure: str, rivals: dict[str, list[dict[str, Any]]]) -> tuple[str, float]:
    """(name, median) of the peer that is best at a figure."""
    medians = {name: median_of(runs, figure) for name, runs in rivals.items()}
    best = (min if figure in LESS_IS_BETTER else max)(medians, key=medians.__getitem__)
    return best, medians[best]


def beside_bounds(results: Runs, rates: dict[str, dict[str, Any]], config: ArchitectureConfig) -> Table:
    """headrace's medians beside what the cores left could do."""
    table = Table(title="headrace beside the counted bound")
    table.add_column("", no_wrap=True)
    for title in ("load", "figure", "class", "engines", "cores taken", "cores left", "measured", "bound", "of the bound"):
        table.add_column(title, justify="right")
    for work, figures in BOUNDED.items():
        for name, runs in results.get(work, {}).items():
            found = rates.get(runs[0]["options"])
            if found is None:
                continue
            taken = median_of(runs, "taken")
            left = runs[0]["cores"] - taken
            engines = round(median_of(runs, "engines"))
            for cores in [left, 1.0] if work in ONE_CORE else [left]:
                best = serve_at_best(LOADS[work], config, found["weight_bytes"], machine_of(found, cores), engines)
                for figure in figures:
                    measured = median_of(runs, figure)
                    bound, share = beside(figure, measured, best)
                    where = [work, FIGURES[figure], found["class"], str(engines), f"{taken:.2f}", f"{cores:.2f}"]
                    table.add_row(name, *where, f"{measured:,.1f}", f"{bound:,.1f}", f"{share:.0%}")
    return table


def beside(figure: str, measured: float, best: Served) -> tuple[float, float]:
    """(bound, share of it reached)."""
    bound = getattr(best, figure)
    return bound, bound / measured if figure in LESS_IS_BETTER else measured / bound


def summarize(out: Path, console: Console) -> None:
    results: Runs = {}
    for run in records.read(out, "run"):
        results.setdefault(run["work"], {}).setdefault(run["server"], []).append(run)
    rates = {record["options"]: record for record in records.read(out, "rates")}
    for work in sorted(results):
        console.print(compare(work, results[work]))
    for found in rates.values():
        by_rows = ", ".join(f"{rows}: {rate / 1e9:.0f}" for rows, rate in found["rates"].items())
        memory = f"reads {found['bandwidth'] / 1e9:.1f} GB/s, all together {found['shared_bandwidth'] / 1e9:.1f}"
        console.print(
            f"{found['class']}: a step reads {found['weight_bytes'] / 1e6:.0f} MB; a thread {memory}; GFLOP/s by rows: {by_rows}"
        )
    if rates:
        with open_checkpoint(next(iter(rates.values()))["model"]) as checkpoint:
            console.print(beside_bounds(results, rates, checkpoint.config))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers-dir", type=Path)
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines: results of the runs, and which are done")
    parser.add_argument("--summarize", type=Path, metavar="FILE", help="print the tables of a FILE, run nothing")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=list(WORKS), default="smollm2", help="a FILE is of one model")
    parser.add_argument("--work", help="loads, separated by commas; default: all of the model")
    parser.add_argument(
        "--headrace", action="append", metavar="OPTIONS", help='options of a headrace to measure; repeatable; default: none, ""'
    )
    parser.add_argument(
        "--checkout", action="append", type=Path, metavar="DIR", help="another checkout of headrace, to measure it too; repeatable"
    )
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="a server to run, by its whole name, `headrace OPTIONS`; repeatable"
    )
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 180)
    if options.summarize:
        summarize(options.summarize, console)
        return
    if options.peers_dir is None or options.out is None:
        parser.error("--peers-dir and --out are needed, or --summarize")
    known = WORKS[options.model]
    options.works = options.work.split(",") if options.work else list(known)
    if unknown := set(options.works) - set(known):
        parser.error(f"--work: there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    model = model_file(options.peers_dir, options.model)
    rivals = peers(options.peers_dir) if options.model == "smollm2" else [llama_cpp(options.peers_dir, "llama-q4-k-m", model)]
    ours = [headrace(model, each) for each in options.headrace or [""]]
    earlier = [headrace(model, each, checkout) for checkout in options.checkout or [] for each in options.headrace or [""]]
    servers = [*rivals, *earlier, *ours]
    if unknown := set(options.only or ()) - {server.name for server in servers}:
        names = ", ".join(repr(server.name) for server in servers)
        parser.error(f"--only: there is no {', '.join(map(repr, sorted(unknown)))}; there are {names}")
    chosen = [server for server in servers if not options.only or server.name in options.only]
    stop_on_sigterm()
    sitting = Sitting(options)
    sitting.measure_rates(server for server in ours if server in chosen)  # a bound is of the classes of this checkout
    sitting.run(chosen)
    summarize(options.out, console)
    if sitting.failures:
        sys.exit("\n".join(["", "failed; the same command tries again:", *sitting.failures]))


if __name__ == "__main__":
    main()
