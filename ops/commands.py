"""The commands that read and act through Redis, and `simulate`. Each imports its own code when it runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import date
from typing import Any

import click

from ops.errors import CommandError


def bus_options(function: Any) -> Any:
    """The options that say where Redis is and in which form to answer."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="print JSON instead of a table"),
        click.option("--model", metavar="NAME", help="only this model"),
        click.option(
            "--data-dir", default="", metavar="DIR", envvar="HEADRACE_DATA_DIR", help="data directory of the `serve` to ask"
        ),
        click.option(
            "--redis-url", default="", metavar="URL", envvar="HEADRACE_REDIS_URL", help="Redis to ask, instead of a `serve`"
        ),
    ):
        function = option(function)
    return function


def _day(value: str) -> date:
    try:
        return date.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(f"`{value}` is not a day; write it as 2026-01-31") from None


@click.command()
@bus_options
@click.option("-a", "--all", "everything", is_flag=True, help="also requests that have ended and whose records are kept")
def ps(redis_url: str, data_dir: str, model: str | None, as_json: bool, everything: bool) -> None:
    """List requests that wait or run, newest first."""
    from engine.bus.clock import redis_time
    from ops import requests, tables

    with requests.connect(_redis_url(redis_url, data_dir)) as bus:
        found = requests.live(bus, model) + (requests.ended(bus, model) if everything else [])
        now = bus.run(redis_time())
    if as_json:
        _print_json([request.json() for request in found])
    else:
        tables.show_requests(found, now)


@click.command(short_help="Show a request and where its time went.")
@bus_options
@click.argument("request_id", metavar="ID")
def inspect(redis_url: str, data_dir: str, model: str | None, as_json: bool, request_id: str) -> None:
    """Show a request and where its time went.

    ID is the client's, the answer's or headrace's own. Of several requests with one ID the newest is shown.
    """
    from ops import requests, tables

    with requests.connect(_redis_url(redis_url, data_dir)) as bus:
        newest, *others = requests.find(bus, request_id, model)
        newest = requests.with_place(bus, newest)
    if as_json:
        _print_json({**newest.json(), "others": [other.record.id for other in others]})
    else:
        tables.show_request(newest, others)


@click.command(short_help="End requests and wait until they are over.")
@bus_options
@click.option("--all", "everything", is_flag=True, help="all requests that wait or run")
@click.option(
    "--timeout", type=float, default=30.0, show_default=True, metavar="SECONDS", help="longest wait for the engines' confirmation"
)
@click.argument("request_ids", metavar="[ID]...", nargs=-1)
def abort(
    redis_url: str, data_dir: str, model: str | None, as_json: bool, everything: bool, timeout: float, request_ids: tuple[str, ...]
) -> int:
    """End requests, wait until they are over and their memory is free, and print how many tokens each has made.

    A client's ID ends all live requests with that ID. The exit status is 1 if an engine did not confirm in time.
    """
    from ops import requests

    if everything == bool(request_ids):
        raise click.UsageError("give the IDs of requests, or --all instead")
    with requests.connect(_redis_url(redis_url, data_dir)) as bus:
        targets = requests.live(bus, model) if everything else requests.to_abort(bus, request_ids, model)
        results = requests.abort(bus, targets, timeout)
    if as_json:
        _print_json([{"id": result.id, "state": result.state, "output_tokens": result.output_tokens} for result in results])
    else:
        for result in results:
            click.echo(f"{result.id}: {result.state}, {result.output_tokens} tokens made")
        if not results:
            click.echo("no requests")
    return 0 if all(result.is_over for result in results) else 1


@click.command(short_help="Move a request that waits.", context_settings={"ignore_unknown_options": True})
@bus_options
@click.argument("request_id", metavar="ID")
@click.argument("value", metavar="N", type=click.IntRange(-(2**53), 2**53))
def priority(redis_url: str, data_dir: str, model: str | None, as_json: bool, request_id: str, value: int) -> int:
    """Give requests that wait the priority N, under either scheduling policy: lower values are taken first.

    A client's ID moves all its requests that wait. The exit status is 1 if none of them waited any more.
    """
    from ops import requests

    with requests.connect(_redis_url(redis_url, data_dir)) as bus:
        results = requests.prioritize(bus, request_id, value, model)
    if as_json:
        _print_json([{"id": request.record.id, "moved": moved} for request, moved in results])
    else:
        for request, moved in results:
            click.echo(f"{request.record.id}: {f'priority {value}' if moved else 'an engine has taken it, it was not moved'}")
        if not results:
            click.echo("the request has ended")
    return 0 if any(moved for _, moved in results) else 1


@click.command(short_help="List living engines.")
@bus_options
def engines(redis_url: str, data_dir: str, model: str | None, as_json: bool) -> None:
    """List living engines: their requests, their KV use and their limits."""
    import msgspec

    from engine.bus.clock import redis_time
    from ops import requests, tables

    with requests.connect(_redis_url(redis_url, data_dir)) as bus:
        found = requests.engines(bus, model)
        now = bus.run(redis_time())
    if as_json:
        _print_json(msgspec.to_builtins(found))
    else:
        tables.show_engines(found, now)


