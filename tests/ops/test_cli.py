"""The command line: help, one-line errors, imports that stay lazy, and the commands that need no server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ops.cli import cli
from ops.settings import SETTINGS

HEAVY = ("torch", "numba", "transformers", "fastapi", "celery", "uvicorn")
COMMANDS = [
    "serve",
    "api",
    "engine",
    "maintenance",
    "ps",
    "inspect",
    "abort",
    "priority",
    "engines",
    "drain",
    "restart",
    "usage",
    "simulate",
    "version",
]


def headrace(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")} | variables
    command = [sys.executable, "-P", "-m", "ops.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment)


def test_help_lists_the_commands_in_the_order_of_use() -> None:
    text = CliRunner().invoke(cli, ["--help"]).stdout
    listed = [line.split()[0] for line in text.split("Commands:\n")[1].splitlines()]
    assert listed == COMMANDS
    assert "headrace serve demo" in text
    assert "..." not in text.split("Commands:")[1], "a short help is cut"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_for_every_option(command: str) -> None:
    result = CliRunner().invoke(cli, [command, "-h"])
    assert result.exit_code == 0
    for parameter in cli.commands[command].params:
        if getattr(parameter, "hidden", False) or parameter.param_type_name == "argument":
            continue
        assert parameter.opts[0] in result.stdout
        assert getattr(parameter, "help", "") or getattr(parameter.type, "choices", ()), f"{command} {parameter.name} has no help"


def test_an_older_name_of_a_command_is_understood() -> None:
    result = CliRunner().invoke(cli, ["worker", "-h"])
    assert result.exit_code == 0 and "older name" in result.stdout


def test_serve_has_a_flag_for_every_setting_under_the_title_of_its_section() -> None:
    text = CliRunner().invoke(cli, ["serve", "--help"], terminal_width=200).stdout
    assert {setting.flag for setting in SETTINGS.values()} <= set(text.split())
    titles = ["Options", "Model", "KV cache", "Parallelism", "Scheduler", "Redis", "API server", "Logs"]
    assert [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")] == titles


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (["serve"], 78, "headrace: no model is given: name a safetensors directory, a .gguf file, or `demo`"),
        (["serve", "demo", "--tensor-parallel-size", "0"], 78, "headrace: --tensor-parallel-size must be at least 1, got 0"),
        (["serve", "demo", "-tp", "0"], 78, "headrace: --tensor-parallel-size must be at least 1, got 0"),
        (
            ["serve", "demo", "--gpu_memory_utilization", "92"],
            78,
            "headrace: --gpu-memory-utilization must be above 0",
        ),
        (["serve", "demo", "--host", "0.0.0.0"], 78, "headrace: 0.0.0.0 can be reached from other machines: give an --api-key"),
        (["serve", "demo", "--host", "no.such.host.invalid"], 78, "headrace: cannot listen on no.such.host.invalid:8000: no such"),
        (["serve", "demo", "--port", "70000"], 78, "headrace: --port must be between 0 and 65535, not 70000"),
        (["serve", "/no/such/model"], 78, "headrace: there is no model at /no/such/model: give a safetensors directory"),
        (["serve", "demo", "--max-num-seqs", "0"], 78, "headrace: --max-num-seqs must be at least 1, got 0"),
        (["serve", "demo", "--api-key", "secret"], 78, "headrace: --api-key: an API key must be NAME=KEY or NAME:admin=KEY"),
        (["serve", "demo", "--port", "high"], 2, "--port: `high` is not a whole number"),
        (["serve", "demo", "--dtype", "int3"], 2, "--dtype: `int3` is not one of auto, float32, bfloat16"),
        (["serve", "demo", "--max-modellen", "5"], 2, "--max-model-len"),
        (["serve", "demo", "--model", "other"], 2, "model is given twice: `demo` and `other`"),
        (["serve", "demo", "--config", "absent.yaml"], 78, "headrace: cannot read the configuration file absent.yaml"),
        (["serve", "demo", "-tp", "2", "--distributed-executor-backend", "uni"], 78, "backend uni runs one rank only; --"),
        (["serve", "demo", "-dp", "2", "--data-parallel-rank", "2"], 78, "headrace: --data-parallel-rank counts from 0"),
        (["serve", "demo", "--cuda-graph-sizes", "0"], 78, "headrace: --cuda-graph-sizes must each be at least 1"),
        (["serve", "demo", "--data-parallel-rank", "-1"], 78, "headrace: --data-parallel-rank must not be negative, got -1"),
        (["usage", "--since", "yesterday"], 2, "Invalid value for '--since': `yesterday` is not a day; write it as 2026-01-31"),
        (["usage", "--since", "2026-12-05", "--until", "2026-12-01"], 2, "--until 2026-12-01 is before --since 2026-12-05"),
        (["simulate"], 2, "there is nothing to compute: give --prompt or --decodes"),
        (["ps", "--data-dir", "/no/such/place"], 1, "headrace: no `headrace serve` runs on /no/such/place"),
        (["engine", "demo", "--data-dir", "/no/such/place"], 1, "headrace: no `headrace serve` runs on /no/such/place"),
        (["simulate", "--decodes", "300"], 1, "headrace: 300 running decodes are more than max_num_seqs 256"),
        (["pss"], 2, "No such command 'pss'"),
    ],
)
def test_mistakes_are_told_without_a_traceback(arguments: list[str], status: int, complaint: str) -> None:
    done = headrace(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert complaint in done.stderr and "Traceback" not in done.stderr
    if status != 2:  # click puts its usage line before what is wrong with the usage
        assert len(done.stderr.splitlines()) == 1


def test_settings_come_from_the_environment_and_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "headrace.yaml").write_text("model: demo\nhost: 0.0.0.0\n")
    done = headrace("serve", "--config", str(tmp_path / "headrace.yaml"))
    assert "0.0.0.0 can be reached from other machines" in done.stderr
    done = headrace("serve", HEADRACE_MODEL="demo", HEADRACE_PORTT="1")
    assert done.stderr == "headrace: unknown environment variable HEADRACE_PORTT; did you mean `HEADRACE_PORT`?\n"


def test_variables_that_kubernetes_sets_for_a_service_of_this_name_are_reported_and_ignored() -> None:
    service = {"HEADRACE_SERVICE_HOST": "10.96.4.7", "HEADRACE_PORT": "tcp://10.96.4.7:8000"}
    done = headrace("serve", "demo", "--host", "no.such.host.invalid", **service)
    warning, complaint = done.stderr.splitlines()
    assert "HEADRACE_PORT, HEADRACE_SERVICE_HOST" in warning and "enableServiceLinks" in warning
    assert complaint == "headrace: cannot listen on no.such.host.invalid:8000: no such address"


def test_the_request_commands_load_no_heavy_module(redis_url: str) -> None:
    program = f"""
