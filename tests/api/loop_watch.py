"""How long an API server's event loop is busy: a client asks `/live` again and again while the test sends something else.

A process of its own asks (`python -m tests.api.loop_watch URL`), so that what the test does meanwhile is not measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from select import select
from types import TracebackType

import httpx

PAUSE_SECONDS = 0.005


@dataclass
class Waiting:
    """`longest`: of the answers to `/live`, in seconds; both are known after the measurement."""

    longest: float = 0.0
    count: int = 0


class LoopWatch:
    """Delays of the machine are measured at the same time and taken off: a sleep that ends late shows that there was no core
    for the asking process, and so perhaps none for the server."""

    def __init__(self, url: str) -> None:
        self._url = url

    @contextmanager
    def measure(self) -> Iterator[Waiting]:
        """Asks for as long as the context lasts."""
        waiting = Waiting()
        assert self._tell() == "asking"
        yield waiting
        waiting.longest, waiting.count = json.loads(self._tell())

    def _tell(self) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def __enter__(self) -> LoopWatch:
        command = [sys.executable, "-m", "tests.api.loop_watch", self._url]
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._process.communicate()


def main(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as http:
        http.get("/live")
        while sys.stdin.readline():
            print("asking", flush=True)
            longest, count = 0.0, 0
            while not select([sys.stdin], [], [], 0)[0]:
                started = time.perf_counter()
                time.sleep(PAUSE_SECONDS)
                asked = time.perf_counter()
                assert http.get("/live").status_code == 200
                took, late = time.perf_counter() - asked, asked - started - PAUSE_SECONDS
                longest, count = max(longest, took - late), count + 1
            sys.stdin.readline()
            print(json.dumps([longest, count]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
