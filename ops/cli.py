"""The command line. A command imports its own code when it runs: `headrace ps` loads neither torch nor FastAPI."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any, ClassVar

import click

from ops.commands import abort, drain, engines, inspect, priority, ps, restart, simulate, usage
from ops.errors import CommandError
from ops.options import SettingsCommand, given, setting_options
from ops.redis_url import parse_redis_url
from ops.settings import Resolved, resolve

COLLECT_AFTER = 50_000  # objects more than were freed; imports free none, and take a tenth longer with Python's own number, 700
CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
    "token_normalize_func": lambda name: name.replace("_", "-"),  # --max_model_len, as vLLM takes it too
}
config_option = click.option(
    "--config", "config_file", metavar="FILE", help="YAML file with a line `name: value` for each setting; flags win"
)
progress_option = click.option("--progress-fd", type=int, hidden=True)


class Commands(click.Group):
    """Commands in the order of their writing, which is the order of a first day with headrace."""

    ALIASES: ClassVar = {"worker": "maintenance"}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, self.ALIASES.get(cmd_name, cmd_name))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=Commands, context_settings=CONTEXT)
@click.version_option(None, "-V", "--version", prog_name="headrace", package_name="headrace")
def cli() -> None:
    """An LLM inference server on Redis streams, with an OpenAI-compatible API.

    \b
    headrace serve demo            a small model, fetched when first used
    headrace serve PATH            a safetensors directory or a .gguf file
    headrace ps                    requests that run or wait
    headrace inspect ID            a request, and where its time went
    headrace abort ID              end a request, with confirmation
    headrace priority ID N         move a request that waits
    """


@cli.command(cls=SettingsCommand, short_help="Serve a model with all processes on this machine.")
@config_option
@setting_options(("model", "cache", "parallel", "scheduler", "redis", "api", "log"))
def serve(config_file: str | None, **values: Any) -> int:
    """Serve MODEL: a safetensors directory, a .gguf file, or `demo` (SmolLM2-135M-Instruct, fetched when first used).

    Starts an embedded Valkey unless --redis-url is given, the API servers, engines with their workers, and the maintenance
    process. It restarts processes that die, and stops all of them on Ctrl-C or SIGTERM. Every option is also an environment
    variable (HEADRACE_MAX_MODEL_LEN) and a line of the --config file (max-model-len: 4096).
    """
    from ops.logs import begin_logging
    from ops.serve import serve as run

    resolved = resolve(given(values), os.environ, config_file)
    begin_logging(resolved, "serve")
    return run(resolved)


@cli.command(cls=SettingsCommand, short_help="Run one API server on a Redis of your own.")
@config_option
@setting_options(("redis", "api", "log"))
@click.option("--fd", type=int, hidden=True, help="listening socket to inherit")
@progress_option
def api(config_file: str | None, fd: int | None, progress_fd: int | None, **values: Any) -> int:
    """Run one API server on the Redis of --redis-url. It serves every model that has a live engine there."""
    from ops.roles import run_api

    return run_api(_with_redis(resolve(given(values), os.environ, config_file)), fd, progress_fd)


@cli.command(cls=SettingsCommand, short_help="Run one engine with its workers on a Redis of your own.")
@config_option
@setting_options(("model", "cache", "parallel", "scheduler", "redis", "log"), more=("served_model_name", "shutdown_timeout"))
@progress_option
def engine(config_file: str | None, progress_fd: int | None, **values: Any) -> int:
    """Run one engine with its workers on the Redis of --redis-url, where API servers find it."""
    from ops.roles import run_engine

    return run_engine(_with_redis(resolve(given(values), os.environ, config_file)), progress_fd)


@cli.command(cls=SettingsCommand, short_help="Run the maintenance process on a Redis of your own.")
@config_option
@setting_options(("redis", "log"))
@click.option("--of-serve", is_flag=True, hidden=True, help="started by `serve`, which tells when it is up")
def maintenance(config_file: str | None, of_serve: bool, **values: Any) -> int:
    """Run Celery with beat on the Redis of --redis-url.

    It ends the requests that dead processes left, expires records, and sums usage.

    `headrace worker` is an older name of this command.
    """
    from ops.roles import run_maintenance

    return run_maintenance(_with_redis(resolve(given(values), os.environ, config_file)), of_serve)


for command in (ps, inspect, abort, priority, engines, drain, restart, usage, simulate):
    cli.add_command(command)


@cli.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as distribution_version

    click.echo(distribution_version("headrace"))


@cli.command("config-docs", hidden=True)
def config_docs() -> None:
    """Print docs/configuration.md, made from the configuration tree."""
    from ops.reference import configuration_markdown

    click.echo(configuration_markdown(), nl=False)


def _with_redis(resolved: Resolved) -> Resolved:
    """The Redis that is named, as one URL for all its readers, else that of the `serve` on this machine."""
    redis = resolved.config.redis
    if redis.redis_url:
        resolved.derive("redis_url", str(parse_redis_url(redis.redis_url)), resolved.sources["redis_url"])
    else:
        from ops.embedded import redis_url

        resolved.derive("redis_url", redis_url("", redis.data_dir), "the `serve` that runs here")
    return resolved


def main(arguments: list[str] | None = None) -> None:
    """Entry point. An error that a user can mend is one line. The exit status is the command's return value."""
    gc.set_threshold(COLLECT_AFTER, 20, 20)
    try:
        status = cli.main(arguments, prog_name="headrace", standalone_mode=False)
    except click.exceptions.Abort:
        status = 130
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except CommandError as error:
        click.echo(f"headrace: {error}", err=True)
        status = error.exit_code
    except BrokenPipeError:  # `headrace ps | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status or 0)


if __name__ == "__main__":
    main()