import sys
from ops.cli import main
try:
    main(["ps", "--redis-url", {redis_url!r}])
except SystemExit as end:
    assert not end.code, end.code
print(sorted(name for name in {HEAVY!r} if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.stdout.splitlines() == ["no requests", "[]"], done.stderr


@pytest.mark.parametrize(
    ("module", "late"),
    [
        ("ops.serve", "numpy redis httpx rich prometheus_client celery"),  # until its children have begun
        ("ops.roles", "numpy redis httpx rich prometheus_client celery"),
        ("engine.runtime.process", "redis asyncio tokenizers engine.scheduling.scheduler"),  # until its workers have begun
        ("engine.runtime.serving", "fastapi celery"),  # at all
        ("gpu.worker_main", "numpy msgspec"),  # until it dies with its parent
    ],
)
def test_what_begins_processes_loads_nothing_that_they_would_wait_for(module: str, late: str) -> None:
    unwanted = {*HEAVY, *late.split()}
    program = f"import sys, {module}; print(sorted({unwanted!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.stdout == "[]\n", done.stderr


def test_a_reader_that_leaves_early_is_no_error(redis_url: str) -> None:
    command = f"{sys.executable} -P -m ops.cli ps --json --redis-url '{redis_url}' | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30)
    assert done.stderr == ""


def test_version_is_printed_by_command_and_option() -> None:
    from importlib.metadata import version

    assert headrace("version").stdout == version("headrace") + "\n"
    assert headrace("--version").stdout.strip().endswith(version("headrace"))


def test_simulate_shows_the_chunks_of_a_long_prompt() -> None:
    load = ["--max-num-batched-tokens", "1024", "--decodes", "2", "--prompt", "1800", "--output-tokens", "1"]
    text = headrace("simulate", *load).stdout
    assert "1024 tokens = 2 decodes + prompt 1: 1022 tokens" in text
    steps = [json.loads(line) for line in headrace("simulate", *load, "--json").stdout.splitlines()]
    assert [step["chunks"]["prompt 1"][0] for step in steps[:2]] == [1022, 778]
    assert steps[0]["num_decodes"] == 2 and "prompt 1" in steps[1]["finished"]
