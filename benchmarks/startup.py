"""Where the time goes from the start of `headrace serve MODEL` to the first answer of /health, by processes and by phases.

    python -m benchmarks.startup MODEL [--headrace=OPTIONS] [--starts 3]

The first start packs weights and compiles kernels where that has not been done; it is shown for itself. Of the further ones, whose
packed weights are in the page cache, the fastest is shown. Run it while nothing else runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.served import QUIET, START_SECONDS, ServedError, headrace, stop_family, stop_on_sigterm
from benchmarks.text_table import text_table

LOOK_SECONDS = 0.05  # each look takes milliseconds of a core, which the start needs
# What a process is, by a part of its command line; the first that fits counts.
ROLES = {
    "gpu.worker_main": "worker",
    "ops.cli engine": "engine",
    "ops.cli api": "API server",
    "preparation.reader": "prompt reader",
    "valkey": "Valkey",
    "ops.cli maintenance": "maintenance",
    "ops.cli serve": "serve",
}


@dataclass
class Process:
    role: str
    born: float  # seconds since the start of `serve`
    cpu: float  # seconds of CPU time so far


@dataclass
class Start:
    seconds: float  # to the first answer
    processes: dict[int, Process]
    lines: list[tuple[float, str]]  # (seconds since the start, message) of the log


def role_of(command: list[str]) -> str | None:
    """The role of a process by its command line. None: it is about to run another program."""
    line = " ".join(command)
    return next((role for part, role in ROLES.items() if part in line), None)


def messages(log: str, began: float) -> Iterator[tuple[float, str]]:
    """The lines of a JSON log that tell a phase."""
    for line in log.splitlines():
        with contextlib.suppress(ValueError):
            record: dict[str, Any] = json.loads(line)
            yield datetime.fromisoformat(record["time"]).timestamp() - began, f"{record['role']}: {record['message']}"


def start(model: Path, options: str) -> Start:
    """Raises ServedError."""
    with socket.socket() as probe, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        command = [part.replace("{port}", str(port)).replace("{data}", folder) for part in headrace(model, options).command]
        with open(Path(folder) / "server.log", "w+") as log:
            began = time.time()
            process = subprocess.Popen([*command, "--log-format", "json"], env={**os.environ, **QUIET}, stdout=log, stderr=log)
            try:
                found = _watch(psutil.Process(process.pid), f"http://127.0.0.1:{port}/health", began, log.name)
                seconds = time.time() - began
            finally:
                stop_family(process)
        return Start(seconds, found, list(messages(Path(log.name).read_text(), began)))


def _watch(root: psutil.Process, url: str, began: float, log: str) -> dict[int, Process]:
    """Watch the processes until the server answers. The socket listens long before, so another thread waits for the answer."""
    found: dict[int, Process] = {}
    with ThreadPoolExecutor(1) as asking:
        answered = asking.submit(_ask, root, url, began)
        while not answered.done():
            _look(root, found)
            time.sleep(LOOK_SECONDS)
    _look(root, found)
    if not answered.result():
        raise ServedError(f"the server did not start:\n{Path(log).read_text()[-3000:]}")
    return found


def _ask(root: psutil.Process, url: str, began: float) -> bool:
    """Whether the server answers before it ends."""
    with httpx.Client(trust_env=False, timeout=5) as client:
        while root.is_running() and root.status() != psutil.STATUS_ZOMBIE and time.time() - began < START_SECONDS:
            with contextlib.suppress(httpx.HTTPError):
                if client.get(url).status_code == 200:
                    return True
            time.sleep(LOOK_SECONDS)
    return False


def _look(root: psutil.Process, found: dict[int, Process]) -> None:
    with contextlib.suppress(psutil.Error):
        for each in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                if role := role_of(each.cmdline()):
                    times = each.cpu_times()
                    found[each.pid] = Process(role, each.create_time() - root.create_time(), times.user + times.system)


def show(title: str, found: Start) -> None:
    print(
        f"\n{title}: {found.seconds:.2f} s to the first answer, {sum(each.cpu for each in found.processes.values()):.2f} s of CPU"
    )
    rows = [[each.role, f"{each.born:.2f}", f"{each.cpu:.2f}"] for each in sorted(found.processes.values(), key=lambda x: x.born)]
    print(text_table(["process", "born at", "CPU s"], rows))
    print(text_table(["at", "phase"], [[f"{at:.2f}", text[:100]] for at, text in found.lines if " configuration" not in text]))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--headrace", default="", metavar="OPTIONS", help="options of `headrace serve`")
    parser.add_argument("--starts", type=int, default=3, help="with packed weights")
    options = parser.parse_args()
    stop_on_sigterm()
    show("first start", start(options.model, options.headrace))
    if options.starts:
        further = [start(options.model, options.headrace) for _ in range(options.starts)]
        show(f"fastest of {options.starts} with packed weights", min(further, key=lambda each: each.seconds))


if __name__ == "__main__":
    main()
