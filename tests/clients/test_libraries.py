"""Other people's libraries, unchanged, against a running headrace. Each is a program that asserts by itself."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.live_server import LiveServer
from tests.conftest import TEST_CACHE

pytestmark = pytest.mark.clients

HERE = Path(__file__).parent
INSTALL_SECONDS = 900
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PERSON = '{"name": "Ada", "age": 36}'
RULES = [
    {"match": "weather in Oslo", "answer": [CALL, "It is cold."]},
    {"match": "person as a call", "answer": f'<tool_call>\n{{"name": "Person", "arguments": {PERSON}}}\n</tool_call>'},
    {"match": "person as JSON", "answer": PERSON},
    {"match": "hello", "answer": "Hi there."},
]


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    script = tmp_path_factory.mktemp("script") / "script.json"
    script.write_text(json.dumps(RULES))
    engine = ("--load-format", "scripted", "--script", str(script), "--max-model-len", "32k")
    with LiveServer(smollm2_gguf, engine, ("--tool-call-parser", "hermes")) as server:
        yield server


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of an environment that has the libraries, made once for each list of versions."""
    requirements = HERE / "python" / "requirements.txt"
    folder = TEST_CACHE / f"clients-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]}"
    interpreter = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([interpreter, "-m", "pip", "install", "--quiet", "-r", requirements], check=True, timeout=INSTALL_SECONDS)
        (folder / "complete").touch()
    return interpreter


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of package.json and the programs that use them."""
    source = HERE / "node"
    folder = TEST_CACHE / f"clients-node-{hashlib.sha256((source / 'package.json').read_bytes()).hexdigest()[:12]}"
    if not (folder / "complete").exists():
        npm = shutil.which("npm")
        assert npm is not None, "these tests need npm"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(source / "package.json", folder)
        subprocess.run([npm, "install", "--no-fund", "--no-audit", "--prefix", folder], check=True, timeout=INSTALL_SECONDS)
        (folder / "complete").touch()
    for program in source.glob("*.mjs"):
        shutil.copy(program, folder)
    return folder


def run(*command: str | Path) -> None:
    environment = {**os.environ, "NO_PROXY": "127.0.0.1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("program", sorted(path.name for path in (HERE / "python").glob("use_*.py")))
def test_a_python_library_works(python: Path, server: LiveServer, program: str) -> None:
    run(python, HERE / "python" / program, server.url, server.name)


@pytest.mark.parametrize("program", sorted(path.name for path in (HERE / "node").glob("use_*.mjs")))
def test_a_node_library_works(node: Path, server: LiveServer, program: str) -> None:
    run("node", node / program, server.url, server.name)
