"""The output of `serve` at its start: the configuration with its sources, the engines' choices, and the ready line."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from engine.config import ServeConfig
from ops.derived import common_values, derived_values
from ops.settings import SETTINGS, Resolved, describe

if TYPE_CHECKING:
    from engine.protocol import EngineInfo

log = logging.getLogger(__name__)

NAME_WIDTH = max(map(len, SETTINGS)) + 2


def show_configuration(resolved: Resolved) -> None:
    """All settings as one JSON record; as text only those that are not defaults."""
    rows = describe(resolved)
    if resolved.config.log.log_format == "json":
        log.info("configuration", extra={"config": {name: {"value": value, "source": source} for _, name, value, source in rows}})
    else:
        _show((section, name, value or "not set", source) for section, name, value, source in rows if source != "default")


def show_derived(config: ServeConfig, infos: Sequence[EngineInfo], parallel: Mapping[str, str]) -> None:
    """The values that `serve` (`parallel`: its reasons) and the engines chose."""
    by_engine = [derived_values(config, info, parallel) for info in infos]
    if config.log.log_format == "json":
        for info, rows in zip(infos, by_engine, strict=True):
            facts = {name: {"value": value, "reason": reason} for name, value, reason in rows}
            log.info("values chosen by the engine", extra={"engine": info.slot, "config": facts})
    else:
        settled = common_values(by_engine)
        _show(("engine", name, str(value), reason) for name, choices in settled for value, reason in choices)


def show_ready(config: ServeConfig, url: str) -> None:
    """One line on stdout, with a command to paste."""
    name = config.api.served_model_name[0]
    key = ' -H "Authorization: Bearer $API_KEY"' if config.api.asks_for_keys else ""
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    # without a limit a small model may ramble to the end of its context
    body = json.dumps({"model": name, "stream": True, "temperature": 0.2, "max_tokens": 200, "messages": messages})
    quoted = body.replace("'", "'\\''")
    socket = f" --unix-socket {shlex.quote(config.api.uds)}" if config.api.uds else ""
    curl = f"curl -N{socket} {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{quoted}'"
    print(f"headrace serves {name} on {config.api.uds or url}; try: {curl}", flush=True)


def _show(rows: Iterable[tuple[str, str, str, str]]) -> None:
    """The section's name stands at its first row alone."""
    shown = ""
    for section, name, value, source in rows:
        print(f"{section if section != shown else '':<11}{name:<{NAME_WIDTH}}{value}  ({source})", file=sys.stderr)
        shown = section
