"""OpenAI's Codex, as npm has it, works with headrace: one prompt, one tool call, one answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.api.live_server import LiveServer
from tests.conftest import TEST_CACHE

pytestmark = pytest.mark.clients

VERSION = "0.171.0"
CALL = {"name": "exec_command", "arguments": {"cmd": "cat notes.txt"}}
RULES = [{"match": "read my notes", "answer": [f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>", "The notes say: buy milk."]}]
CONFIG = """
model = "{name}"
model_provider = "headrace"
model_context_window = 32768
approval_policy = "never"
sandbox_mode = "danger-full-access"
web_search = "disabled"

[model_providers.headrace]
name = "headrace"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


@pytest.fixture(scope="module")
def codex() -> Path:
    """The command, installed once."""
    folder = TEST_CACHE / f"codex-{VERSION}"
    command = folder / "node_modules" / ".bin" / "codex"
    if not command.exists():
        npm = shutil.which("npm")
        assert npm is not None, "this test needs npm"
        folder.mkdir(parents=True, exist_ok=True)
        arguments = ("install", "--no-fund", "--no-audit", "--prefix", str(folder), f"@openai/codex@{VERSION}")
        subprocess.run([npm, *arguments], check=True, timeout=240)
    return command


def test_codex_calls_a_tool_and_answers(codex: Path, smollm2_gguf: Path, tmp_path: Path) -> None:
    script, home, work = tmp_path / "script.json", tmp_path / "home", tmp_path / "work"
    script.write_text(json.dumps(RULES))
    home.mkdir()
    work.mkdir()
    (work / "notes.txt").write_text("buy milk\n")
    engine = ("--load-format", "scripted", "--script", str(script), "--max-model-len", "32k")
    with LiveServer(smollm2_gguf, engine, ("--tool-call-parser", "hermes")) as server:
        (home / "config.toml").write_text(CONFIG.format(name=server.name, url=server.url))
        ran = subprocess.run(
            [str(codex), "exec", "--skip-git-repo-check", "--json", "please read my notes"],
            cwd=work,
            env={**os.environ, "CODEX_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
    events: list[dict[str, Any]] = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert ran.returncode == 0, ran.stdout + ran.stderr
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    (command,) = [item for item in items if item["type"] == "command_execution"]
    assert (command["aggregated_output"], command["exit_code"]) == ("buy milk\n", 0)
    assert [item["text"] for item in items if item["type"] == "agent_message"] == ["The notes say: buy milk."]
    assert events[-1]["type"] == "turn.completed" and events[-1]["usage"]["output_tokens"] > 0
