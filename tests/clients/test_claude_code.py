"""Anthropic's Claude Code, as npm has it, works with headrace: one prompt, one tool call, one answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.api.live_server import LiveServer
from tests.conftest import TEST_CACHE

pytestmark = pytest.mark.clients

VERSION = "2.1.197"
PACKAGE = "@anthropic-ai/claude-code"


@pytest.fixture(scope="module")
def claude() -> Path:
    """The command, installed once. Its package fetches nothing more when it is told to run its own script."""
    folder = TEST_CACHE / f"claude-code-{VERSION}"
    command = folder / "node_modules" / ".bin" / "claude"
    if not command.exists():
        npm = shutil.which("npm")
        assert npm is not None, "this test needs npm"
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [npm, "install", "--no-fund", "--no-audit", "--prefix", folder, f"{PACKAGE}@{VERSION}"], check=True, timeout=240
        )
        subprocess.run(
            [shutil.which("node") or "node", "install.cjs"], cwd=folder / "node_modules" / PACKAGE, check=True, timeout=240
        )
    return command


def test_claude_code_calls_a_tool_and_answers(claude: Path, smollm2_gguf: Path, tmp_path: Path) -> None:
    work, script = tmp_path / "work", tmp_path / "script.json"
    work.mkdir()
    (work / "notes.txt").write_text("buy milk\n")
    call = {"name": "Read", "arguments": {"file_path": str(work / "notes.txt")}}
    answers = [f"I read them.\n<tool_call>\n{json.dumps(call)}\n</tool_call>", "The notes say: buy milk."]
    script.write_text(json.dumps([{"match": "notes.txt", "answer": answers}, {"answer": "Well."}]))
    engine = ("--load-format", "scripted", "--script", str(script), "--max-model-len", "128k")
    with LiveServer(smollm2_gguf, engine, ("--tool-call-parser", "hermes")) as server:
        ran = subprocess.run(
            [
                claude,
                "-p",
                "What do my notes.txt say?",
                "--model",
                server.name,
                "--allowedTools",
                "Read",
                "--output-format",
                "json",
            ],
            cwd=work,
            env={
                **os.environ,
                "HOME": str(tmp_path),
                "ANTHROPIC_BASE_URL": server.url,
                "ANTHROPIC_API_KEY": "none",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_AUTOUPDATER": "1",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        asked = server.http.get("/v1/requests", params={"state": "all"}).json()["data"]
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads(ran.stdout)
    assert (told["is_error"], told["num_turns"], told["result"]) == (False, 2, "The notes say: buy milk.")
    assert [(request["endpoint"], request["finish_reason"]) for request in asked] == [("/v1/messages", "stop")] * 2
