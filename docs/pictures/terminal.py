"""Makes terminal.svg: a session with a server that this script starts on the demo model. `python docs/pictures/terminal.py`

Everything in the picture is what the commands print. Only the prompts and the order of the commands are written here.
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

COLUMNS = 118
PICTURE = Path(__file__).with_name("terminal.svg")
BIN = Path(sys.executable).parent
THEME = TerminalTheme(
    (22, 27, 34),
    (201, 209, 217),
    [
        (72, 79, 88),
        (255, 123, 114),
        (63, 185, 80),
        (210, 153, 34),
        (88, 166, 255),
        (188, 140, 255),
        (57, 197, 207),
        (177, 186, 196),
    ],
)
PROMPT = "$ "
QUESTION = {
    "stream": True,
    "ignore_eos": True,
    "max_tokens": 2000,
    "temperature": 0.2,
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
}
SVG = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  font-size: {char_height}px;
  line-height: {line_height}px;
}}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""  # rich's own, without fonts from the network


class Session:
    """A shell whose commands and output are kept as they stand on the terminal."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        self.text = ""

    def run(self, command: str) -> str:
        """Runs a command on a terminal of its own and waits for it."""
        self.text += f"\x1b[32m{PROMPT}\x1b[0m\x1b[1m{command}\x1b[0m\n"
        ours, theirs = pty.openpty()
        process = subprocess.Popen(["bash", "-c", command], cwd=self.folder, env=self.environment, stdout=theirs, stderr=theirs)
        os.close(theirs)
        output = b""
        while chunk := _read(ours):
            output += chunk
        process.wait()
        os.close(ours)
        printed = output.decode().replace("\r\n", "\n")
        self.text += printed
        return printed

    def start(self, command: str) -> subprocess.Popen[bytes]:
        """Runs a command in the background."""
        self.text += f"\x1b[32m{PROMPT}\x1b[0m\x1b[1m{command} &\x1b[0m\n"
        return subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=self.folder, env=self.environment)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # its other end was closed
        return b""


def record(folder: Path) -> str:
    """The session, with ANSI colours."""
    own = {"PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": str(COLUMNS), "HEADRACE_DATA_DIR": str(folder / "data")}
    environment = {**os.environ, **own}
    (folder / "question.json").write_text(json.dumps(QUESTION))
    session = Session(folder, environment)
    server = session.start("headrace serve demo --port 0 > serve.log 2> serve.err")
    try:
        environment["URL"] = _url(folder / "serve.log", server)
        curl = "curl -sN $URL/v1/chat/completions -H 'X-Request-Id: why-sky' --json @question.json > answer"
        client = session.start(curl)
        _until(lambda: (folder / "answer").exists() and (folder / "answer").read_bytes().count(b"data:") > 60)
        session.run("headrace ps")
        session.run("headrace abort why-sky")
        client.wait(10)
        session.run('grep -o \'"finish_reason":"abort"\' answer')
        session.run("headrace inspect why-sky")
        session.run("headrace usage")
    finally:
        server.terminate()
        server.wait(30)
    return session.text


def _url(log: Path, server: subprocess.Popen[bytes]) -> str:
    def found() -> re.Match[str] | None:
        assert server.poll() is None, "the server ended"
        return re.search(r" on (http://\S+);", log.read_text()) if log.exists() else None

    return _until(found)[1]


def _until(condition, seconds: float = 300.0):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "too late"
        time.sleep(0.02)  # between looks at files that other processes write
    return result


def draw(session: str) -> None:
    with open(os.devnull, "w") as nowhere:
        console = Console(width=COLUMNS, record=True, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(session.strip()), soft_wrap=False, overflow="fold")
        PICTURE.write_text(console.export_svg(title="headrace", theme=THEME, code_format=SVG, unique_id="t"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        recorded = record(Path(folder))
    print(recorded)
    draw(recorded)
