"""A server under many times its capacity: refusals and how soon they come, throughput, memory, and what a second tenant notices.

    python -m benchmarks.overload [MODEL] [--seconds 60] [--factor 20] [--options "--max-num-seqs 8"]

Three phases with one `headrace serve`, whose queue may hold ten seconds of work. Two tenants send one request at a time each. One
tenant keeps the engine full, which is the capacity. Then that tenant sends so many times the capacity, whatever comes back, and the
second tenant again one request at a time. Without MODEL the null model runs, with steps of 30 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil

from benchmarks.served import MODEL_NAME, Server, headrace, running
from benchmarks.text_table import text_table
from ops.demo import fetch_demo

KEYS = {"flood": "key-flood", "other": "key-other"}
SETTINGS = "--api-key flood=key-flood --api-key other=key-other --max-queue-seconds 10"
PROMPT = "The water runs down the channel and turns the wheel of the mill, and then"
MAX_TOKENS = 32
PATIENCE = 60.0  # seconds that what was accepted gets to end, after the load


@dataclass
class Answer:
    tenant: str
    sent: float  # monotonic
    status: int = 0  # 0: the connection broke
    first_token: float = 0.0
    ended: float = 0.0
    num_tokens: int = 0


@dataclass
class Load:
    url: str
    answers: list[Answer] = field(default_factory=list)

    async def send(self, tenant: str) -> Answer:
        """One streamed request, over a connection of its own."""
        answer = Answer(tenant, time.monotonic())
        self.answers.append(answer)
        try:
            await self._exchange(answer)
        except (OSError, asyncio.IncompleteReadError, ValueError):
            answer.status = 0
        answer.ended = time.monotonic()
        return answer

    async def _exchange(self, answer: Answer) -> None:
        place = urlsplit(self.url)
        body = json.dumps(
            {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
        )
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nAuthorization: Bearer {KEYS[answer.tenant]}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
            )
            answer.status = int((await reader.readline()).split()[1])
            while line := await reader.readline():
                if line.startswith(b'data: {"id"') and b'"finish_reason":null' in line:
                    answer.first_token = answer.first_token or time.monotonic()
                    answer.num_tokens += 1
        finally:
            writer.close()

    async def one_by_one(self, tenant: str, until: float) -> None:
        while time.monotonic() < until:
            await self.send(tenant)

    async def at_rate(self, tenant: str, rate: float, until: float) -> list[asyncio.Task[Answer]]:
        tasks: list[asyncio.Task[Answer]] = []
        begun = time.monotonic()
        while (now := time.monotonic()) < until:
            due = int((now - begun) * rate)
            tasks += [asyncio.create_task(self.send(tenant)) for _ in range(due - len(tasks))]
            await asyncio.sleep(0.005)
        return tasks


def ttft(answers: list[Answer], tenant: str, share: float = 50) -> float:
    """A percentile of the seconds to the first token."""
    waits = [each.first_token - each.sent for each in answers if each.tenant == tenant and each.first_token]
    return float(np.percentile(waits, share)) if waits else float("nan")


def tokens_between(answers: list[Answer], begin: float, end: float) -> float:
    """Tokens a second, each answer's spread evenly over its time."""
    total = 0.0
    for each in answers:
        if each.first_token:
            length = max(each.ended - each.first_token, 1e-6)
            total += each.num_tokens * max(0.0, min(end, each.ended) - max(begin, each.first_token)) / length
    return total / (end - begin)


def memory(root: psutil.Process) -> dict[str, int]:
    """MiB by process."""
    found: dict[str, int] = {}
    for process in (root, *root.children(recursive=True)):
        try:
            words = [word for word in process.cmdline() if not word.startswith("-")]
            name = next((word for word in words if word in ("engine", "api", "serve", "maintenance")), Path(words[0]).name)
            found[f"{name} {process.pid}"] = process.memory_info().rss >> 20
        except (psutil.Error, IndexError):
            continue
    return found


async def measure(url: str, root: psutil.Process, seconds: float, factor: float, concurrency: int) -> list[tuple[str, str]]:
    for tenant in KEYS:  # the first request of all loads the tokenizer
        await Load(url).send(tenant)
    calm = Load(url)
    until = time.monotonic() + max(6.0, seconds / 6)
    await asyncio.gather(calm.one_by_one("flood", until), calm.one_by_one("other", until))

    full = Load(url)
    begin = time.monotonic()
    until = begin + max(5.0, seconds / 4)
    await asyncio.gather(*(full.one_by_one("flood", until) for _ in range(concurrency)))
    capacity = tokens_between(full.answers, begin + (until - begin) / 4, until)

    over = Load(url)
    begin, rate = time.monotonic(), factor * capacity / MAX_TOKENS
    until = begin + seconds
    other = asyncio.create_task(over.one_by_one("other", until))
    watch = asyncio.create_task(asyncio.sleep(seconds / 3))
    watch.add_done_callback(lambda _: before.update(memory(root)))
    before: dict[str, int] = {}
    tasks = await over.at_rate("flood", rate, until)
    after = memory(root)
    throughput = tokens_between(over.answers, begin + seconds / 6, until)
    _, late = await asyncio.wait([*tasks, other], timeout=PATIENCE)
    for task in late:
        task.cancel()
    statuses = Counter(each.status for each in over.answers if each.ended)
    refusals = [each.ended - each.sent for each in over.answers if each.status in (429, 503)]
    p99 = 1000 * float(np.percentile(refusals, 99)) if refusals else float("nan")
    calm_wait, wait = ttft(calm.answers, "other"), ttft(over.answers, "other")
    grown = ", ".join(f"{name} {before.get(name, 0)} -> {size}" for name, size in after.items())
    return [
        ("capacity, tokens/s", f"{capacity:.0f}"),
        ("arrivals, requests/s", f"{len(tasks) / seconds:.0f} ({len(tasks) / seconds * MAX_TOKENS / capacity:.1f} times capacity)"),
        ("answered", str(statuses[200])),
        ("refused with 429, 503", f"{statuses[429]}, {statuses[503]}"),
        ("broken, without an answer", f"{statuses[0]}, {len(late)}"),
        ("p99 of refusals, ms", f"{p99:.0f}"),
        ("throughput, of capacity", f"{throughput / capacity:.2f}"),
        ("second tenant's TTFT, ms", f"calm {1000 * calm_wait:.0f}, flooded {1000 * wait:.0f}: {wait / calm_wait:.1f} times"),
        ("its p95, ms", f"calm {1000 * ttft(calm.answers, 'other', 95):.0f}, flooded {1000 * ttft(over.answers, 'other', 95):.0f}"),
        ("memory, MiB", grown),
    ]


def server_of(model: Path | None, options: str) -> Server:
    if model is not None:
        return headrace(model, f"{SETTINGS} {options}")
    null = headrace(fetch_demo(), f"{SETTINGS} --load-format null --num-gpu-blocks-override 8000 {options}")
    return Server(null.name, null.command, {"HEADRACE_NULL_RUNNER": "step_seconds=0.03"}, null.options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=20.0)
    parser.add_argument("--concurrency", type=int, default=32, help="requests that keep the engine full; at least its seats")
    parser.add_argument("--options", default="--max-num-seqs 8", help="of headrace serve")
    given = parser.parse_args()
    with running(server_of(given.model, given.options)) as at:
        rows = asyncio.run(measure(at.url, at.root, given.seconds, given.factor, given.concurrency))
    print(text_table(("measured", "value"), rows))


if __name__ == "__main__":
    main()
