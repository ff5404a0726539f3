"""Requests and engines as people read them: tables on a terminal, whole lines in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.bus.records import RecordView
from engine.bus.usage import UsageRow
from engine.protocol import EngineInfo
from ops.requests import Request, timeline

PIPE_WIDTH = 400  # columns where there is no terminal: nothing is cut


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def show_requests(requests: Sequence[Request], now: float) -> None:
    """Print a table of requests. `now`: by Redis' clock, as all times of requests and engines are."""
    if not requests:
        console().print("no requests")
        return
    rows = []
    for request in requests:
        record = request.record
        until = record.finished or now
        rows.append(
            (
                record.id,
                _state(record),
                request.model,
                record.engine,
                record.tenant,
                record.endpoint,
                str(record.prompt_tokens),
                str(record.output_tokens),
                duration(until - record.enqueued) if record.enqueued else "",
                duration(now - record.finished) + " ago" if record.finished else "",
            )
        )
    headings = ("ID", "STATE", "MODEL", "ENGINE", "TENANT", "ENDPOINT", ">PROMPT", ">OUTPUT", ">TIME", ">ENDED")
    show_table(headings, rows)


def _state(record: RecordView) -> str:
    """One word of where a request is; whether the output of an ended one can still be read."""
    if record.state != "ended":
        return "orphaned" if record.state == "queued" and record.received else record.state
    return f"{record.reason}, dropped" if record.output_dropped else record.reason


def _place(request: Request) -> str:
    """Of a request that waits."""
    if request.num_before is None:
        return ""
    wait = "" if request.estimated_wait is None else f", about {duration(request.estimated_wait)}"
    return f"{request.num_before} requests{wait}"


def show_request(request: Request, others: Sequence[Request]) -> None:
    """One request: its facts, then where its time went."""
    record = request.record
    facts = [
        ("id", record.id),
        ("client's id", record.external_id),
        ("state", record.state + (f", {record.reason}" if record.reason else "") + (f": {record.error}" if record.error else "")),
        ("model", request.model + (f" (asked for as {record.model})" if record.model not in ("", request.model) else "")),
        ("endpoint", record.endpoint + (", streaming" if record.stream else "")),
        ("tenant", record.tenant),
        ("engine", record.engine),
        ("priority", str(record.priority) + (f", service tier {record.tier}" if record.tier else "")),
        ("before it", _place(request)),
        ("prompt", f"{record.prompt_tokens} tokens, {record.cached_tokens} of them from the prefix cache"),
        (
            "output",
            f"{record.output_tokens} of at most {record.max_tokens} tokens"
            + (f", {record.n} choices" if record.n > 1 else "")
            + ("; dropped from Redis, to make room for newer ones" if record.output_dropped else ""),
        ),
        ("engines that died", str(record.deaths) if record.deaths else ""),
        ("preemptions", str(record.preemptions)),
    ]
    grid = Table.grid(padding=(0, 2))
    for name, value in facts:
        if value:
            grid.add_row(Text(name, style="bold"), Text(value))
    console().print(grid)
    console().print()
    rows = []
    start = record.enqueued
    for row in timeline(record):
        at = datetime.fromtimestamp(row["time"]).strftime("%H:%M:%S.%f")[:-3]
        took = "" if row["seconds"] is None else duration(row["seconds"])
        rows.append((row["mark"].replace("_", " "), at, "+" + duration(row["time"] - start), took, row["then"] if took else ""))
    show_table(("MARK", "AT", ">SINCE START", ">TO THE NEXT", "MEANWHILE"), rows)
    if others:
        console().print(Text(f"\n{len(others)} more under this id: " + ", ".join(other.record.id for other in others)))


def show_engines(engines: Sequence[EngineInfo], now: float) -> None:
    if not engines:
        console().print("no engines")
        return
    rows = []
    for info in engines:
        stats = info.stats
        hits = f"{stats.prefix_cache_hits / stats.prefix_cache_queries:.0%}" if stats.prefix_cache_queries else ""
        rows.append(
            (
                info.model,
                info.slot,
                info.state,
                f"{info.pid}@{info.host}",
                f"{info.device} {info.dtype}" + (f" TP {info.tensor_parallel_size}" if info.tensor_parallel_size > 1 else ""),
                f"{stats.num_running}/{info.max_num_seqs}",
                str(stats.num_waiting),
                f"{stats.kv_cache_usage:.0%} of {info.num_blocks * info.block_size}",
                hits,
                str(stats.generation_tokens),
                str(info.max_model_len),
                duration(now - info.started),
            )
        )
    headings = (
        "MODEL",
        "ENGINE",
        "STATE",
        "PROCESS",
        "DEVICE",
        ">RUNNING",
        ">WAITING",
        ">KV TOKENS",
        ">HITS",
        ">OUTPUT",
        ">CONTEXT",
        ">UP",
    )
    show_table(headings, rows)


def show_usage(rows: Sequence[UsageRow]) -> None:
    if not rows:
        console().print("no usage")
        return
    headings = ("DAY", "MODEL", "TENANT", ">REQUESTS", ">PROMPT", ">CACHED", ">OUTPUT", "ENDED BY")
    cells = []
    for row in rows:
        totals = row.totals
        numbers = (totals.requests, totals.prompt_tokens, totals.cached_tokens, totals.output_tokens)
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(totals.reasons.items()) if count)
        cells.append((str(row.day), row.model, row.tenant, *(f"{number:,}" for number in numbers), reasons))
    show_table(headings, cells)


def show_table(headings: Iterable[str], rows: Iterable[Sequence[str]]) -> None:
    """A heading with a leading `>` is aligned right. Cells come from clients: they are text, never markup."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console().print(table)


def duration(seconds: float) -> str:
    """Two or three digits that a person can take in: 4.2 ms, 310 ms, 2.35 s, 5 m 12 s, 3 h 20 m."""
    if seconds < 0.01:
        return f"{max(0.0, seconds) * 1000:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} m {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} m"