@click.command(short_help="Have an engine end in order.")
@bus_options
@click.option("--handover", is_flag=True, help="do not finish its requests: other engines continue them")
@click.option("--timeout", type=float, metavar="SECONDS", help="longest wait for its end; default: as long as it takes")
@click.argument("engine", metavar="ENGINE")
def drain(
    redis_url: str, data_dir: str, model: str | None, as_json: bool, handover: bool, timeout: float | None, engine: str
) -> int:
    """Have an engine take no more requests, finish those that it has, and end. Wait until it has ended.

    ENGINE is its number in `headrace engines`. Under `serve` the engine is started again. The exit status is 1 if it did not end in
    time; it goes on draining then.
    """
    from ops import requests
    from ops.drain import drain as run

    with requests.connect(_redis_url(redis_url, data_dir)) as bus:
        drained = run(bus, engine, model, handover, timeout)
    if as_json:
        _print_json(asdict(drained))
    else:
        click.echo(f"engine {drained.engine} of {drained.model}: {drained.state}")
    return 0 if drained.state == "ended" else 1


@click.command(short_help="Replace the processes of a `serve` one by one.")
@click.option("--data-dir", default="", metavar="DIR", envvar="HEADRACE_DATA_DIR", help="data directory of the `serve`")
@click.option("--pid", type=int, metavar="PID", help="process of the `serve`, if it uses a Redis of your own")
@click.option(
    "--timeout",
    type=float,
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="that an API server gets to finish its streams",
)
@click.argument("names", metavar="[NAME]...", nargs=-1)
def restart(data_dir: str, pid: int | None, timeout: float, names: tuple[str, ...]) -> None:
    """Replace the processes of a running `serve` one by one, without a request that fails.

    NAME is a process as its log names it (engine-0), or a role: engine, api, maintenance. Without a name all of them are replaced,
    in that order; Valkey and `serve` itself go on. It stops at the first process that cannot be replaced.
    """
    from ops.control_socket import ask
    from ops.embedded import serving_pid

    ask(serving_pid(data_dir) if pid is None else pid, {"restart": list(names), "timeout": timeout}, click.echo)


@click.command()
@bus_options
@click.option("--since", type=_day, metavar="DAY", help="first day, as in 2026-01-31, UTC")
@click.option("--until", type=_day, metavar="DAY", help="last day")
def usage(redis_url: str, data_dir: str, model: str | None, as_json: bool, since: date | None, until: date | None) -> None:
    """Sum up requests and tokens by day, model and tenant."""
    from ops import requests, tables
    from ops.usage import usage_rows

    if since and until and until < since:
        raise click.UsageError(f"--until {until} is before --since {since}")
    with requests.connect(_redis_url(redis_url, data_dir)) as bus:
        wanted = requests.models(bus, model)
        rows = [row for row in usage_rows(bus, since, until) if row.model in wanted]
    if as_json:
        facts = [{"day": str(row.day), "model": row.model, "tenant": row.tenant, **asdict(row.totals)} for row in rows]
        _print_json(facts)
    else:
        tables.show_usage(rows)


@click.command(short_help="Show what the scheduler does with a load.")
@click.option("--max-num-batched-tokens", type=int, default=2048, show_default=True, metavar="N", help="most tokens of a step")
@click.option("--max-num-seqs", type=int, default=256, show_default=True, metavar="N", help="most requests that run at once")
@click.option("--block-size", type=int, default=16, show_default=True, metavar="N", help="tokens in a KV block")
@click.option(
    "--free-blocks",
    "num_free_blocks",
    type=int,
    metavar="N",
    help="KV blocks left free by the decodes; default: enough",
)
@click.option("--decodes", "num_decodes", type=int, default=0, show_default=True, metavar="N", help="requests that already decode")
@click.option(
    "--decode-context", type=int, default=1, show_default=True, metavar="N", help="tokens that each decode has in the KV cache"
)
@click.option("--decode-tokens", type=int, default=1024, show_default=True, metavar="N", help="tokens that each decode still makes")
@click.option("--prompt", "prompts", type=int, multiple=True, metavar="N", help="a request with a prompt of N tokens; repeatable")
@click.option("--priority", "priorities", type=int, multiple=True, metavar="N", help="priorities of the prompts, in their order")
@click.option("--output-tokens", type=int, default=4, show_default=True, metavar="N", help="output tokens of each prompt")
@click.option("--scheduling-policy", type=click.Choice(["fcfs", "priority"]), default="fcfs", show_default=True)
@click.option(
    "--long-prefill-token-threshold", type=int, default=0, metavar="N", help="most tokens of one prompt in a step; 0: no limit"
)
@click.option("--shrink-chunks", is_flag=True, help="if blocks are short for a chunk, compute the part that fits")
@click.option("--watermark", type=float, default=0.0, metavar="X", help="share of the blocks that admission keeps free")
@click.option("--max-steps", type=int, default=64, show_default=True, metavar="N", help="most steps to show")
@click.option("--json", "as_json", is_flag=True, help="print JSON, one object a step")
def simulate(as_json: bool, **load: Any) -> None:
    """Show, step by step, what the real scheduler does with a load, without a model.

    \b
    headrace simulate --max-num-batched-tokens 1024 --decodes 2 --prompt 1800
    """
    from engine.scheduling.simulate import Load, render
    from engine.scheduling.simulate import simulate as run

    if not load["prompts"] and not load["num_decodes"]:
        raise click.UsageError("there is nothing to compute: give --prompt or --decodes")
    try:
        steps = list(run(Load(**load)))
    except ValueError as error:
        raise CommandError(str(error)) from None
    for line in (json.dumps(asdict(step)) for step in steps) if as_json else render(steps):
        click.echo(line)


def _redis_url(named: str, data_dir: str) -> str:
    from ops.embedded import redis_url

    return redis_url(named, data_dir)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))
