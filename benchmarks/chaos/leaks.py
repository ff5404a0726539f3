"""What must not be left when all requests have ended: blocks, open requests, Redis keys, file descriptors and threads."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import psutil

from benchmarks.chaos.cluster import Cluster

IDLE_SECONDS = 60.0  # for the last requests to be gone from engines and Redis
SWEEP_SECONDS = 90.0  # beyond the retention, for maintenance to remove what ended requests left
REST_SECONDS = 8.0  # after which idle connections are closed
# Connections to Redis that a pool made under load and keeps, and those of Celery that wait for the garbage collector
SPARE_DESCRIPTORS = 16
SPARE_THREADS = 8  # of pools that grow to a limit
FOR_EVER = -1  # Redis' answer to PTTL
_ID = re.compile(r"\{[^}]*\}|[0-9a-f]{8}-[0-9a-f-]{20,}|(?<=:)[^:]*-[0-9a-f]{8}\b|\d+")
# One each for the model, an engine or Celery, or sums that are meant to stay
KEPT = (
    "models",
    "slots",
    "slot:",
    "owner:",
    "claim:",
    "control:",
    "shares",
    "asked",
    "takers",
    "progress:",
    "journals",
    "incarnation",
    "tokenizer:",
    "served",
)
SUMS = ("usage", "apis", "api:")
OTHERS = ("_kombu", "unacked", "celery")


@dataclass
class Baseline:
    """What each role has when it is idle, after the calm run."""

    descriptors: Counter[str] = field(default_factory=Counter)
    threads: Counter[str] = field(default_factory=Counter)
    keys: Counter[str] = field(default_factory=Counter)


async def baseline(cluster: Cluster) -> Baseline:
    await asyncio.sleep(REST_SECONDS)
    found = Baseline(keys=await key_kinds(cluster))
    for name, processes in _processes(cluster).items():
        found.descriptors[name] = sum(process.num_fds() for process in processes)
        found.threads[name] = sum(process.num_threads() for process in processes)
    return found


async def leaked_blocks(cluster: Cluster) -> list[str]:
    """Engines that say that blocks are in use, or requests run, long after the last one ended."""

    async def busy() -> list[str]:
        found = []
        for name in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"):
            series = await cluster.metric(cluster.urls[0], name)
            found += [f"{labels} {value}" for labels, value in series.items() if value]
            if not series:
                found.append("no answer of the API server")
        return found

    return await _until_none(busy, IDLE_SECONDS)


async def stuck_requests(cluster: Cluster) -> list[str]:
    """Requests that Redis has as live although no client waits for any."""
    return await _until_none(cluster.live_requests, IDLE_SECONDS)


async def left_keys(cluster: Cluster, before: Baseline) -> list[str]:
    """Kinds of keys of which there are more than before, once the records' retention is over."""

    allowed = before.keys | Counter({"journal:*:*": len(cluster.engines)})  # a living engine has one

    async def more() -> list[str]:
        kinds = await key_kinds(cluster)
        return [f"{kind}: {count} instead of {allowed[kind]}" for kind, count in kinds.items() if count > allowed[kind]]

    return await _until_none(more, cluster.options.retention + SWEEP_SECONDS)


async def key_kinds(cluster: Cluster) -> Counter[str]:
    """Keys of requests and of dead processes that no time to live removes, by kind: their names with ids taken out."""
    kinds: Counter[str] = Counter()
    async for name in cluster.redis.client.scan_iter(count=1000):
        kind = name.decode(errors="replace").removeprefix("headrace:")
        kind = re.sub(r"^\{[^}]*\}:", "", kind)
        if not kind.startswith((*KEPT, *SUMS, *OTHERS)) and await cluster.redis.client.pttl(name) == FOR_EVER:
            kinds[_ID.sub("*", kind)] += 1
    return kinds


async def leaked_resources(cluster: Cluster, before: Baseline) -> list[str]:
    """Processes with more descriptors or threads than their role had when it was idle before."""

    async def more() -> list[str]:
        found = []
        for name, processes in _processes(cluster).items():
            descriptors = sum(process.num_fds() for process in processes)
            threads = sum(process.num_threads() for process in processes)
            if descriptors > before.descriptors[name] + SPARE_DESCRIPTORS:
                found.append(f"{name}: {descriptors} descriptors, {before.descriptors[name]} before")
            if threads > before.threads[name] + SPARE_THREADS:
                found.append(f"{name}: {threads} threads, {before.threads[name]} before")
        for url in cluster.urls:
            found += [f"{url} has {count:.0f} requests open" for count in await _open_requests(cluster, url) if count]
        return found

    return await _until_none(more, 3 * REST_SECONDS)


async def _open_requests(cluster: Cluster, url: str) -> list[float]:
    return list((await cluster.metric(url, "server_load")).values())


def _processes(cluster: Cluster) -> dict[str, list[psutil.Process]]:
    """By role. One that ends at this moment counts for nothing."""
    found = {}
    for role in cluster.roles:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[role.name] = role.tree()
    return found


async def _until_none(look: Callable[[], Awaitable[list[str]]], seconds: float) -> list[str]:
    """What `look` still finds after so many seconds; empty as soon as it finds nothing."""
    deadline = time.monotonic() + seconds
    while found := await look():
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.5)
    return found
